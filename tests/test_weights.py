"""Differences of weights are exact, small, and refused where they do not belong."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce import weights
from deepreduce.weights import envelope
from deepreduce.weights.opened import Patch
from deepreduce.weights.records import GROUP

from .python_calls import python_calls
from .weights_data import DTYPES, models, same_bits, trained

MODES = pytest.mark.parametrize("mode", ["conditional", "portable"])


def random_patterns(dtype: np.dtype, data: st.DataObject, size: int) -> np.ndarray:
    """Any bit patterns at all: NaN with payloads, infinities, -0.0 and subnormal numbers among them."""
    raw = data.draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, np.uint8).copy().view(dtype)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 40), st.sampled_from(["conditional", "portable"]))
def test_any_two_arrays_round_trip(data, dtype, size, mode):
    old, new = random_patterns(dtype, data, size), random_patterns(dtype, data, size)
    keep = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8) < 128
    new[keep] = old[keep]
    patch = weights.diff({"w": old}, {"w": new}, mode=mode, threads=1)
    assert same_bits(weights.apply({"w": old}, patch, threads=1), {"w": new})


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(dtype, mode):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 5000 * dtype.itemsize, dtype=np.uint8).view(dtype)
    if dtype == np.bool_:
        old = rng.integers(0, 2, 5000).astype(bool)
    new = np.where(rng.random(old.size) < 0.1, rng.permutation(old), old)
    patch = weights.diff({"w": old}, {"w": new}, mode=mode)
    assert same_bits(weights.apply({"w": old}, patch), {"w": new})


@MODES
def test_special_values(mode):
    special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x3F80], np.uint16)
    old, new = np.repeat(special, special.size), np.tile(special, special.size)
    before, after = {"w": old.view(ml_dtypes.bfloat16)}, {"w": new.view(ml_dtypes.bfloat16)}
    assert same_bits(weights.apply(before, weights.diff(before, after, mode=mode)), after)


@MODES
def test_tensors_appear_vanish_and_change_shape_or_dtype(mode):
    old, new = models()[0], models()[1]
    del new["norm"], old["bias"]
    new["layer0.weight"] = new["layer0.weight"].astype(np.float32)
    new["layer1.weight"] = new["layer1.weight"].reshape(30, 40)
    new["empty"] = np.empty((0, 4), np.float16)
    patch = weights.diff(old, new, mode=mode)
    assert same_bits(weights.apply(old, patch), new)
    tensors = {name: array.copy() for name, array in old.items()}
    weights.apply_(tensors, patch)
    assert same_bits(tensors, new)
    assert weights.verify(old, patch) == "base"
    assert weights.verify(new, patch) == "result"


@MODES
def test_a_tensor_larger_than_a_group(mode):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 2 * GROUP + 100, dtype=np.uint8)
    new = old.copy()
    new[[5, GROUP - 1, 2 * GROUP, 2 * GROUP + 99]] += 1
    pair = {"small": np.arange(4), "w": old}, {"small": np.arange(4) * 2, "w": new}
    patch = weights.diff(*pair, mode=mode)
    assert same_bits(weights.apply(pair[0], patch), pair[1])
    assert Patch.of_bytes(patch).records["w"].counts == [2, 0, 2]


def test_input_is_untouched_and_result_shares_no_memory():
    old, new = models()[:2]
    copies = {name: array.copy() for name, array in old.items()}
    result = weights.apply(old, weights.diff(old, new))
    assert same_bits(old, copies)
    assert not any(np.shares_memory(result[name], old[name]) for name in old)


@MODES
def test_same_bytes_with_any_number_of_threads(mode):
    old, new = models()[:2]
    assert len({weights.diff(old, new, mode=mode, threads=threads) for threads in (1, 2, 5)}) == 1


def test_arrays_that_are_not_contiguous_or_read_only_can_be_compared():
    old, new = trained()
    patch = weights.diff({"w": old.T}, {"w": np.asfortranarray(new.T)})
    assert same_bits(weights.apply({"w": old.T}, patch), {"w": np.ascontiguousarray(new.T)})
    old.flags.writeable = False
    with pytest.raises(dr.InputError, match="'w' cannot be changed in place"):
        weights.apply_({"w": old}, weights.diff({"w": old}, {"w": new}))


def test_unknown_dtypes_and_modes_are_refused():
    with pytest.raises(dr.InputError, match="'w' is complex64"):
        weights.diff({"w": np.zeros(2, np.complex64)}, {})
    with pytest.raises(dr.ConfigError, match="conditional or portable"):
        weights.diff({}, {}, mode="fast")
    with pytest.raises(dr.ConfigError, match="exact"):
        weights.diff({}, {}, mode="portable", index="bloom:p0")
    with pytest.raises(dr.ConfigError, match="nonsense"):
        weights.diff({}, {}, index="nonsense")


@pytest.mark.parametrize("index", ["rice", "pco", "bitmap", "delta", "auto", "raw", "rle"])
def test_portable_with_any_lossless_index_codec(index):
    old, new = models()[:2]
    assert same_bits(weights.apply(old, weights.diff(old, new, mode="portable", index=index)), new)


def order0_bits(old: np.ndarray, new: np.ndarray) -> float:
    """Bits per change: positions given their density, steps by their frequency."""
    key = lambda bits: np.where(bits & 0x8000, -(bits.astype(int) & 0x7FFF) - 1, bits.astype(int))  # noqa: E731
    changed = old != new
    density = changed.mean()
    steps = np.unique(key(new[changed]) - key(old[changed]), return_counts=True)[1] / changed.sum()
    place = -np.log2(density) - (1 - density) / density * np.log2(1 - density)
    return float(place - (steps * np.log2(steps)).sum())


@pytest.mark.parametrize("rate", [3e-7, 1e-6, 3e-6])
def test_sizes_against_the_order_0_entropy(rate):
    old, new = trained((1000, 1000), rate)
    bound = order0_bits(old.view(np.uint16).ravel(), new.view(np.uint16).ravel())
    changed = np.count_nonzero(old.view(np.uint16) != new.view(np.uint16))
    portable = 8 * len(weights.diff({"w": old}, {"w": new}, mode="portable")) / changed
    conditional = 8 * len(weights.diff({"w": old}, {"w": new})) / changed
    assert portable < 1.02 * bound + 8 * 200 / changed
    assert conditional < 0.75 * bound


# What does not belong together


def test_a_patch_on_its_own_result_is_refused():
    old, new = models()[:2]
    with pytest.raises(dr.WrongBaseError, match="already applied") as error:
        weights.apply(new, weights.diff(old, new))
    assert error.value.reason == "already applied"


def test_a_patch_too_early_is_out_of_order():
    first, second, third = models()
    patch = weights.diff(first, second)
    later = weights.diff(second, third, after=patch)
    with pytest.raises(dr.WrongBaseError, match=r"out of order: the weights are 1 version\(s\) before"):
        weights.apply(first, later)
    with pytest.raises(dr.WrongBaseError, match="out of order: patch 2"):
        weights.apply(first, [later, patch])
    assert same_bits(weights.apply(first, [patch, later]), third)


def test_a_patch_on_another_model_names_the_tensor():
    old, new = models()[:2]
    patch = weights.diff(old, new)
    other = old | {"layer1.weight": old["layer1.weight"] * 2}
    with pytest.raises(dr.WrongBaseError, match=r"wrong base: tensor 'layer1.weight' of 6 differs"):
        weights.apply(other, patch)
    with pytest.raises(dr.WrongBaseError, match="there is no tensor 'bias'"):
        weights.verify({name: array for name, array in old.items() if name != "bias"}, patch)
    with pytest.raises(dr.WrongBaseError, match="the base has no tensor 'more'"):
        weights.verify(old | {"more": np.ones(1)}, patch)
    with pytest.raises(dr.WrongBaseError, match="applied in part: 1 of 5"):
        weights.verify(old | {"layer1.weight": new["layer1.weight"]}, patch)


def test_nothing_is_written_where_a_patch_is_refused():
    old, new = models()[:2]
    patch = weights.diff(old, new)
    tensors = {name: array.copy() for name, array in old.items()} | {"norm": np.zeros(30, np.float32)}
    before = {name: array.copy() for name, array in tensors.items()}
    with pytest.raises(dr.WrongBaseError):
        weights.apply_(tensors, patch)
    assert same_bits(tensors, before)


@MODES
def test_unchecked_patches_are_applied_all_the_same(mode):
    old, new = models()[:2]
    new["added"] = np.arange(5, dtype=np.int8)
    del new["norm"]
    for threads in (1, 2):
        tensors = {name: array.copy() for name, array in old.items()}
        weights.apply_(tensors, weights.diff(old, new, mode=mode), check=False, threads=threads)
        assert same_bits(tensors, new)


def test_unchecked_patches_take_the_word_of_the_caller_for_values_only():
    old, new = {"w": np.float32([1, 2])}, {"w": np.float32([1, 3])}
    patch, other = weights.diff(old, new, mode="portable"), {"w": np.float32([5, 2])}
    weights.apply_(other, patch, check=False)
    assert other["w"].tolist() == [5, 3]
    with pytest.raises(dr.WrongBaseError, match="the base has no tensor 'more'"):
        weights.apply_(old | {"more": np.ones(1)}, patch, check=False)


@MODES
def test_a_patch_that_does_not_keep_its_promise_leaves_all_as_it_was(mode):
    old, new = models()[:2]
    header, sections = envelope.split(weights.diff(old, new, mode=mode))
    next(record for record in reversed(header.tensors) if record.result_check).result_check = bytes(4)
    tensors = {name: array.copy() for name, array in old.items()}
    with pytest.raises(dr.CorruptError, match="the weights are as they were"):
        weights.apply_(tensors, envelope.join(header, [bytes(sections.take(0, sum(header.group_sizes)))]))
    assert same_bits(tensors, old)


def test_a_patch_again_is_told_from_other_weights_where_tensors_came_or_went():
    old, new = models()[:2]
    new["added"] = np.arange(5, dtype=np.int8)
    with pytest.raises(dr.WrongBaseError, match="already applied"):
        weights.apply(new, weights.diff(old, new))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("other", [slice(None), slice(4), slice(4, None)])
def test_tensors_that_share_memory_are_refused(check, other):
    shared = np.zeros(8, np.float32)
    tensors, copies = {"embed": shared, "head": shared[other]}, {"embed": shared.copy(), "head": shared[other].copy()}
    patch = weights.diff(copies, {name: array + 1 for name, array in copies.items()})
    with pytest.raises(dr.InputError, match="share memory"):
        weights.apply_(tensors, patch, check=check)
    assert not shared.any()


def test_a_changed_tensor_may_not_share_memory_with_one_that_stays():
    shared = np.zeros(8, np.float32)
    patch = weights.diff({"a": shared, "b": shared}, {"a": shared + 1, "b": shared})
    with pytest.raises(dr.InputError, match="'a' and 'b' share memory"):
        weights.apply_({"a": shared, "b": shared}, patch)


def test_parts_of_one_array_that_do_not_overlap_can_be_changed():
    whole = np.zeros(8, np.float32)
    tensors = {"a": whole[:4], "b": whole[4:], "c": whole[4:4], "same": np.ones(2), "tied": np.ones(2)}
    tensors["tied"] = tensors["same"]
    patch = weights.diff(tensors, tensors | {"a": whole[:4] + 1, "b": whole[4:] + 2})
    weights.apply_(tensors, patch)
    assert whole.tolist() == [1] * 4 + [2] * 4


def test_the_limits_of_all_patches_are_checked_before_the_first_is_applied():
    versions = [{"w": np.zeros(2)}, {"w": np.ones(2)}, {"w": np.ones(2), "more": np.ones(100)}]
    patches = [weights.diff(old, new) for old, new in pairwise(versions)]
    tensors = {"w": np.zeros(2)}
    with pytest.raises(dr.FormatError, match="100 new elements, max_numel allows 10"):
        weights.apply_(tensors, patches, max_numel=10)
    assert same_bits(tensors, versions[0])


def test_a_patch_follows_only_what_its_base_is_the_result_of():
    first, second, third = models()
    with pytest.raises(dr.InputError, match="not the result of the patch"):
        weights.diff(second, third, after=weights.diff(second, first))
    assert Patch.of_bytes(weights.diff(first, second)).header.version == 1


@pytest.mark.parametrize(
    ("name", "problem"), [("w" * 70_000, "70000 bytes of UTF-8"), ("\ud800", "cannot be written in UTF-8")], ids=["long", "surrogate"]
)
def test_names_that_no_reader_accepts_are_refused(name, problem):
    with pytest.raises(dr.InputError, match=problem):
        weights.diff({}, {name: np.ones(1)})
    with pytest.raises(dr.InputError, match=problem):
        weights.verify({name: np.ones(1)}, weights.diff({}, {}))


def test_shapes_that_no_reader_accepts_are_refused():
    header, _ = envelope.split(weights.diff({}, {"w": np.empty((0, 4))}))
    header.tensors[0].shape = (0, 2**62, 2**62)
    with pytest.raises(dr.InputError, match="is empty, but its other sizes"):
        envelope.join(header, [])


@pytest.mark.parametrize("action", ["diff", "apply", "patches"])
def test_the_work_grows_with_the_number_of_tensors_and_not_with_its_square(action):
    def work(count: int) -> int:
        old, new = ({f"t{n}": np.array(n + step, np.float32) for n in range(count)} for step in (0, 1))
        patch = weights.diff(old, new, mode="portable", threads=1)
        actions = {
            "diff": lambda: weights.diff(old, new, mode="portable", threads=1),
            "apply": lambda: weights.apply(old, patch, threads=1),
            "patches": lambda: list(weights.patches(patch)),
        }
        return python_calls(actions[action])

    work(10)
    assert work(400) < 2.2 * work(200)


# Several patches


@MODES
def test_folded_patches_do_what_all_do(mode):
    versions = models()
    versions[2]["new"] = np.arange(5, dtype=np.int8)
    del versions[2]["norm"]
    patches = [weights.diff(old, new, mode=mode) for old, new in pairwise(versions)]
    folded = weights.fold(patches, versions[0])
    assert same_bits(weights.apply(versions[0], folded), versions[2])
    if mode == "portable":
        assert same_bits(weights.apply(versions[0], weights.fold(patches)), versions[2])
    else:
        with pytest.raises(dr.InputError, match="give the base"):
            weights.fold(patches)


@MODES
def test_unknown_modes_of_folds_are_refused(mode):
    versions = models()
    patches = [weights.diff(old, new, mode=mode) for old, new in pairwise(versions)]
    for base in (None, versions[0]):
        with pytest.raises(dr.ConfigError, match="conditional or portable, got 'portible'"):
            weights.fold(patches, base, mode="portible")


def test_folds_bring_no_more_than_the_base_and_max_numel_have():
    versions = [{"w": np.zeros(50)}, {"w": np.zeros(50, np.float32)}, {"w": np.zeros(50, np.float32), "x": np.zeros(60)}]
    patches = [weights.diff(old, new, mode="portable") for old, new in pairwise(versions)]
    assert same_bits(weights.apply(versions[0], weights.fold(patches, versions[0], max_numel=10)), versions[2])
    for base in (None, versions[0]):
        with pytest.raises(dr.FormatError, match="max_numel allows"):
            weights.fold(patches, base, max_numel=9)


def test_folding_a_change_and_its_inverse_leaves_nothing():
    old, new = models()[:2]
    there, back = weights.diff(old, new, mode="portable"), weights.diff(new, old, mode="portable")
    folded = weights.fold([there, back])
    assert list(weights.patches(folded)) == []
    assert same_bits(weights.apply(old, folded), old)


def test_folding_tensors_that_come_and_go():
    a, b = {"w": np.arange(9, dtype=np.float32)}, {"w": np.arange(9, dtype=np.float32), "x": np.ones(3)}
    c, d = {"x": np.ones(3) * 2, "w": np.arange(9, dtype=np.float16)}, {"x": np.ones(3) * 2}
    versions = [a, b, c, d]
    patches = [weights.diff(old, new, mode="portable") for old, new in pairwise(versions)]
    for start in range(4):
        for stop in range(start + 1, 4):
            assert same_bits(weights.apply(versions[start], weights.fold(patches[start:stop])), versions[stop])


def test_patches_tell_indices_and_steps():
    old, new = trained((30, 20))
    (found,) = weights.patches(weights.diff({"w": old}, {"w": new}, mode="portable"))
    bits = old.view(np.int16).ravel().astype(np.int64)
    key = np.where(bits < 0, bits ^ 0x7FFF, bits)
    key[found.indices] += found.steps
    assert (np.where(key < 0, key ^ 0x7FFF, key).astype(np.int16) == new.view(np.int16).ravel()).all()
    assert (found.name, found.shape, found.dtype, found.action) == ("w", (30, 20), old.dtype, "changed")
    with pytest.raises(dr.InputError, match="only with the weights"):
        weights.patches(weights.diff({"w": old}, {"w": new}))
