"""A patch from a peer is hostile: whatever its bytes are, the answer is the result or a FormatError, and memory stays bounded."""

import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import weights
from deepreduce.reader import varint
from deepreduce.weights import envelope, records
from deepreduce.weights.checking import entries
from deepreduce.weights.digests import model_digest
from deepreduce.weights.kinds import KINDS
from deepreduce.weights.opened import Patch
from deepreduce.weights.records import GROUP, Action, Header, TensorRecord
from deepreduce.weights.sources import NamedArrays

from .weights_data import models, same_bits

OLD, NEW = models()[:2]
NEW = NEW | {"added": np.arange(40, dtype=np.float16)}
PATCHES = {mode: weights.diff(OLD, NEW, mode=mode) for mode in ("conditional", "portable")}
MODES = pytest.mark.parametrize("mode", PATCHES)


@MODES
def test_every_proper_prefix_is_refused(mode):
    patch = PATCHES[mode]
    for cut in range(len(patch)):
        with pytest.raises(dr.FormatError):
            weights.apply(OLD, patch[:cut])


@MODES
def test_every_single_byte_change_is_refused(mode):
    patch = bytearray(PATCHES[mode])
    for at in range(len(patch)):
        patch[at] ^= 1 << at % 8
        with pytest.raises(dr.FormatError):
            weights.apply(OLD, bytes(patch))
        patch[at] ^= 1 << at % 8


@MODES
def test_appended_bytes_are_refused(mode):
    with pytest.raises(dr.FormatError, match="after the end"):
        weights.apply(OLD, PATCHES[mode] + b"\0")


def repaired(body: bytes) -> bytes:
    """A message of this body, with a length and a checksum that fit."""
    front = bytes.fromhex("9d445201") + varint(len(body) + 4)
    return front + body + zlib.crc32(front + body).to_bytes(4, "little")


@MODES
def test_changed_bytes_with_a_right_checksum_never_pass_for_another_result(mode):
    rng = np.random.default_rng(0)
    patch = PATCHES[mode]
    body = patch[6:-4] if patch[4] >= 0x80 else patch[5:-4]
    accepted = 0
    for _ in range(3000):
        changed = bytearray(body)
        for at in rng.integers(0, len(body), rng.integers(1, 4)):
            changed[at] ^= 1 << rng.integers(0, 8)
        try:
            result = weights.apply(OLD, repaired(bytes(changed)), threads=1)
        except (dr.FormatError, dr.WrongBaseError):
            continue
        accepted += 1
        assert same_bits(result, NEW)
    assert accepted < 100  # what no check covers changes nothing: versions, marks


def claiming(patch: bytes, base: bytes) -> bytes:
    """A patch that says it was made from other weights."""
    header, sections = envelope.split(patch)
    return envelope.join(replace(header, base=base), [bytes(sections.take(0, sum(header.group_sizes)))])


def digest_of(tensors: dict[str, np.ndarray]) -> bytes:
    return model_digest(entries(NamedArrays(tensors)))


@pytest.mark.parametrize("check", [True, False])
@MODES
def test_tensors_that_are_smaller_than_a_patch_says_are_not_written_to(mode, check):
    small, large = {"w": np.zeros(10, np.uint16)}, {"w": np.zeros(100_000, np.uint16)}
    patch = weights.diff(large, {"w": np.arange(100_000).astype(np.uint16)}, mode=mode)
    for threads in (1, 2):
        with pytest.raises(dr.WrongBaseError, match="'w' has another shape or dtype"):
            weights.apply_(small, claiming(patch, digest_of(small)), threads=threads, check=check)
        with pytest.raises(dr.WrongBaseError, match="there is no tensor 'w'"):
            weights.apply_({}, claiming(patch, digest_of({})), threads=threads, check=check)
    assert not small["w"].any()


@MODES
def test_patches_that_follow_one_another_agree_on_the_tensors_between_them(mode):
    small, large = {"w": np.ones(10, np.uint16)}, {"w": np.zeros(100_000, np.uint16)}
    first = weights.diff({}, small, mode=mode)
    second = weights.diff(large, {"w": np.arange(100_000).astype(np.uint16)}, mode=mode)
    chain = [first, claiming(second, digest_of(small))]
    with pytest.raises(dr.WrongBaseError, match="'w' has another shape or dtype"):
        weights.apply({}, chain)
    with pytest.raises(dr.WrongBaseError, match="'w' has another shape or dtype"):
        weights.fold(chain, {})


def test_a_small_patch_cannot_ask_for_much_memory():
    huge = weights.diff({}, {"w": np.zeros(1 << 22, np.uint8)})
    assert len(huge) < 100
    with pytest.raises(dr.FormatError, match="max_numel"):
        weights.apply({}, huge, max_numel=1000)
    tracemalloc.start()
    with pytest.raises(dr.FormatError):
        weights.patches(weights.diff({}, {"w": np.zeros(1 << 22, np.uint8)}, mode="portable"), max_numel=1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()


def with_shape(shape: tuple[int, ...], action: Action, pieces: int) -> bytes:
    """A patch of one tensor of this shape, with a change or a byte in each of its pieces; no writer makes it."""
    ones = [1] * pieces
    record = TensorRecord("w", KINDS[8], shape, action, bytes(4), bytes(4), ones if action == Action.CHANGED else [])
    if action != Action.CHANGED:
        record.base_check, record.sizes = b"", ones
    header = records.write(Header(bytes(16), bytes(16), 1, (), None, (record,), tuple(record.counts)))
    lead = zlib.compress(header)
    return repaired(varint(2 * len(lead) + 1) + lead + bytes(pieces))


@pytest.mark.parametrize("action", [Action.CHANGED, Action.ADDED])
def test_a_patch_has_a_bounded_number_of_pieces(action, monkeypatch):
    assert len(Patch.of_bytes(with_shape((8 * GROUP,), action, 8)).header.tensors) == 1
    large = with_shape((8 * GROUP,), action, 8)
    monkeypatch.setattr(records, "MAX_PIECES", 7)
    with pytest.raises(dr.FormatError, match="at most 7 pieces"):
        Patch.of_bytes(large)
    with pytest.raises(dr.InputError, match="at most 7 of each"):
        weights.diff({}, {f"t{n}": np.zeros(1) for n in range(8)})


def test_an_empty_tensor_of_absurd_sizes_is_refused(monkeypatch):
    monkeypatch.setattr(records, "shape_problem", lambda shape: "")
    patch = with_shape((0, 2**62, 2**62), Action.ADDED, 0)
    monkeypatch.undo()
    with pytest.raises(dr.FormatError, match="is empty, but its other sizes"):
        weights.apply({}, patch)


def test_a_message_of_gradients_is_no_patch():
    blob = dr.encode(np.ones(16, np.float32), "dense")
    with pytest.raises(dr.FormatError, match="kind 0"):
        weights.apply(OLD, blob)
    with pytest.raises(dr.FormatError, match=r"see deepreduce\.weights"):
        dr.decode(PATCHES["portable"])
