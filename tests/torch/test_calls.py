"""How much Python there is between a gradient and its mean: on slow links the other ranks wait for it."""

import sys

import torch

from deepreduce.torch import DeepReduceState, allreduce_


def calls_of(run):
    count = 0

    def saw(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(saw)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_one_tensor_takes_at_most_150_calls():
    with DeepReduceState("topr:0.01/rice/qsgd") as state:
        for _ in range(3):
            allreduce_([torch.randn(1_000_000)], state)  # compiles, and begins its residual
        gradient = torch.randn(1_000_000)
        assert calls_of(lambda: allreduce_([gradient], state)) <= 150


def test_a_small_tensor_among_many_takes_at_most_28_calls():
    with DeepReduceState("topr:0.01/rice/qsgd") as state:
        for _ in range(3):
            allreduce_([torch.randn(2048) for _ in range(500)], state)
        gradients = [torch.randn(2048) for _ in range(500)]
        assert calls_of(lambda: allreduce_(gradients, state)) <= 28 * 500
