"""Every batched form gives what the form for one tensor gives: the same positions, bytes, values and errors."""

from functools import partial

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.errors import FormatError
from deepreduce.kernels import sampled
from deepreduce.kernels.selection import SMALL, top, top_found
from deepreduce.pipeline import decode_batch, encode_batch, restore
from deepreduce.reader import Reader
from deepreduce.registry import INDEX_STAGE, SPARSIFIER_STAGE, VALUE_STAGE
from deepreduce.source import DenseSource, Space, as_source
from deepreduce.step import items
from deepreduce.step.items import OutgoingTensor
from deepreduce.step.seeds import StepSeed
from deepreduce.step.topology import AllGather, Sharded
from deepreduce.tensor import FLOAT_DTYPES, Support, as_support

from .samples import codecs_of
from .tensors import same_bits

SPARSIFIERS = [pytest.param(codec, id=piece) for piece, codec in codecs_of(SPARSIFIER_STAGE)]
INDICES = [pytest.param(codec, id=piece) for piece, codec in codecs_of(INDEX_STAGE)]
VALUES = [pytest.param(codec, id=piece) for piece, codec in codecs_of(VALUE_STAGE)]
SHAPES = [(), (0,), (1,), (7, 5), (64,), (3, 4, 50), (2048,), (40, 33)]


def tensors(dtype: np.dtype, special: bool) -> list[np.ndarray]:
    """Tensors of many sizes; some with ties, zeros, and, if `special`, what is not finite."""
    rng = np.random.default_rng(5)
    made = [np.asarray(rng.standard_normal(shape) ** 3).astype(dtype) for shape in SHAPES]
    made += [np.zeros(100, dtype), np.ones(90, dtype), np.repeat(made[4], 3)]
    if special:
        made.append(np.array([np.nan, 1, -np.inf, 2, 0, -0.0] * 20, dtype))
    return made


def supports() -> tuple[list[Support], list[Space]]:
    rng = np.random.default_rng(6)
    made, spaces = [], []
    for shape in [*SHAPES, (700, 300)]:
        space = Space(shape)
        for density in (0.0, 0.004, 0.2, 1.0):
            made.append(Support(np.flatnonzero(rng.random(space.numel) < density), space.numel))
            spaces.append(space)
    return made, spaces


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("codec", SPARSIFIERS)
def test_select(codec, dtype):
    sources = [as_source(tensor) for tensor in tensors(dtype, special=True)]
    seeds = list(range(len(sources)))
    together = codec.select_batch(sources, seeds)
    for source, seed, support in zip(sources, seeds, together, strict=True):
        alone = codec.select(source, seed)
        assert (support.numel, support.positions.tolist()) == (source.numel, alone.positions.tolist())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("codec", SPARSIFIERS)
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1), slice(2, 6), slice(None, None, 2)])
def test_select_from_one_array(codec, dtype, order):
    given = [tensor for tensor in tensors(dtype, special=True) if tensor.size]
    memory = np.concatenate([tensor.reshape(-1) for tensor in given])
    bounds = np.cumsum([0, *(tensor.size for tensor in given)])
    sources = DenseSource.between(memory, bounds, [tensor.shape for tensor in given])[order]
    for source, tensor, support in zip(sources, given[order], codec.select_batch(sources, [7] * len(sources)), strict=True):
        alone = DenseSource(tensor)
        expected = as_support(codec.select(alone, 7), tensor.size)
        assert (source.space.shape, support.positions.tolist()) == (tensor.shape, expected.positions.tolist())
        assert same_bits(source.gather(support), tensor.reshape(-1)[expected.positions])


@pytest.mark.parametrize("codec", INDICES)
def test_index(codec):
    selected, spaces = supports()
    seeds = list(range(len(selected)))
    together = codec.encode_batch(selected, spaces, seeds)
    parts = []
    for own, space, seed, (used, part, support) in zip(selected, spaces, seeds, together, strict=True):
        chosen = codec.choose(own, space)
        alone, announced = chosen.encode(own, space, seed)
        positions = announced.positions if isinstance(announced, Support) else announced
        assert (used, bytes(part), support.positions.tolist()) == (chosen, alone, positions.tolist())
        parts.append((used, part, support.nnz, space))
    for used in {used for used, *_ in parts}:
        own = [entry for entry in parts if entry[0] == used]
        decoded = used.decode_batch([entry[1] for entry in own], [entry[2] for entry in own], [entry[3] for entry in own])
        for positions, (_, part, nnz, space) in zip(decoded, own, strict=True):
            alone = used.decode(Reader(part), nnz, space)
            assert isinstance(positions, Support) == isinstance(alone, Support)
            flat = [found.positions if isinstance(found, Support) else found for found in (positions, alone)]
            assert np.array_equal(*flat)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("codec", VALUES)
def test_values(codec, dtype, special):
    values = [tensor.reshape(-1) for tensor in tensors(dtype, special)]
    seeds = list(range(10**6, 10**6 + len(values)))
    together = codec.encode_batch(values, seeds)
    for own, seed, (used, part, order) in zip(values, seeds, together, strict=True):
        chosen = codec.choose(own)
        alone, alone_order = chosen.encode(own, seed)
        assert (used, bytes(part)) == (chosen, alone)
        assert (order is None) == (alone_order is None)
        assert order is None or np.array_equal(order.permutation, alone_order.permutation)
    for used in {used for used, _, _ in together}:
        own = [(part, array.size) for array, (other, part, _) in zip(values, together, strict=True) if other == used]
        decoded = used.decode_batch([part for part, _ in own], [nnz for _, nnz in own], np.dtype(dtype))
        for array, (part, nnz) in zip(decoded, own, strict=True):
            assert same_bits(array, used.decode(Reader(part), nnz, np.dtype(dtype)))


@pytest.mark.parametrize("codec", [dr.TopR(3), dr.ChunkTopR(2, 64), dr.Threshold(0.5)], ids=repr)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_select_from_one_from_large_ones_and_from_sparse_ones(codec, dtype):
    rng = np.random.default_rng(8)
    large = rng.standard_normal(SMALL + 5).astype(dtype)
    sparse = dr.SparseTensor([2, 3, 90], np.array([1, -2, np.nan], dtype), (100,))
    for gradients in ([large], [large[:50]], [large[:0]], [large[:50], large, sparse, large[:1], large[:0], sparse]):
        sources = [as_source(gradient) for gradient in gradients]
        together = codec.select_batch(sources, [0] * len(sources))
        for source, support in zip(sources, together, strict=True):
            assert (support.numel, support.positions.tolist()) == (source.numel, codec.select(source, 0).positions.tolist())


@pytest.mark.parametrize("codec", [dr.Delta(), dr.Rice(), dr.RawIndex()], ids=repr)
def test_index_of_one_tensor_of_runs_and_of_very_large_tensors(codec):
    runs, wide = Support(np.arange(5, 400), 500), Support([0, 7, 2**40], 2**41)
    beyond = Support([1, 2**60], 2**61)
    for selected in ([runs], [wide], [runs, wide, Support.none(0), Support.all(3)], [runs, beyond]):
        spaces = [Space((support.numel,)) for support in selected]
        together = codec.encode_batch(selected, spaces, [0] * len(selected))
        for own, space, (used, part, _) in zip(selected, spaces, together, strict=True):
            assert used == codec.choose(own, space)
            assert bytes(part) == used.encode(own, space, 0)[0]
            decoded = used.decode_batch([part, part], [own.nnz] * 2, [space] * 2)[1]
            assert np.array_equal(decoded.positions if isinstance(decoded, Support) else decoded, own.positions)


@pytest.mark.parametrize("codec", [dr.FP16(), dr.BF16(), dr.RawValue(), dr.QSGD()], ids=repr)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_each_array_of_values_is_handed_over_by_itself(codec, dtype):
    tiny, ordinary, huge = np.full(9, 2e-8), np.linspace(-2, 2, 40), np.array([1.0, 1e5, -3e38])
    border = np.append(np.full(100, 3e-8), 4096 * 3e-8 * np.linspace(0, 4, 7)[3])
    broken, signed = np.array([np.nan, np.inf, 1e-8, -np.inf]), np.array([0.0, -0.0])
    for group in ([tiny], [huge], [tiny, ordinary, border, signed, tiny, []], [tiny, ordinary, huge, broken, signed, []]):
        with np.errstate(over="ignore"):
            values = [np.array(array).astype(dtype) for array in group]
        together = codec.encode_batch(values, range(len(values)))
        for seed, (own, (used, part, _)) in enumerate(zip(values, together, strict=True)):
            assert used == codec.choose(own)
            assert bytes(part) == used.encode(own, seed)[0]
            for decoded in used.decode_batch([part, part], [own.size] * 2, np.dtype(dtype)):
                assert same_bits(decoded, used.decode(Reader(part), own.size, np.dtype(dtype)))
                assert decoded.flags.writeable


def test_values_sent_raw_are_a_copy():
    gradient = np.ones(4, np.float32)
    encoded = [*dr.RawValue().encode_batch([gradient], [0]), *dr.RawValue().encode_batch([gradient, gradient], [0, 0])]
    gradient[:] = 2
    assert all(bytes(part) == np.ones(4, np.float32).tobytes() for _, part, _ in encoded)


@pytest.mark.parametrize(("index", "value"), [("rice", "qsgd"), ("delta", "raw"), ("raw", "fp16"), ("delta", "bf16")])
def test_an_error_is_that_of_the_tensor_alone_and_names_it(index, value):
    codec, names = dr.parse(f"topr:0.1/{index}/{value}"), list("abc")
    gradients = [np.random.default_rng(n).standard_normal(400).astype(np.float32) for n in range(3)]
    records = encode_batch([codec] * 3, [DenseSource(gradient) for gradient in gradients], [1, 2, 3], names, [None] * 3)
    for part in ("index_part", "value_part"):
        for change in (lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b"\xff" * len(raw)):
            broken = list(records)
            broken[1] = records[1]._replace(**{part: change(bytes(getattr(records[1], part)))})
            alone = refusal(lambda broken=broken: restore(broken[1]))
            if alone is not None:
                together = refusal(lambda broken=broken: decode_batch(broken, [Space(gradient.shape) for gradient in gradients], names))
                assert (type(together), str(together)) == (type(alone), f"b: {alone}")


def refusal(decode):
    """The error by which something is refused; None if it is not."""
    try:
        decode()
    except FormatError as error:
        return error
    return None


def in_rows(rng, size):
    """A gradient of which a few rows are much larger than the others."""
    rows = rng.standard_normal((size // 64, 64)) * np.exp(rng.standard_normal((size // 64, 1)))
    return rows.reshape(-1)


def mostly_zero(rng, size):
    """A gradient of an embedding."""
    return rng.standard_normal(size) * (rng.random(size) < 0.004)


def one_size(rng, size):
    """Everything ties."""
    return np.where(rng.random(size) < 0.5, 1.0, -1.0)


def broken(rng, size):
    """Many elements are not finite."""
    dense = rng.standard_normal(size)
    dense[rng.integers(0, size, 2000)] = np.nan
    dense[rng.integers(0, size, 20)] = -np.inf
    return dense


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("made", [np.random.Generator.standard_normal, in_rows, mostly_zero, one_size, broken])
def test_a_sample_changes_nothing_that_is_selected(dtype, made):
    rng = np.random.default_rng(0)
    for size in (SMALL, 4 * SMALL, 4 * SMALL + 13):
        array = made(rng, size // 64 * 64).astype(dtype)
        bits = array.view(f"u{dtype.itemsize}")
        for count in (1, 2, 300, size // 100, size // 8, size // 2):
            positions, found = top_found(bits, dtype, count)
            assert np.array_equal(positions, top(bits, dtype, count))
            assert np.array_equal(found, bits[positions])


@pytest.mark.parametrize("count", [100, 1000])
def test_the_sample_is_enough_for_an_ordinary_gradient(count):
    bits = np.random.default_rng(1).standard_normal(4 * SMALL, np.float32).view(np.uint32)
    assert sampled.largest(bits, np.uint32(2**31 - 1), np.uint32(0x7F800000), count) is not None


@pytest.mark.parametrize("topology", [AllGather(), Sharded()], ids=["allgather", "sharded"])
def test_messages_are_encoded_together_and_decoded_together(topology, monkeypatch):
    draw, codec = np.random.default_rng(1), dr.parse("topr:0.1/rice/qsgd")
    dense = [draw.standard_normal(size).astype(np.float32) for size in (50, 5000, 40_000)]
    tensors = [OutgoingTensor(str(array.size), array, codec, as_source(array)) for array in dense]
    calls = []
    for name in ("encode_batch", "decode_batch"):
        counted = partial(lambda name, function, *given: calls.append(name) or function(*given), name, getattr(items, name))
        monkeypatch.setattr(items, name, counted)
    messages = topology.encode(tensors, StepSeed(0, 0, 2), size=4)
    decoded = items.decode(messages)
    assert calls == ["encode_batch", "decode_batch"]
    for message, together in zip(messages, decoded, strict=True):
        alone = dr.decode_many_sparse(message.blob).values()
        assert [tensor.values.tobytes() for tensor in together] == [tensor.values.tobytes() for tensor in alone]
        assert [tensor.indices.tolist() for tensor in together] == [tensor.indices.tolist() for tensor in alone]


def two_tensors(spec):
    """A codec, and the arguments of `encode_batch` for two gradients."""
    codec = dr.parse(spec)
    sources = [DenseSource(np.random.default_rng(n).standard_normal(400).astype(np.float32)) for n in range(2)]
    return codec, ([codec] * 2, sources, [1, 2], ["a", "b"], [None] * 2)


def test_an_error_of_a_batch_is_raised_where_each_tensor_alone_can_be_encoded(monkeypatch):
    _, given = two_tensors("topr:0.1/rice/raw")

    def broken(*arguments):
        raise IndexError("only in a batch")

    monkeypatch.setattr(dr.Rice, "encode_batch", broken)
    with pytest.raises(IndexError, match="only in a batch"):
        encode_batch(*given)


def test_what_a_batch_refuses_is_refused_where_each_tensor_alone_can_be_decoded(monkeypatch):
    _, given = two_tensors("topr:0.1/rice/raw")
    records = encode_batch(*given)

    def refuses(*arguments):
        raise dr.CorruptError("only in a batch")

    monkeypatch.setattr(dr.Rice, "decode_batch", refuses)
    with pytest.raises(dr.CorruptError, match="only in a batch"):
        decode_batch(records, [source.space for source in given[1]], ["a", "b"])


@pytest.mark.parametrize(("value", "attached"), [("raw", 0), ("fitpoly", 2)])
def test_orders_are_attached_alike_to_one_tensor_and_to_many(value, attached, monkeypatch):
    codec, given = two_tensors(f"topr:0.1/raw/{value}")
    attach, calls = dr.RawIndex.attach, []
    monkeypatch.setattr(dr.RawIndex, "attach", lambda *arguments: calls.append(arguments[3]) or attach(*arguments))
    together = [[bytes(part) for part in record.sections] for record in encode_batch(*given)]
    assert len(calls) == attached
    alone = [codec.record(source, seed) for source, seed in zip(given[1], given[2], strict=True)]
    assert len(calls) == 2 * attached
    assert together == [[bytes(part) for part in record.sections] for record in alone]
