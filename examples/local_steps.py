"""AdamW over a slow link: each rank takes its own steps, and the ranks exchange the largest part of what these changed.

torchrun --nproc-per-node 2 examples/local_steps.py
torchrun --nproc-per-node 2 examples/local_steps.py --every 40     # a tenth of the bytes
"""

import argparse

import torch
import torch.distributed as dist

from deepreduce.torch import LocalSteps


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--every", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=200)
    options = arguments.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # all ranks start from the same parameters
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # The one line. No DDP, and the loop below is the one that was there.
    local = LocalSteps(model, optimizer, recipe="adam", every=options.every)

    data = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        inputs = torch.randn(32, 64, generator=data)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1:3}: loss {loss.item():.3f}, {local.syncs} syncs")

    local.sync()  # on all ranks, before an evaluation or a checkpoint of the model: they have the same parameters now
    if rank == 0:
        print(f"{local.stats().ratio:.0f} times fewer bytes than dense gradients")
    local.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
