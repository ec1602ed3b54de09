"""The steps over all elements as torch operations: the same bytes as the kernels, and nothing of that size leaves the device."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce.message import DEFAULT_MAX_NUMEL
from deepreduce.pipeline import read_single, restore
from deepreduce.registry import INDEX_STAGE, SPARSIFIER_STAGE, VALUE_STAGE
from deepreduce.source import DenseSource, Space
from deepreduce.tensor import SparseTensor
from deepreduce.torch import ResidualMemory, membership
from deepreduce.torch.convert import to_numpy, to_torch
from deepreduce.torch.source import TorchSource, TorchSpace, decode_sparse, scatter, source_of

from ..samples import SAMPLES, default_pieces
from ..tensors import fixed_gradients, gradients, same_bits
from .pretend import DEVICE, PretendDevice

GRADIENTS = fixed_gradients()
FORCED = partial(TorchSpace, device=torch.device("cpu"))


def check_same_message(spec, gradient, seed):
    """The torch path on a CPU tensor writes the bytes of the numba path, and reads them alike."""
    codec = dr.parse(spec)
    blob = codec.encode(TorchSource(to_torch(gradient)), seed=seed)
    assert blob == codec.encode(gradient, seed=seed)
    expected, seen = dr.decode_sparse(blob), restore(record := read_single(blob, DEFAULT_MAX_NUMEL), FORCED(record.shape))
    assert np.array_equal(expected.indices, seen.indices)
    assert same_bits(expected.values, seen.values)


# Every selection, against the kernels


@given(gradient=gradients(max_side=20), data=st.data())
@settings(max_examples=150, deadline=None)
def test_selections_equal_those_of_the_kernels(gradient, data):
    kernels, torch_path = DenseSource(gradient), TorchSource(to_torch(gradient))
    count = data.draw(st.integers(1, gradient.size + 2), "count")
    chunk = data.draw(st.integers(1, gradient.size + 2), "chunk")
    level = data.draw(st.one_of(st.sampled_from([0.0, 1.0, 1e-300, 65520.0, 3.4e38, 1e300]), st.floats(0, 110)), "level")
    assert torch_path.all().is_all
    assert np.array_equal(torch_path.nonzero().positions, kernels.nonzero().positions)
    assert np.array_equal(torch_path.top(count).positions, kernels.top(count).positions)
    assert np.array_equal(torch_path.above(level).positions, kernels.above(level).positions)
    assert np.array_equal(torch_path.chunk_top(chunk, min(count, chunk)).positions, kernels.chunk_top(chunk, min(count, chunk)).positions)
    kept = kernels.top(count)
    assert same_bits(torch_path.gather(kept), kernels.gather(kept))


@given(
    bits=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    count=st.integers(1, 60),
)
@settings(max_examples=150, deadline=None)
def test_top_of_any_bit_patterns_whatsoever(bits, dtype, count):
    itemsize = torch.tensor([], dtype=getattr(torch, dtype)).itemsize
    words = np.array([pattern >> 64 - 8 * itemsize for pattern in bits] + [bits[0] & 0x7FFF], f"u{itemsize}")
    tensor = to_torch(words.view(f"i{itemsize}")).view(getattr(torch, dtype))
    kernels = DenseSource(to_numpy(tensor))
    assert np.array_equal(TorchSource(tensor).top(count).positions, kernels.top(count).positions)
    assert np.array_equal(TorchSource(tensor).chunk_top(16, min(count, 16)).positions, kernels.chunk_top(16, min(count, 16)).positions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_selections_of_a_large_tensor_with_many_ties(dtype):
    tensor = (torch.randn(100_000, generator=torch.Generator().manual_seed(3)) * 50).round().to(dtype) / 50
    kernels, torch_path = DenseSource(to_numpy(tensor)), TorchSource(tensor)
    for count in (1, 999, 50_000, 99_999):
        assert np.array_equal(torch_path.top(count).positions, kernels.top(count).positions)
    assert np.array_equal(torch_path.chunk_top(4096, 64).positions, kernels.chunk_top(4096, 64).positions)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_bloom_membership_equals_that_of_the_kernel(data):
    numel, hashes = data.draw(st.integers(0, 2000), "numel"), data.draw(st.integers(1, 12), "hashes")
    packed = np.array(data.draw(st.lists(st.integers(0, 255), max_size=40), "bytes"), np.uint8)
    salt, at_most = data.draw(st.integers(0, 2**64 - 1), "salt"), data.draw(st.integers(0, numel + 1), "at_most")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "BLOCK", data.draw(st.integers(100, 3000), "block"))
        found = FORCED((numel,)).members(packed, hashes, salt, at_most)
    assert np.array_equal(found, Space((numel,)).members(packed, hashes, salt, at_most))


def test_views_are_read_in_the_order_of_their_own_elements():
    base = torch.randn(40, 30, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for view in (base.T, base[::2, 1:], base.expand(2, 40, 30), base[0, 0], base.to(memory_format=torch.contiguous_format)[3:]):
        before = view.detach().clone()
        blob = dr.encode(TorchSource(view), "topr:0.1/raw/raw")
        assert blob == dr.encode(view.detach().numpy(), "topr:0.1/raw/raw")
        assert torch.equal(before, view)


# Every registered codec


@pytest.mark.parametrize("index", SAMPLES[INDEX_STAGE])
def test_messages_of_every_sparsifier_and_index_codec(index):
    for sparsifier in default_pieces(SPARSIFIER_STAGE):
        for seed, gradient in enumerate(GRADIENTS):
            check_same_message(f"{sparsifier}/{index}/raw", gradient, seed)


@pytest.mark.parametrize("value", SAMPLES[VALUE_STAGE])
def test_messages_of_every_value_codec(value):
    for index in ("raw", "bloom:p2"):
        for seed, gradient in enumerate(GRADIENTS):
            check_same_message(f"topr:0.1/{index}/{value}", gradient, seed)


@given(gradient=gradients(), index=st.sampled_from(SAMPLES[INDEX_STAGE]), value=st.sampled_from(SAMPLES[VALUE_STAGE]), data=st.data())
@settings(max_examples=100, deadline=None)
def test_messages_of_any_tensor(gradient, index, value, data):
    sparsifier = data.draw(st.sampled_from(SAMPLES[SPARSIFIER_STAGE]))
    check_same_message(f"{sparsifier}/{index}/{value}", gradient, seed=data.draw(st.integers(0, 2**63 - 1)))


# A device of its own: what crosses


NUMEL = 20_000


def large(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(100, NUMEL // 100, generator=generator) ** 3


@pytest.mark.parametrize("index", SAMPLES[INDEX_STAGE])
def test_only_what_is_kept_leaves_the_device(index):
    gradient, codec = large(5), dr.parse(f"topr:0.01/{index}/fp16")
    with PretendDevice() as device:
        on_device = gradient.to(DEVICE)
        device.to_host = device.to_device = 0
        blob = codec.encode(source_of(on_device), seed=9)
        dense = scatter(decode_sparse(blob, DEVICE), DEVICE)
    assert blob == codec.encode(gradient.numpy(), seed=9)
    assert dense.device == DEVICE
    assert same_bits(dense.held.numpy(), dr.decode(blob))
    info = dr.inspect(blob)
    false_positives = NUMEL * (getattr(codec.index, "fpr", None) or 0)  # the host chooses among them, once each way
    assert device.to_host <= 4 * info.nnz + 2.4 * false_positives + NUMEL // 100
    assert device.to_device <= 4 * info.nnz + 2 * info.index_bytes


@pytest.mark.parametrize("sparsifier", ["topr:0.01", "randomr:0.01", "threshold:20", "chunktopr:1,chunk=128"])
def test_every_sparsifier_selects_on_the_device(sparsifier):
    gradient, codec = large(6), dr.parse(f"{sparsifier}/raw/raw")
    with PretendDevice() as device:
        source = source_of(gradient.to(DEVICE))
        device.to_host = device.to_device = 0
        blob = codec.encode(source, seed=2)
    assert blob == codec.encode(gradient.numpy(), seed=2)
    nnz = dr.inspect(blob).nnz
    assert 0 < nnz < NUMEL // 10
    assert device.to_host <= 2 * nnz
    assert device.to_device <= nnz


def test_a_training_step_on_the_device():
    codec, memory, twin = dr.parse("topr:0.01/raw/fp16"), ResidualMemory(momentum=0.9), dr.ResidualMemory(momentum=0.9)
    with PretendDevice() as device:
        for step in range(4):
            gradient = large(step)
            on_device = gradient.to(DEVICE)
            device.to_host = device.to_device = 0
            compensated = memory.compensate("w", on_device)
            blob = codec.encode(source_of(compensated), seed=step)
            sent = decode_sparse(blob, DEVICE)
            memory.update("w", compensated, sent)
            mean = scatter(sent, DEVICE)
            assert max(device.to_host, device.to_device) < NUMEL // 10
            expected = twin.compensate("w", gradient.numpy())
            twin.update("w", expected, sent)
            assert same_bits(compensated.held.numpy(), expected)
            assert same_bits(mean.held.numpy(), dr.decode(blob))


def test_the_guard_sees_a_leak():
    with PretendDevice() as device:
        on_device = large(0).to(DEVICE)
        DenseSource(to_numpy(on_device)).top(10)
        assert device.to_host == NUMEL
        with pytest.raises(AssertionError, match="mixes the device and the host"):
            on_device + large(0)
        with pytest.raises(AssertionError, match="mixes the device and the host"):
            large(0).copy_(on_device)


# Error feedback


@given(gradient=gradients(max_side=6), decay=st.sampled_from([1.0, 0.9]), momentum=st.sampled_from([0.0, 0.7]))
@settings(max_examples=60, deadline=None)
def test_torch_memory_equals_residual_memory_to_the_bit(gradient, decay, momentum):
    if gradient.ndim == 0:
        gradient = gradient.reshape(1)
    with np.errstate(over="ignore"):
        steps = [gradient, gradient[::-1], gradient * gradient.dtype.type(3)]
    ours, theirs, codec = ResidualMemory(decay, momentum), dr.ResidualMemory(decay, momentum), dr.parse("topr:0.3/raw/bf16")
    for number, step in enumerate(steps):
        with np.errstate(all="ignore"):
            expected = theirs.compensate("w", step)
            sent = dr.decode_sparse(codec.encode(expected, seed=number))
            theirs.update("w", expected, sent)
        compensated = ours.compensate("w", to_torch(step))
        ours.update("w", compensated, sent)
        finite = np.isfinite(expected.astype(np.float64))
        assert same_bits(to_numpy(compensated)[finite], expected[finite])
        for table in ("residuals", "velocities"):
            expected_table, table = theirs.state_dict()[table], ours.state_dict()[table]
            assert set(expected_table) == set(table)
            assert all(same_bits(to_numpy(table[name]), array) for name, array in expected_table.items())


def test_torch_memory_survives_nonfinite_steps_and_checkpoints():
    memory, zero = ResidualMemory(momentum=0.5), torch.zeros(2)
    nothing = SparseTensor([], np.float32([]), (2,))
    memory.update("w", memory.compensate("w", torch.tensor([3.0, 2.0])), nothing)
    before = memory.compensate("w", zero)
    memory.update("w", memory.compensate("w", torch.tensor([np.inf, 0.0])), nothing)
    assert torch.equal(memory.compensate("w", zero), before)
    resumed = ResidualMemory(momentum=0.5)
    resumed.load_state_dict(memory.state_dict())
    memory.update("w", memory.compensate("w", torch.ones(2)), nothing)
    assert torch.equal(resumed.compensate("w", zero), before)


def test_torch_memory_refuses_what_does_not_fit():
    memory = ResidualMemory()
    memory.update("w", memory.compensate("w", torch.ones(2)), SparseTensor([], np.float32([]), (2,)))
    with pytest.raises(dr.InputError, match="'w' is float64 of shape"):
        memory.compensate("w", torch.ones(2, dtype=torch.float64))
    with pytest.raises(dr.InputError, match=r"shape \(3,\) was sent"):
        memory.update("w", torch.ones(2), SparseTensor([], np.float32([]), (3,)))
    with pytest.raises(dr.InputError, match="dict of residuals, velocities and scale"):
        memory.load_state_dict({"residuals": {}})
    with pytest.raises(dr.InputError, match="residual of 'w'"):
        memory.load_state_dict({"residuals": {"w": torch.ones(2, dtype=torch.int64)}, "velocities": {}})
    for wrong in ({"decay": 0.0}, {"momentum": 1.0}):
        with pytest.raises(dr.ConfigError):
            ResidualMemory(**wrong)
