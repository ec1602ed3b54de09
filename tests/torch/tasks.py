"""Small trainings that every rank of a test runs."""

import torch
from torch.nn.parallel import DistributedDataParallel

from deepreduce.torch import DeepReduceState, deepreduce_hook


def network(seed=0, width=48, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(20, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 5)]
    return torch.nn.Sequential(*layers).to(dtype)


def batch(rank, step, rows=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(rows, 20, generator=generator)
    targets = (inputs[:, :5] + inputs[:, 5:10] * inputs[:, 10:15]).argmax(1)
    return inputs.to(dtype), targets


def train(rank, model, steps, lr=0.1, start=0):
    """Train by SGD and return the loss of every step."""
    return train_with(rank, model, torch.optim.SGD(model.parameters(), lr=lr), steps, start)


def train_with(rank, model, optimizer, steps, start=0):
    """Train by an optimizer and return the loss of every step."""
    losses = []
    for step in range(start, start + steps):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def flat(model):
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])


def hooked(state, bucket_cap_mb=0.005):
    """The network under DDP with the hook, in several buckets unless they may be larger."""
    model = DistributedDataParallel(network(), bucket_cap_mb=bucket_cap_mb)
    model.register_comm_hook(state, deepreduce_hook)
    return model


def trained(rank, spec, topology, steps, small=16, bucket_cap_mb=0.005, **options):
    """The parameters after training with the hook."""
    model = hooked(DeepReduceState(spec, topology=topology, small_tensor_numel=small, **options), bucket_cap_mb)
    train(rank, model, steps)
    return flat(model)
