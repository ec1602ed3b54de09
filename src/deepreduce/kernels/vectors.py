"""Steps on many elements at once for which numba has no name, in the words of LLVM: it picks the instructions of the machine."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64


def _unequal(typing: Any, left: Any, right: Any, at: Any) -> Any:
    """Bit j of the result says whether left[at + j] and right[at + j] differ; LANES elements must exist from `at` on in both."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from numba.np.arrayobj import make_array

        lanes = ir.VectorType(context.get_data_type(left.dtype), LANES)

        def load(kind: Any, argument: Any) -> Any:
            array = make_array(kind)(context, builder, argument)  # type: ignore[no-untyped-call]
            pointer = builder.bitcast(builder.gep(array.data, [arguments[2]]), lanes.as_pointer())
            loaded = builder.load(pointer)
            loaded.align = 1
            return loaded

        differ = builder.icmp_unsigned("!=", load(left, arguments[0]), load(right, arguments[1]))
        return builder.bitcast(differ, ir.IntType(LANES))

    return types.uint64(left, right, at), emit


unequal: Any = intrinsic(_unequal)


def _leading_zeros(typing: Any, number: Any) -> Any:
    """How many zeros are above the highest set bit of a number that is not 0."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), emit


leading_zeros: Any = intrinsic(_leading_zeros)
