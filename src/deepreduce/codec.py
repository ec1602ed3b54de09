"""What a sparsifier, an index codec and a value codec are: three short contracts.

Each is a frozen dataclass. Its fields are its parameters: they make its spec string, travel in the header of every message, and are
checked in ``__post_init__`` by raising `ConfigError`: their types by `Codec`, then their ranges by each codec. The reader builds the
same object from the header and calls its `decode`.

The tensors of one message are given to a codec together, by the methods that end in ``_batch``. Each of them loops over the method for one
tensor; a codec that overrides it does the same work, with the same result, in few calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from . import reorder
from .errors import ConfigError
from .parameters import check_parameters, format_value, parameters
from .reader import Part, Reader
from .reorder import Order
from .source import Source, Space
from .tensor import Positions, Support, Values, as_support


def spelled(default: Any) -> Any:
    """A parameter that the spec string shows even where it has its default, as readers want to see it."""
    return field(default=default, metadata={"spelled": True})


class Codec:
    """What the three have in common: parameters of declared types."""

    def __post_init__(self) -> None:
        check_parameters(self)

    @cached_property
    def argument_text(self) -> str:
        """All parameters in order, as messages carry them; defaults too, as a message must not change its meaning when a default does.

        >>> import deepreduce as dr
        >>> dr.ChunkTopR(32).argument_text
        '32,4096'
        """
        return ",".join(format_value(getattr(self, name)) for name in parameters(type(self)))


class Sparsifier(Codec, ABC):
    """Chooses which positions of a gradient are sent.

    >>> from deepreduce.source import as_source
    >>> class Positive(Sparsifier):
    ...     def select(self, source, seed):
    ...         given = source.all()
    ...         return given.positions[source.gather(given) > 0]
    >>> Positive().select(as_source(np.float32([1, -4, 2, 0])), seed=0)
    array([0, 2])
    """

    lossless: ClassVar[bool] = False
    """Whether everything but zeros is selected."""

    selects_nonfinite: ClassVar[bool] = False
    """Whether every NaN and infinity is always among what is selected."""

    @abstractmethod
    def select(self, source: Source, seed: int) -> Support | Positions:
        """The selected positions; the same for the same gradient and seed. An array must increase: that is checked."""

    def select_batch(self, sources: Sequence[Source], seeds: Sequence[int]) -> list[Support]:
        """Return the selected positions of each gradient."""
        return [as_support(self.select(source, seed), source.numel) for source, seed in zip(sources, seeds, strict=True)]

    def expected_nnz(self, numel: int) -> int | None:
        """How many of `numel` elements of a dense gradient are selected; None where their values decide."""
        return None

    @property
    def density(self) -> float | None:
        """The share of the elements that is selected, whatever their number; None where there is no such share."""
        return None

    def with_density(self, density: float) -> Sparsifier:
        """Return this sparsifier with another density; `ConfigError` where it has none."""
        raise ConfigError(f"{type(self).__name__} has no density")


class IndexCodec(Codec, ABC):
    """Turns positions into bytes and back.

    >>> class Wide(IndexCodec):
    ...     def encode(self, selected, space, seed):
    ...         return selected.positions.astype("<u8").tobytes(), selected
    ...     def decode(self, part, nnz, space):
    ...         return part.array("<u8", nnz).astype(np.int64)
    >>> section, support = Wide().encode(Support([3, 500], numel=1024), Space((32, 32)), seed=0)
    >>> Wide().decode(Reader(section), 2, Space((32, 32)))
    array([  3, 500])
    """

    lossless: ClassVar[bool] = True
    """Whether the reader always sees exactly the positions that the sparsifier selected."""

    @property
    def slips(self) -> bool:
        """True where the reader puts the values elsewhere than the writer read them: naive Bloom only, the paper's bad example."""
        return False

    def choose(self, selected: Support, space: Space) -> IndexCodec:
        """The codec to use for this tensor; it is the one the message names."""
        return self

    @abstractmethod
    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support | Positions]:
        """The index section, and the support: the positions that the reader will see, at which the values are read."""

    @abstractmethod
    def decode(self, part: Reader, nnz: int, space: Space) -> Support | Positions:
        """The `nnz` positions of the support: an array in any order, or a `Support`.

        The pipeline checks and sorts an array, and trusts a `Support`. It also checks that `part` was read to its end.
        """

    def encode_batch(
        self, selected: Sequence[Support], spaces: Sequence[Space], seeds: Sequence[int]
    ) -> list[tuple[IndexCodec, Part, Support]]:
        """Return the codec used for each tensor, its index section and its support."""
        encoded: list[tuple[IndexCodec, Part, Support]] = []
        for own, space, seed in zip(selected, spaces, seeds, strict=True):
            codec = self.choose(own, space)
            part, support = codec.encode(own, space, seed)
            encoded.append((codec, part, as_support(support, space.numel)))
        return encoded

    def decode_batch(self, parts: Sequence[Part], counts: Sequence[int], spaces: Sequence[Space]) -> list[Support | Positions]:
        """Return the positions of each section, which is read to its end."""
        decoded = []
        for part, nnz, space in zip(parts, counts, spaces, strict=True):
            reader = Reader(part)
            decoded.append(self.decode(reader, nnz, space))
            reader.expect_end()
        return decoded

    def attach(self, index_part: Part, support: Support, order: Order, space: Space) -> tuple[Part, bytes]:
        """The index and the order section, where the value codec has returned an order. Not called where it has returned None."""
        return index_part, reorder.encode(order)

    def max_bytes(self, nnz: int, space: Space) -> int:
        """A bound on the size of the index section."""
        return 64 + 8 * nnz

    def expected_bits(self, nnz: int, numel: int) -> float | None:
        """About how many bits `nnz` random positions of `numel` take; None where that is not known beforehand."""
        return None


class ValueCodec(Codec, ABC):
    """Turns a flat array of floats into bytes and back.

    >>> class Plain(ValueCodec):
    ...     def encode(self, values, seed):
    ...         return values.tobytes(), None
    ...     def decode(self, part, nnz, dtype):
    ...         return part.array(dtype, nnz)
    >>> section, order = Plain().encode(np.float32([0.5, -4]), seed=0)
    >>> Plain().decode(Reader(section), 2, np.dtype(np.float32))
    array([ 0.5, -4. ], dtype=float32)
    """

    lossless: ClassVar[bool] = True
    """Whether every value comes back with the same bits."""

    def choose(self, values: Values) -> ValueCodec:
        """The codec to use for these values; it is the one the message names."""
        return self

    @abstractmethod
    def encode(self, values: Values, seed: int) -> tuple[bytes, Order | None]:
        """The value section, and the order its values come back in (None: as given)."""

    @abstractmethod
    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        """The `nnz` values in the order announced. The pipeline checks that `part` was read to its end."""

    def encode_batch(self, values: Sequence[Values], seeds: Sequence[int]) -> list[tuple[ValueCodec, Part, Order | None]]:
        """Return the codec used for each array, its value section and its order."""
        encoded: list[tuple[ValueCodec, Part, Order | None]] = []
        for own, seed in zip(values, seeds, strict=True):
            codec = self.choose(own)
            encoded.append((codec, *codec.encode(own, seed)))
        return encoded

    def decode_batch(self, parts: Sequence[Part], counts: Sequence[int], dtype: np.dtype[Any]) -> list[Values]:
        """Return the values of each section, which is read to its end."""
        decoded = []
        for part, nnz in zip(parts, counts, strict=True):
            reader = Reader(part)
            decoded.append(self.decode(reader, nnz, dtype))
            reader.expect_end()
        return decoded

    def error_bound(self, values: Values) -> Values | float:
        """A bound on \\|decoded - value\\|, for each value or for all; 0 where lossless."""
        return 0.0

    def max_bytes(self, nnz: int, dtype: np.dtype[Any]) -> int:
        """A bound on the size of the value section."""
        return 64 + nnz * dtype.itemsize * 9 // 8

    def expected_bits(self, nnz: int) -> float | None:
        """About how many bits `nnz` values of float32 take; None where the values decide."""
        return None


class LossyValueCodec(ValueCodec):
    """A value codec that computes in float32: values it cannot hold, NaN and Inf among them, are sent raw instead.

    >>> import deepreduce as dr
    >>> dr.QSGD().choose(np.float32([1, np.nan]))
    RawValue()
    """

    lossless: ClassVar[bool] = False

    largest: ClassVar[float] = float(np.finfo(np.float32).max)
    """The largest magnitude this codec takes."""

    def choose(self, values: Values) -> ValueCodec:
        from .values.floats import peak
        from .values.raw import RawValue  # raw is a ValueCodec itself, so this cannot stand at the top

        return self if peak(values) <= self.largest else RawValue()
