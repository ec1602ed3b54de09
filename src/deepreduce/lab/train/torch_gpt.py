"""A small GPT over bytes."""

from __future__ import annotations

from math import sqrt
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from .text import CONTEXT


class GPT(nn.Module):
    """Four blocks of width 128 with four heads, and one table for the bytes at both ends: 828,544 parameters.

    >>> sum(parameter.numel() for parameter in GPT().parameters())
    828544
    """

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the byte that follows each position."""
        features = self.blocks(self.bytes(text) + self.positions.weight[: text.shape[1]])
        return functional.linear(self.norm(features), self.bytes.weight)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.inward, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.inward(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return cast(Tensor, x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")))
