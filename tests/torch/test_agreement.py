"""All ranks end with the same bits; without compression they are those of plain DDP."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from deepreduce.torch import DeepReduceState

from .ranks import run_ranks
from .tasks import flat, hooked, network, train, trained

TOPOLOGIES = ["allgather", "server", "sharded", "dense"]
SPECS = [
    "topr:0.05/rice/qsgd",
    "topr:0.05/bloom:p0/raw",
    "topr:0.05/bloom:p1/fp16",
    "topr:0.05/bloom:p2/fitpoly",
    "skcompress",
]
CHEAP_SPECS = ["randomr:0.1/seeded/raw", "threshold:0.01/bitmap/bf16", "chunktopr:4,chunk=64/raw/fp16"]


def same_on_all(results):
    return all(torch.equal(result, results[0]) for result in results)


def plain_and_uncompressed(rank):
    plain = DistributedDataParallel(network(), bucket_cap_mb=0.005)
    train(rank, plain, 20)
    return [flat(plain)] + [trained(rank, "none/all/raw", topology, 20) for topology in TOPOLOGIES]


@pytest.mark.parametrize(("size", "tolerance"), [(1, 0), (2, 0), (4, 1e-6)])
def test_without_compression_it_is_plain_ddp(size, tolerance):
    results = run_ranks(plain_and_uncompressed, size)
    for plain, *uncompressed in results:
        for parameters in uncompressed:
            torch.testing.assert_close(parameters, plain, rtol=0, atol=tolerance)
    for column in zip(*results, strict=True):
        assert same_on_all(column)


def compressed(rank, specs, steps):
    ways = [(spec, topology) for spec in specs for topology in TOPOLOGIES[:3]]
    return [(spec, topology, trained(rank, spec, topology, steps, bucket_cap_mb=25)) for spec, topology in ways]


@pytest.mark.parametrize(("size", "specs", "steps"), [(2, SPECS, 50), (4, CHEAP_SPECS, 10)])
def test_all_ranks_hold_the_same_bits(size, specs, steps):
    start = flat(network())
    for column in zip(*run_ranks(compressed, size, specs, steps, timeout=240), strict=True):
        spec, topology, parameters = column[0]
        assert same_on_all([each for _, _, each in column]), (spec, topology)
        assert bool(torch.isfinite(parameters).all())
        assert not torch.equal(parameters, start)


def per_bucket(rank):
    return [trained(rank, "topr:0.05/raw/raw", topology, 6, small=100, per="bucket") for topology in TOPOLOGIES[:3]]


def test_top_r_over_a_whole_bucket():
    for column in zip(*run_ranks(per_bucket, 2), strict=True):
        assert same_on_all(column)


def loss_after(rank, spec, memory):
    state = DeepReduceState(spec, memory=memory, small_tensor_numel=16)
    return sum(train(rank, hooked(state, bucket_cap_mb=25), 400, lr=0.3)[-150:]) / 150


def all_losses(rank):
    compressed = "topr:0.01/rice/qsgd"
    return [loss_after(rank, spec, memory) for spec, memory in (("dense", "none"), (compressed, "residual"), (compressed, "none"))]


def test_error_feedback_reaches_the_loss_of_dense_training():
    dense, compensated, forgetful = (sum(column) / 2 for column in zip(*run_ranks(all_losses, 2, timeout=240), strict=True))
    assert compensated < 1.02 * dense
    assert forgetful > 1.1 * dense
