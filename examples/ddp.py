"""Data-parallel training with compressed gradients.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --spec dense        # no compression: the parameters of plain DDP
"""

import argparse

import rich
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepreduce.torch import DeepReduceState, deepreduce_hook


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--spec", default="topr:0.01/rice/qsgd")
    arguments.add_argument("--topology", default="allgather")
    arguments.add_argument("--steps", type=int, default=100)
    options = arguments.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    ddp = DistributedDataParallel(model)

    # The one line, and the state that it needs.
    state = DeepReduceState(options.spec, topology=options.topology, model=model)
    ddp.register_comm_hook(state, deepreduce_hook)

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        inputs = torch.randn(32, 64, generator=data)
        targets = inputs[:, :10].argmax(1)
        loss = torch.nn.functional.cross_entropy(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}, {state.stats().last.ratio:.0f} times fewer bytes than dense")

    if rank == 0:
        rich.print(state.stats().table())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
