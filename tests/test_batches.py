"""Every batched form gives what the form for one tensor gives: the same positions, bytes, values and errors."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.errors import FormatError
from deepreduce.kernels.selection import SMALL, Hint, top, top_hinted
from deepreduce.pipeline import decode_batch, encode_batch, restore
from deepreduce.reader import Reader
from deepreduce.registry import INDEX_STAGE, SPARSIFIER_STAGE, VALUE_STAGE
from deepreduce.source import DenseSource, Space, as_source
from deepreduce.tensor import FLOAT_DTYPES, Support

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


@pytest.mark.parametrize("index", ["rice", "delta", "raw"])
def test_an_error_is_that_of_the_tensor_alone_and_names_it(index):
    codec, names = dr.parse(f"topr:0.1/{index}/qsgd"), list("abc")
    gradients = [np.random.default_rng(n).standard_normal(400).astype(np.float32) for n in range(3)]
    records = encode_batch([codec] * 3, [DenseSource(gradient) for gradient in gradients], [1, 2, 3], names, [None] * 3)
    for part in ("index_part", "value_part"):
        for change in (lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b"\xff" * len(raw)):
            broken = list(records)
            broken[1] = type(records[1])(**vars(records[1]) | {part: change(bytes(getattr(records[1], part)))})
            alone = refusal(lambda broken=broken: restore(broken[1]))
            if alone is not None:
                together = refusal(lambda broken=broken: decode_batch(broken, [Space] * 3, names))
                assert (type(together), str(together)) == (type(alone), f"b: {alone}")


def refusal(decode):
    """The error by which something is refused; None if it is not."""
    try:
        decode()
    except FormatError as error:
        return error
    return None


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_hint_changes_nothing_that_is_selected(dtype):
    rng, hint, dtype = np.random.default_rng(0), Hint(), np.dtype(dtype)
    for step in range(12):
        array = (rng.standard_normal(2 * SMALL) * 10.0 ** rng.integers(-2, 3)).astype(dtype)
        if step == 7:
            array[rng.integers(0, array.size, 2000)] = np.nan
        bits = array.view(f"u{dtype.itemsize}")
        for count in (1, 300):
            assert np.array_equal(top_hinted(bits, dtype, count, hint), top(bits, dtype, count))
