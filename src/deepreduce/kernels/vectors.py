"""Steps for which numba has no name, most on many elements at once, in the words of LLVM: it picks the instructions of the machine."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64
SPAN = 128
FEW = 32


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any, lanes: int) -> Any:
    """`lanes` neighbours of an array as one vector."""
    from numba.np.arrayobj import make_array

    vector = ir.VectorType(context.get_data_type(kind.dtype), lanes)
    data = make_array(kind)(context, builder, array).data  # type: ignore[no-untyped-call]
    loaded = builder.load(builder.bitcast(builder.gep(data, [at]), vector.as_pointer()))
    loaded.align = 1
    return loaded


def _unequal(typing: Any, left: Any, right: Any, at: Any) -> Any:
    """Bit j of the result says whether left[at + j] and right[at + j] differ; LANES elements must exist from `at` on in both."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = [_load(context, builder, kind, array, arguments[2], LANES) for kind, array in zip((left, right), arguments, strict=False)]
        return builder.bitcast(builder.icmp_unsigned("!=", *vectors), ir.IntType(LANES))

    return types.uint64(left, right, at), emit


unequal: Any = intrinsic(_unequal)


def _broadcast(builder: Any, vector: Any, number: Any) -> Any:
    """Return a vector of this type with one number in all lanes."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count))


def _count_up_to(typing: Any, array: Any, at: Any, limit: Any) -> Any:
    """How many of the SPAN elements of a uint32 array from `at` on are not above `limit`, a uint32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = _load(context, builder, array, arguments[0], arguments[1], SPAN)
        limits = _broadcast(builder, found.type, arguments[2])
        passed = builder.bitcast(builder.icmp_unsigned("<=", found, limits), ir.IntType(SPAN))
        return builder.trunc(builder.ctpop(passed), ir.IntType(64))

    return types.uint64(array, at, types.uint32), emit


count_up_to: Any = intrinsic(_count_up_to)


def _count_with_bit(typing: Any, array: Any, at: Any, bit: Any) -> Any:
    """How many of the FEW elements of an array of unsigned integers from `at` on have this bit, a uint64 with no other."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = _load(context, builder, array, arguments[0], arguments[1], FEW)
        number = arguments[2] if found.type.element.width == 64 else builder.trunc(arguments[2], found.type.element)
        with_bit = builder.icmp_unsigned("!=", builder.and_(found, _broadcast(builder, found.type, number)), ir.Constant(found.type, None))
        return builder.zext(builder.ctpop(builder.bitcast(with_bit, ir.IntType(FEW))), ir.IntType(64))

    return types.uint64(array, at, types.uint64), emit


count_with_bit: Any = intrinsic(_count_with_bit)


def _leading_zeros(typing: Any, number: Any) -> Any:
    """How many zeros are above the highest set bit of a number that is not 0."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), emit


leading_zeros: Any = intrinsic(_leading_zeros)


def _prefetch(write: int) -> Any:
    """Return an intrinsic that prefetches the cache line of array[at], to read or to write it."""

    def prefetch(typing: Any, array: Any, at: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            from numba.np.arrayobj import make_array

            data = make_array(array)(context, builder, arguments[0]).data  # type: ignore[no-untyped-call]
            pointer, number = builder.gep(data, [arguments[1]]), ir.IntType(32)
            types_of = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], types_of)
            builder.call(function, [pointer, number(write), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(array, at), emit

    return intrinsic(prefetch)


prefetch_to_read: Any = _prefetch(0)
prefetch_to_write: Any = _prefetch(1)
