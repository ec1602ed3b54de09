"""Gradients that are sparse by themselves: what is sent stays in proportion to what is touched, and nothing is lost in the long run."""

import pytest
import torch

from deepreduce.torch import DeepReduceState, allreduce_

ROWS, WIDTH, TOUCHED = 20_000, 16, 200


def gradient(step, sparse):
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, ROWS, (TOUCHED,), generator=generator).unique()
    values = torch.randn(rows.numel(), WIDTH, generator=generator)
    stored = torch.sparse_coo_tensor(rows[None], values, (ROWS, WIDTH), check_invariants=True)
    return stored if sparse else stored.to_dense()


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_bytes_stay_flat_and_sums_agree(sparse):
    state = DeepReduceState("nonzero/auto/qsgd")
    given, sent, sizes, errors = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), [], []
    for step in range(500):
        mine = gradient(step, sparse)
        given += mine.to_dense() if sparse else mine
        allreduce_(mine, state)
        sent += mine.to_dense() if sparse else mine
        sizes.append(state.stats().last.message_bytes)
        errors.append(float((sent - given).norm() / given.norm()))
    assert max(sizes) < 1.2 * min(sizes)
    assert errors[-1] < errors[0] < 0.05


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_what_was_rounded_off_is_sent_when_the_row_is_touched_again(sparse):
    state = DeepReduceState("nonzero/raw/qsgd:2", small_tensor_numel=0)
    given, sent = torch.zeros(50, 4), torch.zeros(50, 4)
    for _ in range(400):
        rows = torch.zeros(50, 4)
        rows[7:9] = torch.tensor([1.0, 0.3, -0.2, 0.05])
        given += rows
        mine = rows.to_sparse(1) if sparse else rows
        allreduce_(mine, state)
        sent += mine.to_dense() if sparse else mine
    torch.testing.assert_close(sent, given, rtol=0.02, atol=2.0)


def test_momentum_counts_for_sparse_gradients_too():
    from deepreduce.torch import ResidualMemory

    means = []
    for sparse in (True, False):
        state = DeepReduceState("topr:2/raw/raw", memory=ResidualMemory(momentum=0.5), small_tensor_numel=0)
        for step in range(4):
            mine = torch.tensor([0.0, 3.0, 0.0, 1.0, 2.0 + step])
            mine = mine.to_sparse() if sparse else mine
            allreduce_(mine, state)
        means.append(mine.to_dense())
    assert torch.equal(*means)
