from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from ..errors import CorruptError
from ..tensor import Values
from .fitpoly import CurveCodec


@dataclass(frozen=True)
class FitDExp(CurveCodec):
    """`fitdexp`: sorted values as double exponentials y = a e^(bx) + c e^(dx), two for each block of `block` values (paper, section 5).

    Lossy; changes the order as `fitpoly` does. The positive and the negative part of a block take four numbers each, be they ever so long.
    A closed form by integral equations starts the search, damped Gauss-Newton steps refine it. A part of four values or fewer, or one
    where the search finds nothing as good as a straight line, goes by polynomials of degree 5 as with `fitpoly`, and its runs say so.

    >>> import deepreduce as dr, numpy as np
    >>> gradient = np.random.default_rng(0).standard_normal(20000).astype(np.float32)
    >>> blob = dr.parse("topr:0.01/raw/fitdexp").encode(gradient)
    >>> dr.inspect(blob).value_bytes, dr.inspect(blob).nnz
    (36, 200)
    >>> sent, exact = dr.decode_sparse(blob), gradient[dr.decode_sparse(blob).indices]
    >>> float(np.linalg.norm(sent.values - exact) / np.linalg.norm(exact)) < 0.02
    True
    """

    block: int = 256

    kind_bits: ClassVar[int] = 3
    kinds: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_block()

    @property
    def polynomial_degree(self) -> int:
        return 5

    @property
    def smallest_curve_bytes(self) -> int:
        return 4 * kernels.dexp.PARAMETERS

    def _runs(self, descending: Values) -> tuple[Values, Values, Values]:
        fit = kernels.fit
        return fit.encode(descending, self.block, self.polynomial_degree, fit.TARGET, exponential=True)

    def _check_coefficients(self, kinds: Values, terms: Values, coefficients: Values) -> None:
        dexp = kernels.dexp
        starts = (terms.cumsum() - terms)[kinds >= kernels.fit.POSITIVE_DEXP]
        rates = coefficients[np.concatenate([starts + 2, starts + 3])]
        if np.any(rates > dexp.FASTEST_GROWTH) or np.any(rates < dexp.FASTEST_DECAY):
            raise CorruptError(f"a rate lies outside of {dexp.FASTEST_DECAY:g} to {dexp.FASTEST_GROWTH:g}")
