"""A trainer sends its new weights to two receivers after every step; one of them is killed, and comes back.

    python examples/weight_sync.py [--syncs 50]

The trainer fine-tunes a small byte-level GPT, with master weights in float32 and published weights in bfloat16. All ranks end with the
same bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional

from deepreduce import PeerError
from deepreduce.torch import WeightSync

WIDTH, CONTEXT = 128, 64
PRETRAINING = 30
PROCESSES = mp.get_context("forkserver")
PROCESSES.set_forkserver_preload(["deepreduce.torch", "torch._dynamo"])  # once for all ranks; an optimizer imports the second
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


class GPT(nn.Module):
    """Two layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.bytes(tokens) + self.positions.weight[: tokens.shape[1]], mask=mask, is_causal=True))


def train_step(model: GPT, optimizer: torch.optim.Optimizer) -> float:
    starts = torch.randint(len(TEXT) - CONTEXT - 1, (8,))
    tokens = torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts])
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def join_group(folder: str, rank: int, generation: int, size: int) -> None:
    """Meet the other members of this generation of the group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/generation-{generation}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))


def membership(sync: int, killed: int, back: int) -> tuple[int, int]:
    """Which generation of the group a sync belongs to, and how many ranks it has."""
    if sync < killed:
        return 0, 3
    return (1, 2) if sync < back else (2, 3)


def digest(tensors: dict[str, Tensor]) -> Tensor:
    """A number that differs where a bit differs."""
    return sum(tensor.view(torch.int16).long().mul(torch.arange(tensor.numel()).view_as(tensor) + 1).sum() for tensor in tensors.values())


def check_equal(published: dict[str, Tensor]) -> None:
    """All ranks of the group have the same bits."""
    found = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, digest(published))
    assert all(torch.equal(each, found[0]) for each in found), "the weights differ"


def member(rank: int, folder: str, syncs: int, first: int, killed: int, back: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = GPT()
    published = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(PRETRAINING if rank == 0 else 0):
        train_step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-6
    join_group(folder, rank, *membership(first, killed, back))
    weights = WeightSync(published)
    for number in range(first, syncs):
        if rank == 0:
            loss = train_step(model, optimizer)
            for name, tensor in model.state_dict().items():
                published[name].copy_(tensor)
        if rank == 2 and first == 0 and number == killed:
            Path(folder, "kill-me").touch()
            time.sleep(60)
        if number == back and first == 0:
            print(f"sync {number}: rank 2 comes back", flush=True) if rank == 0 else None
            join_group(folder, rank, *membership(number, killed, back))
            weights.rejoin(None)
        try:
            stats = weights.push() if rank == 0 else weights.pull()
        except PeerError:
            print(f"sync {number}: a receiver is gone, the others go on", flush=True) if rank == 0 else None
            join_group(folder, rank, *membership(number, killed, back))
            weights.rejoin(None)
            stats = weights.push() if rank == 0 else weights.pull()
        check_equal(published)
        if rank == 0:
            full = f", a whole copy of {stats.full_bytes:,} to ranks {stats.full_ranks}" if stats.full_ranks else ""
            share = stats.dense_bytes / stats.patch_bytes if stats.patch_bytes else 1.0
            print(
                f"sync {number}: loss {loss:.3f}, {stats.patch_bytes:,} bytes of {stats.dense_bytes:,} dense ({share:.0f}x){full}",
                flush=True,
            )
    if rank == 0:
        print(f"{syncs} syncs, all bit-identical", flush=True)
    weights.close()
    dist.destroy_process_group()


def start(rank: int, *arguments: Any) -> ForkServerProcess:
    process = PROCESSES.Process(target=member, args=(rank, *arguments), daemon=True)
    process.start()
    return process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--syncs", type=int, default=50)
    syncs = parser.parse_args().syncs
    if syncs < 3:
        parser.error(f"--syncs is at least 3, got {syncs}: before rank 2 is killed, without it, and after it came back")
    killed, back = syncs // 3, 2 * syncs // 3
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(rank, folder, syncs, 0, killed, back) for rank in range(3)]
        while not Path(folder, "kill-me").exists() and ranks[0].is_alive():
            time.sleep(0.05)
        ranks[2].kill()
        ranks[2] = start(2, folder, syncs, back, killed, back)
        for rank in ranks:
            rank.join()
        return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
