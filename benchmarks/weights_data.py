"""Pairs of weights before and after real steps: a byte-level GPT, pretrained a little, then trained further by policy gradient with AdamW.

The weights that are compared are bfloat16 copies of float32 master weights, as trainers publish them to rollout servers. The text is the
Python standard library, so that nothing has to be downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Weights = dict[str, NDArray[np.uint16]]

WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 256, 8, 4, 128, 256
PRETRAIN_STEPS, WARM_STEPS = 300, 8
RATES = {"1%": 4e-7, "2.5%": 1e-6, "5%": 2.1e-6, "15%": 8e-6}
"""About how many bfloat16 weights change in one step, and the learning rate that makes it so."""
FINE_TUNE = "90%"


class Block(nn.Module):
    """A layer of a transformer, normalised before attention and before the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The next hidden states."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level GPT of 6.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte at every place."""
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def corpus() -> Tensor:
    """The source files of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))), dtype=torch.uint8)


def batch(text: Tensor, size: int, length: int, generator: torch.Generator) -> Tensor:
    """Pieces of the text from random places."""
    starts = torch.randint(len(text) - length, (size,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts]).long()


def pretrain(model: GPT, text: Tensor, generator: torch.Generator, steps: int = PRETRAIN_STEPS) -> None:
    """Next-byte prediction."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for step in range(steps):
        tokens = batch(text, 8, CONTEXT + 1, generator)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"pretraining step {step}: loss {loss.item():.3f}", flush=True)


def policy_gradient_step(model: GPT, optimizer: torch.optim.Optimizer, text: Tensor, generator: torch.Generator) -> float:
    """One step of REINFORCE with a baseline: the reward is the share of letters in what the model writes."""
    prompts = batch(text, 4, 48, generator).repeat_interleave(4, 0)
    tokens = prompts
    with torch.no_grad():
        for _ in range(24):
            chances = functional.softmax(model(tokens)[:, -1], -1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    written = tokens[:, prompts.shape[1] :]
    reward = ((written >= 97) & (written <= 122)).float().mean(1)
    groups = reward.view(4, 4)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    scores = functional.log_softmax(model(tokens[:, :-1])[:, prompts.shape[1] - 1 :], -1)
    loss = -(advantage[:, None] * scores.gather(2, written[:, :, None]).squeeze(2)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return reward.mean().item()


def published(model: GPT) -> Weights:
    """The weights in bfloat16, as bit patterns."""
    return {name: tensor.detach().to(torch.bfloat16).view(torch.uint16).numpy().copy() for name, tensor in model.state_dict().items()}


def make(folder: Path, seed: int = 0) -> None:
    """Train and write one file per pair: arrays `old/NAME` and `new/NAME`."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, text = GPT(), corpus()
    pretrain(model, text, generator)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, rate in RATES.items():
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01)
        for _ in range(WARM_STEPS):
            policy_gradient_step(model, optimizer, text, generator)
        old = published(model)
        reward = policy_gradient_step(model, optimizer, text, generator)
        _save(folder, name, old, published(model))
        print(f"{name}: learning rate {rate}, reward {reward:.3f}", flush=True)
    model.load_state_dict(start)
    old = published(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    for _ in range(60):
        policy_gradient_step(model, optimizer, text, generator)
    _save(folder, FINE_TUNE, old, published(model))


def _save(folder: Path, name: str, old: Weights, new: Weights) -> None:
    np.savez(
        folder / f"{name}.npz", **{f"old/{key}": array for key, array in old.items()}, **{f"new/{key}": array for key, array in new.items()}
    )


def pairs(folder: Path) -> Iterator[tuple[str, Weights, Weights]]:
    """Name, old and new weights of every pair; made at the first call."""
    names = [*RATES, FINE_TUNE]
    if not all((folder / f"{name}.npz").exists() for name in names):
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
    for name in names:
        with np.load(folder / f"{name}.npz") as file:
            old = {key[4:]: file[key] for key in file.files if key.startswith("old/")}
            new = {key[4:]: file[key] for key in file.files if key.startswith("new/")}
        yield name, old, new


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for name, old, new in pairs(Path(sys.argv[1])):
        changed = sum(int((old[key] != new[key]).sum()) for key in old)
        print(f"{name}: {changed / sum(array.size for array in old.values()):.2%} changed")
