"""The hot loops, compiled by numba at first use and cached.

Submodules load on first touch (``kernels.bits.pack``), so that importing deepreduce does not import numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import bits as bits
    from . import bloom as bloom
    from . import codes as codes
    from . import deltabatch as deltabatch
    from . import dexp as dexp
    from . import draw as draw
    from . import fit as fit
    from . import gaps as gaps
    from . import half as half
    from . import hazard as hazard
    from . import hazardcoder as hazardcoder
    from . import huffman as huffman
    from . import lloyd as lloyd
    from . import policies as policies
    from . import prefixes as prefixes
    from . import qsgdbatch as qsgdbatch
    from . import quantise as quantise
    from . import rans as rans
    from . import rice as rice
    from . import ricebatch as ricebatch
    from . import runs as runs
    from . import scatter as scatter
    from . import selection as selection
    from . import shaped as shaped
    from . import sketch as sketch
    from . import steps as steps
    from . import tablesize as tablesize
    from . import ternary as ternary
    from . import tokens as tokens
    from . import uniform as uniform
    from . import vectors as vectors


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"no kernel module {name!r}") from None
