"""docs/format.md and docs/sections.md say all that a reader needs: one that was written from them reads every message, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

import deepreduce as dr
from deepreduce import message, registry
from deepreduce.lab.data import load

from . import plain_reader
from .golden.cases import cases, encode_case, pattern
from .messages import decode_any, gradient, messages, repaired, specs
from .samples import INDEX_SAMPLES, VALUE_SAMPLES
from .tensors import fixed_gradients

CASES = cases()
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def assert_reads(blob):
    """Both readers give the same bytes."""
    tensors = plain_reader.read(blob)
    expected = {None: dr.decode(blob)} if None in tensors else dr.decode_many(blob)
    assert list(tensors) == list(expected)
    for name, dense in expected.items():
        assert (tensors[name].shape, tensors[name].dtype) == (dense.shape, str(dense.dtype))
        found = np.frombuffer(tensors[name].dense(), dense.dtype).reshape(dense.shape)
        different = np.flatnonzero(found.view(f"u{dense.itemsize}") != dense.view(f"u{dense.itemsize}"))
        assert not different.size, (
            f"{different.size} differ, first at {different[0]}: {found.flat[different[0]]}, {dense.flat[different[0]]}"
        )


def recorded():
    """A layer of a trained network, whose largest fifth fills several blocks of every codec."""
    return load("resnet20")["l.4.c1.weight"]


def test_every_codec_is_on_the_page():
    stages = (plain_reader.SPARSIFIERS, plain_reader.INDICES, plain_reader.VALUES)
    for stage, known in zip(registry.STAGES, stages, strict=True):
        assert {entry.wire_id for entry in stage.table if entry.name != "auto"} == set(known)


@pytest.mark.parametrize("name", CASES)
def test_golden_case(name):
    assert_reads(encode_case(CASES[name]))


@pytest.mark.parametrize("spec", specs())
def test_every_codec_on_real_gradients(spec):
    assert_reads(dr.encode(gradient(), spec, seed=3))
    assert_reads(dr.encode(recorded(), spec, seed=2**62 + 5))


@pytest.mark.parametrize("piece", VALUE_SAMPLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_value_codec_in_every_dtype(piece, dtype):
    layer = recorded().reshape(-1)[:1500]
    for scale in (1, 2.0**-12, 2.0**12):  # subnormals of float16, and its large numbers
        assert_reads(dr.encode((layer * scale).astype(dtype), f"topr:0.7/rice/{piece}"))


@pytest.mark.parametrize("piece", INDEX_SAMPLES)
def test_every_index_codec_where_none_one_and_all_are_kept(piece):
    for kept in ([], [0], [40], range(41)):
        sparse = np.zeros(41, np.float32)
        sparse[kept] = 1.5
        assert_reads(dr.encode(sparse, f"nonzero/{piece}/raw", seed=1))


def test_awkward_tensors_as_many():
    for spec in ("topr:0.5/auto/fitdexp", "none/all/threelc", "nonzero/deltahuffman/sketch:3,huffman=true", "threshold:0.1/rle/pco"):
        tensors = {str(number): tensor for number, tensor in enumerate(fixed_gradients())}
        assert_reads(dr.parse(spec).encode_many(tensors))


@pytest.mark.parametrize("numel", [1, 2, 258, 300, 1000])
def test_codes_that_hang_on_ties(numel):
    assert_reads(dr.encode(np.ones(numel, np.float32), "none/huffman/raw"))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_values_near_the_middle_of_two_numbers(dtype):
    halfway = 2 * np.arange(1024, 2048) + 1  # between two numbers of float16
    part = (halfway * 127 / 100).astype(np.float32).tobytes() + bytes([100] * halfway.size)  # level 100 of 127
    package = dr.QSGD(bits=8, group=1).decode(dr.Reader(part), halfway.size, np.dtype(dtype))
    plain = plain_reader.qsgd(plain_reader.Bytes(part), halfway.size, np.dtype(dtype).name, 8, 1, "max")
    assert b"".join(plain) == package.tobytes()


@pytest.mark.parametrize("policy", ["p1", "p2", "leftmost", "middle", "rightmost"])
def test_policies_for_even_and_odd_numbers_of_false_positives(policy):
    for seed in range(8):
        assert_reads(dr.encode(gradient(), f"topr:0.2/bloom:{policy},fpr=0.3/raw", seed=seed))


def rows():
    """Whole rows are kept: the runs have a common divisor."""
    found = np.zeros((200, 9), np.float32)
    found[np.arange(200) ** 2 % 7 < 2] = 1
    return found


def dense_then_scattered():
    """Some places are full and some are nearly empty: one Rice parameter does not suit all gaps."""
    found = np.zeros(9000, np.float32)
    found[np.repeat([1, 3, 25], 300).cumsum()] = 1
    return found


@pytest.mark.parametrize("index", ["rle", "rice", "delta", "deltahuffman", "pco", "shaped", "auto"])
def test_supports_with_structure(index):
    for tensor in (rows(), dense_then_scattered()):
        assert_reads(dr.encode(tensor, f"nonzero/{index}/raw"))


def first_index_byte(tensor, spec):
    return message.read(dr.encode(tensor, spec)).records[0].index_part[0]


def test_these_supports_are_coded_by_their_structure():
    assert first_index_byte(rows(), "nonzero/rle/raw") == 9
    assert first_index_byte(dense_then_scattered(), "nonzero/rice/raw") >= 64


def uneven_rows_and_columns(shape):
    """Some rows are full and many are empty, and most of the columns are rare."""
    rng = np.random.default_rng(5)
    popular = np.outer(rng.random(shape[0]) ** 6, rng.random(shape[1]) ** 3)
    return (rng.random(shape) < 4 * popular).astype(np.float32)


@pytest.mark.parametrize("shape", [(120, 300), (700, 40), (1, 1500)])
def test_tables_by_row_and_by_column(shape):
    table = uneven_rows_and_columns(shape)
    assert_reads(dr.encode(table, "nonzero/shaped/raw"))
    assert_reads(dr.encode(table.T, "nonzero/shaped/raw"))
    assert_reads(dr.encode(table.reshape(-1, 5, shape[1] // 5), "nonzero/shaped/raw"))


def test_tables_of_long_empty_and_long_full_stretches():
    """The chances of a line that is empty, or is not, come to the least and the most that they can be."""
    table = np.zeros((5000, 8), np.float32)
    table[2000:2020:3, 1::2] = table[2020:4500, 3] = table[4600::7, 5] = 1
    assert_reads(dr.encode(table, "nonzero/shaped/raw"))


def test_tables_are_read_by_row_and_by_column():
    table = uneven_rows_and_columns((120, 300))
    assert {first_index_byte(turned, "nonzero/shaped/raw") % 2 for turned in (table, table.T)} == {0, 1}


def test_conflict_sets_too_large_to_be_told_apart():
    blob = dr.encode(recorded(), "topr:0.005/bloom:p2,fpr=0.9/raw", seed=9)
    filter_bits = 8 * (dr.inspect(blob).index_bytes - 3)  # a byte each for seed, hashes and size
    assert recorded().size / filter_bits > 300
    assert_reads(blob)


def test_several_pcodec_chunks():
    long = np.tile(pattern((1 << 15,), np.float16), 9)
    assert_reads(dr.encode(long, "nonzero/pco/pco"))


@pytest.mark.parametrize("index", ["raw", "huffman", "delta", "rice", "rle", "deltahuffman", "pco"])
def test_keys_of_eight_bytes(index):
    shape = (2**31, 2**20)  # large enough for the counts of `huffman` to be scaled
    wide = dr.SparseTensor([3, 2**32 + 1, 2**40, 2**50], np.float32([4, -3, 2, 1]), shape)
    blob = dr.encode(wide, f"none/{index}/raw")
    (tensor,) = plain_reader.read(blob, max_numel=2**51).values()
    expected = dr.decode_sparse(blob, max_numel=2**51)
    assert tensor.positions == expected.indices.tolist() == wide.indices.tolist()
    assert b"".join(tensor.values) == expected.values.tobytes()


def test_damaged_bytes_are_refused():
    blob = encode_case(CASES["many"])
    for at in range(len(blob)):
        with pytest.raises(plain_reader.Refused):
            plain_reader.read(blob[:at])
        with pytest.raises(plain_reader.Refused):
            plain_reader.read(blob[:at] + bytes((blob[at] ^ 1,)) + blob[at + 1 :])


def outcome(read, blob):
    """The dense tensors, one after the other as float64, or None for bytes that were refused."""
    try:
        tensors = read(blob)
    except (dr.FormatError, plain_reader.Refused):
        return None
    return np.concatenate([tensor.reshape(-1).astype(np.float64) for tensor in tensors])


def read_plainly(blob):
    return [np.frombuffer(tensor.dense(), tensor.dtype) for tensor in plain_reader.read(blob).values()]


def read_by_package(blob):
    found = decode_any(blob)
    return list(found.values()) if isinstance(found, dict) else [found]


@pytest.fixture(scope="module")
def small_messages():
    return messages()


@pytest.mark.parametrize("name", [*specs(), "many"])
def test_both_readers_refuse_the_same_sections(name, small_messages):
    """Bytes that no writer made show what a page left open."""
    rng = np.random.default_rng(len(name))
    blob = small_messages[name]
    start = len(blob) - 4 - sum(len(section) for record in message.read(blob).records for section in record.sections)
    for at in rng.integers(start, len(blob) - 4, 12):
        changed = repaired(blob[:at] + bytes((blob[at] ^ 1 << int(rng.integers(8)),)) + blob[at + 1 :])
        plain, package = outcome(read_plainly, changed), outcome(read_by_package, changed)
        assert (plain is None) == (package is None)
        assert plain is None or np.array_equal(plain, package, equal_nan=True)
