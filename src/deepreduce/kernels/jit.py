"""The one way a kernel is compiled: without the GIL, cached on disk."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

from .announce import announce_compilation

announce_compilation()

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile a loop over numpy arrays; numba infers the types at the first call."""
    return cast(F, numba.njit(nogil=True, cache=True)(function))


def inline(function: F) -> F:
    """Compile a small step that kernels call inside their loops."""
    return cast(F, numba.njit(nogil=True, cache=True, inline="always")(function))
