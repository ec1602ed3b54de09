"""FSDP2 over two nodes: dense inside a node, compressed between nodes. Here four processes stand for two nodes of two.

torchrun --nproc-per-node 4 examples/fsdp.py
"""

import rich
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deepreduce.torch import DeepReduceState, compress_fsdp


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # all replicas start from the same parameters
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])

    # The one line, and the state that it needs.
    state = DeepReduceState("topr:0.01/rice/qsgd", process_group=mesh["replicate"].get_group())
    compress_fsdp(model, state)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(41):
        inputs = torch.randn(32, 64, generator=data)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}, {state.stats().last.ratio:.0f} times fewer bytes than dense")

    if rank == 0:
        rich.print(state.stats().table())
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
