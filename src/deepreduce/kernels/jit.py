"""The one way a kernel is compiled: without the GIL, cached on disk."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from .announce import announce_compilation
from .saving import name_files_by_content

announce_compilation()

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile a loop over numpy arrays; numba infers the types at the first call."""
    return _compiled(function)


def inline(function: F) -> F:
    """Compile a small step that kernels call inside their loops."""
    return _compiled(function, inline="always")


def _compiled(function: F, **options: Any) -> F:
    compiled = numba.njit(nogil=True, cache=True, **options)(function)
    if compiled is not function:  # as it is with NUMBA_DISABLE_JIT
        name_files_by_content(compiled)
    return cast(F, compiled)
