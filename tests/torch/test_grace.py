"""GRACE's interfaces, driven the way its communicators drive them."""

import numpy as np
import pytest
import torch

import deepreduce as dr
from deepreduce.step.seeds import StepSeed
from deepreduce.torch.convert import to_torch
from deepreduce.torch.grace import Compressor, Memory

from .ranks import run_ranks

SPECS = ["topr:0.05/raw/fp16", "randomr:0.1/seeded/raw", "none/all/raw"]


def gradient_of(rank, step=0, dtype=torch.float32):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def allgather(compressors, messages):
    """What GRACE's Allgather does on one rank once the messages of unequal length are there: padded, cut, decompressed, summed."""
    longest = max(message.numel() for (message,) in messages)
    padded = [torch.cat((message, torch.zeros(longest - message.numel(), dtype=torch.uint8))) for (message,) in messages]
    received = [(buffer[: message.numel()],) for buffer, (message,) in zip(padded, messages, strict=True)]
    compressor = compressors[0]
    total = compressor.aggregate([compressor.decompress(tensors, None) for tensors in received])
    return total / len(messages) if compressor.average else total


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("average", [True, False])
def test_an_exchange(spec, average):
    compressors = [Compressor(spec, average=average) for _ in range(3)]
    assert not compressors[0].tensors_size_are_same
    gradients = [gradient_of(rank) for rank in range(3)]
    messages = [compressor.compress(gradient, "w")[0] for compressor, gradient in zip(compressors, gradients, strict=True)]
    assert all(message.dtype == torch.uint8 and message.dim() == 1 for (message,) in messages)
    seed = StepSeed(run=0, step=0, rank=0).of("w", shared="seeded" in spec)
    expected = sum(dr.decode(dr.encode(gradient.numpy(), spec, seed=seed)) for gradient in gradients)
    assert np.array_equal(allgather(compressors, messages).numpy(), expected / np.float32(3) if average else expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_shape_and_dtype_travel_in_the_message(dtype):
    gradient = gradient_of(0, dtype=dtype)
    tensors, ctx = Compressor("none/all/raw").compress(gradient, "w")
    assert ctx is None
    decompressed = Compressor("topr:0.5/raw/raw").decompress(tensors, ctx)
    assert decompressed.dtype == dtype
    assert torch.equal(decompressed, gradient)


def test_every_call_for_a_name_has_its_own_seed():
    compressor, again, gradient = Compressor("randomr:0.1/seeded/raw"), Compressor("randomr:0.1/seeded/raw"), gradient_of(0)
    first, second, other = (compressor.compress(gradient, name)[0][0] for name in ("w", "w", "v"))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(first, again.compress(gradient, "w")[0][0])


def test_memory_keeps_what_was_not_sent_as_the_core_does():
    compressor, memory, twin = Compressor("topr:0.05/raw/fp16"), Memory(), dr.ResidualMemory()
    for step in range(4):
        gradient = gradient_of(0, step)
        compensated = memory.compensate(gradient, "w")
        tensors, ctx = compressor.compress(compensated, "w")
        memory.update(compensated, "w", compressor, tensors, ctx)
        expected = twin.compensate("w", gradient.numpy())
        assert np.array_equal(compensated.numpy(), expected)
        twin.update("w", expected, dr.decode_sparse(dr.encode(expected, "topr:0.05/raw/fp16", seed=step)))


def test_aggregate_changes_nothing_it_was_given():
    tensors = [torch.ones(2), torch.ones(2)]
    assert Compressor("dense").aggregate(tensors).tolist() == [2, 2]
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [1, 1]]


def test_a_damaged_message_is_refused():
    (message,), ctx = Compressor("dense").compress(gradient_of(0), "w")
    with pytest.raises(dr.FormatError):
        Compressor("dense").decompress([message[:-1]], ctx)
    with pytest.raises(dr.FormatError):
        Compressor("dense").decompress([to_torch(np.zeros(0, np.uint8))], ctx)


def test_wrong_specs_are_refused_when_built():
    with pytest.raises(dr.ConfigError):
        Compressor("topr:2.5/raw/raw")


def rounded(rank):
    """What two ranks make of the same gradient: each rounds on its own."""
    return Compressor("none/all/qsgd:3").compress(gradient_of(0), "w")[0][0]


def test_ranks_do_not_share_their_rounding_errors():
    one, other = run_ranks(rounded, 2)
    assert not torch.equal(one, other)
