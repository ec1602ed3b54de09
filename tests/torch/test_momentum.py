"""Momentum correction in the hook: Deep Gradient Compression, by the recipe for SGD."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from deepreduce.torch import DeepReduceState, ResidualMemory, Schedule, deepreduce_hook

from .ranks import run_ranks
from .tasks import batch, flat, network
from .tasks import train_with as train

RATE, MOMENTUM = 0.05, 0.9


def hooked(state):
    model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
    model.register_comm_hook(state, deepreduce_hook)
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def dense_both_ways(rank):
    """Plain DDP with momentum in the optimizer, and dense messages with momentum in the memory."""
    plain = DistributedDataParallel(network())
    train(rank, plain, torch.optim.SGD(plain.parameters(), lr=RATE, momentum=MOMENTUM), 20)
    ours, optimizer = hooked(DeepReduceState("dense", memory=ResidualMemory(momentum=MOMENTUM)))
    train(rank, ours, optimizer, 20)
    return flat(plain), flat(ours)


def test_dense_steps_with_momentum_in_the_memory_are_those_of_sgd_with_momentum():
    for plain, ours in run_ranks(dense_both_ways, 2):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)


def by_hand(rank, spec_density, steps):
    """The algorithm of the paper, on the gradients of both ranks: accumulate momentum, then the residual; what is sent leaves both."""
    model = network()
    parameters, ranks = list(model.parameters()), 2
    velocities, residuals = ([[torch.zeros_like(p) for p in parameters] for _ in range(ranks)] for _ in range(2))
    for step in range(steps):
        means = [torch.zeros_like(p) for p in parameters]
        for peer in range(ranks):
            inputs, targets = batch(peer, step)
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            for index, gradient in enumerate(torch.autograd.grad(loss, parameters)):
                velocity, residual = velocities[peer][index], residuals[peer][index]
                velocity.mul_(MOMENTUM).add_(gradient)
                residual.add_(velocity)
                sent = torch.ones_like(residual, dtype=torch.bool)
                if gradient.numel() >= 100:
                    kept = max(1, round(spec_density * gradient.numel()))
                    sent = torch.zeros(gradient.numel(), dtype=torch.bool)
                    sent[residual.abs().flatten().topk(kept).indices] = True
                    sent = sent.view_as(residual)
                    velocity.masked_fill_(sent, 0)
                means[index] += torch.where(sent, residual, 0) / ranks
                residual.masked_fill_(sent, 0)
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.data -= RATE * mean
    return flat(model)


def sparse_both_ways(rank):
    state = DeepReduceState("topr:0.1/rice/raw", memory=ResidualMemory(momentum=MOMENTUM), small_tensor_numel=100)
    model, optimizer = hooked(state)
    train(rank, model, optimizer, 12)
    return flat(model), by_hand(rank, 0.1, 12)


def test_the_hook_follows_the_algorithm_of_the_paper():
    for ours, expected in run_ranks(sparse_both_ways, 2):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def by_the_recipe(rank):
    state = DeepReduceState(recipe="sgd")
    model, optimizer = hooked(state)
    losses = train(rank, model, optimizer, 60)
    return flat(model), sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def test_the_recipe_for_sgd_learns():
    results = run_ranks(by_the_recipe, 2)
    assert torch.equal(results[0][0], results[1][0])
    for _, first, last in results:
        assert last < 0.9 * first


def test_the_recipe_for_sgd_is_what_it_says():
    state = DeepReduceState(recipe="sgd")
    assert state.reducer.policy.schedule == Schedule("topr:0.01/rice/qsgd", 500, start=0.25)
    assert state.memory.own == ResidualMemory(momentum=0.9)
    given = DeepReduceState("topr:0.1/rice/raw", recipe="sgd", memory=ResidualMemory(momentum=0.5, clip=1.0))
    assert (given.memory.own.momentum, given.memory.own.clip) == (0.5, 1.0)
    with pytest.raises(ValueError, match="LocalSteps"):
        DeepReduceState(recipe="adam")
