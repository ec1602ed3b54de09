"""How much Python there is between a gradient and its mean: on slow links the other ranks wait for it."""

import torch

from deepreduce.torch import DeepReduceState, allreduce_

from ..python_calls import python_calls


def test_one_tensor_takes_at_most_150_calls():
    with DeepReduceState("topr:0.01/rice/qsgd") as state:
        for _ in range(3):
            allreduce_([torch.randn(1_000_000)], state)  # compiles, and begins its residual
        gradient = torch.randn(1_000_000)
        assert python_calls(lambda: allreduce_([gradient], state)) <= 150


def test_a_small_tensor_among_many_takes_at_most_28_calls():
    with DeepReduceState("topr:0.01/rice/qsgd") as state:
        for _ in range(3):
            allreduce_([torch.randn(2048) for _ in range(500)], state)
        gradients = [torch.randn(2048) for _ in range(500)]
        assert python_calls(lambda: allreduce_(gradients, state)) <= 28 * 500
