"""Bytes from a peer are hostile: whatever they are, the answer is a tensor or a FormatError."""

import os
import re
import tracemalloc

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import kernels, message
from deepreduce.layouts import codecs_of
from deepreduce.reader import varint
from deepreduce.values.fitpoly import CurveCodec

from .messages import decode_any, messages, repaired, specs
from .tensors import same_bits

MUTATIONS = int(os.environ.get("DEEPREDUCE_MUTATIONS", 100_000))
MESSAGES = messages()
EVERY = pytest.mark.parametrize("spec", [*specs(), "many"])


@EVERY
def test_every_proper_prefix_is_refused(spec):
    blob = MESSAGES[spec]
    for cut in range(len(blob)):
        with pytest.raises(dr.FormatError):
            decode_any(blob[:cut])
        with pytest.raises(dr.FormatError):
            dr.inspect(blob[:cut])


@EVERY
def test_every_single_byte_change_is_refused(spec):
    blob = bytearray(MESSAGES[spec])
    for at in range(len(blob)):
        original = blob[at]
        for changed in {original ^ 1, original ^ 0x80, 0, 255, (original + 1) % 256} - {original}:
            blob[at] = changed
            with pytest.raises(dr.FormatError):
                decode_any(bytes(blob))
        blob[at] = original


@EVERY
def test_appended_bytes_are_refused(spec):
    with pytest.raises(dr.FormatError, match="after the end"):
        decode_any(MESSAGES[spec] + b"\0")


def mutate(blob: bytes, rng: np.random.Generator) -> bytes:
    """Change, remove, repeat or insert some bytes behind the length, which is made to fit, as is the checksum."""
    body = bytearray(blob[5:-4] if blob[4] < 0x80 else blob[6:-4])
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, max(1, len(body))))
        kind = rng.integers(0, 5)
        if kind <= 1:
            body[at : at + 1] = bytes([rng.integers(0, 256)])
        elif kind == 2:
            body[at : at + 1] = bytes([body[at] ^ (1 << rng.integers(0, 8))]) if body else b""
        elif kind == 3:
            del body[at : at + int(rng.integers(1, 5))]
        else:
            body[at:at] = rng.bytes(int(rng.integers(1, 5)))
    return repaired(blob[:4] + varint(len(body) + 4) + bytes(body) + bytes(4))


def test_mutations_with_repaired_checksums_decode_or_are_refused():
    rng = np.random.default_rng(2024)
    blobs = list(MESSAGES.values())
    outcomes = {"decoded": 0, "refused": 0}
    for i in range(MUTATIONS):
        try:
            decode_any(mutate(blobs[i % len(blobs)], rng))
            outcomes["decoded"] += 1
        except dr.FormatError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > MUTATIONS // 100, f"the mutations reach only one side: {outcomes}"


# One content, one form: no bit of a section is without a meaning

OTHER_FORMS = ("/pco", "/deflate", "/bloom", "groups=")
"""Streams of other libraries have their own padding; a bit of a filter or a cell of a sketch can be hidden by others."""
ONE_FORM = [spec for spec in specs() if not any(name in spec for name in OTHER_FORMS)]


def normal(shape):
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def flips(blob, places):
    """The message with one bit changed, for every bit of the bytes at these places."""
    for at in places:
        for bit in range(8):
            flipped = bytearray(blob)
            flipped[at] ^= 1 << bit
            yield f"bit {bit} of byte {at - len(blob)}", repaired(bytes(flipped))


def coded_sections(blob):
    """The places of each section, but for the coefficients of curves: their lowest bits may be lost in the rounding of the values."""
    (record,) = message.read(blob).records
    start = len(blob) - 4 - sum(map(len, record.sections))
    for part in record.sections:
        size, value = len(part), codecs_of(record.layout)[2]
        if part is record.value_part and isinstance(value, CurveCodec):
            size = 1 + kernels.bits.packed_bytes(part[0], value._run_bits(record.nnz))
        yield range(start, start + size)
        start += len(part)


def assert_every_bit_counts(blob, choose):
    kept = dr.decode_sparse(blob)
    for places in coded_sections(blob):
        for flip, changed in flips(blob, choose(places)):
            try:
                other = dr.decode_sparse(changed)
            except dr.FormatError:
                continue
            assert not (np.array_equal(other.indices, kept.indices) and same_bits(other.values, kept.values)), flip


@pytest.mark.parametrize("spec", ONE_FORM)
def test_every_bit_of_a_section_counts(spec):
    assert_every_bit_counts(MESSAGES[spec], lambda places: places)


@pytest.mark.parametrize("spec", ONE_FORM)
def test_every_bit_at_the_end_of_a_large_section_counts(spec):
    for rows in (41, 42, 43):
        assert_every_bit_counts(dr.encode(normal((rows, 45)), spec, seed=3), lambda places: places[-2:])


@pytest.mark.parametrize("index", ["rice", "rle"])
def test_every_bit_of_the_parameters_of_blocks_counts(index):
    gradient = np.zeros(9001, np.float32)
    gradient[np.repeat([2, 3, 25], 300).cumsum()] = 1
    assert_every_bit_counts(dr.encode(gradient, f"nonzero/{index}/raw"), lambda places: places[:30])


@pytest.mark.parametrize(
    "spec",
    [f"topr:0.2/{index}/raw" for index in ("rice", "rle", "delta")]
    + [f"none/all/{value}" for value in ("qsgd:7", "sketch:2", "sketch:2,groups=2", "threelc")]
    + [f"topr:0.2/bitmap/{value}" for value in ("fitpoly", "fitdexp")],
)
def test_padding_that_is_not_zero_is_refused(spec):
    complaints = set()
    for size in (41, 42, 43):
        blob = dr.encode(normal(size), spec)
        for places in coded_sections(blob):
            for _, changed in flips(blob, places):
                try:
                    dr.decode(changed)
                except dr.FormatError as error:
                    complaints.add(re.sub("[0-9]+", "#", str(error)))
    expected = "the digits are not those of # values" if "threelc" in spec else "bits after the last one, number #, are not zero"
    assert expected in complaints


def huge_message(numel: int, nnz: int, index_id: int = 1) -> bytes:
    """A message without sections that claims a huge tensor."""
    layout = bytes([2, 1, 0, index_id, 0, 1, 0])
    header = bytes([0, 1]) + layout + varint(0) + varint(1) + varint(numel) + varint(nnz) + bytes(3)
    lead = varint(2 * len(header)) + header
    return repaired(b"\x9dDR\x01" + varint(len(lead) + 4) + lead + bytes(4))


@pytest.mark.parametrize(
    ("numel", "nnz", "index_id"), [(2**40, 2**40, 3), (2**40, 0, 1), (2**62, 1, 1), (2**28, 2**28, 1), (2**28, 2**28, 2)]
)
def test_a_small_message_that_claims_a_huge_tensor_is_refused_without_allocating(numel, nnz, index_id):
    blob = huge_message(numel, nnz, index_id)
    assert len(blob) <= 48
    tracemalloc.start()
    with pytest.raises(dr.FormatError):
        dr.decode(blob)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_max_numel_is_the_callers_choice():
    blob = dr.encode(np.zeros(1000, np.float32), "nonzero/raw/raw")
    with pytest.raises(dr.FormatError, match="max_numel allows 999"):
        dr.decode(blob, max_numel=999)
    assert dr.decode(blob, max_numel=1000).size == 1000
    many = dr.parse("dense").encode_many({"a": np.zeros(600, np.float32), "b": np.zeros(600, np.float32)})
    with pytest.raises(dr.FormatError, match="max_numel"):
        dr.decode_many(many, max_numel=1000)


def test_a_header_that_inflates_without_end_is_refused():
    import zlib

    bomb = zlib.compress(bytes(2**26), 9)
    lead = varint(2 * len(bomb) + 1) + bomb
    with pytest.raises(dr.FormatError, match="header"):
        dr.decode(repaired(b"\x9dDR\x01" + varint(len(lead) + 4) + lead + bytes(4)))


@pytest.mark.parametrize("size", [-1, -4, -(2**63)])
def test_a_reader_never_goes_back(size):
    reader = dr.Reader(bytes(8))
    reader.take(4)
    for read in (lambda: reader.take(size), lambda: reader.array("<f4", size)):
        with pytest.raises(dr.TruncatedError, match="at offset 4, have 4"):
            read()
    assert reader.offset == 4


def test_errors_tell_what_and_where():
    blob = dr.encode(np.ones(8, np.float32), "dense")
    with pytest.raises(dr.TruncatedError, match=f"a message of {len(blob)} bytes, only 20 are here"):
        dr.decode(blob[:20])
    with pytest.raises(dr.VersionError, match="format version 9"):
        dr.decode(blob[:3] + b"\x09" + blob[4:])
    with pytest.raises(dr.CorruptError, match="not a deepreduce message"):
        dr.decode(b"PK\x03\x04" + blob)
    with pytest.raises(dr.FormatError, match="decode_many"):
        dr.decode(dr.parse("dense").encode_many({"a": np.ones(2, np.float32)}))
    with pytest.raises(dr.FormatError, match="decode reads it"):
        dr.decode_many(blob)
