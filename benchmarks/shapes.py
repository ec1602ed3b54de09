"""Parameters with the shapes of real models, whose gradients are there at once: a step without a backward pass to speak of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """Return the shapes of ResNet-50: 161 tensors, 25,557,032 elements."""
    from deepreduce.lab.train.torch_resnet50 import ResNet50

    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in ResNet50().parameters()]


def gpt2(width: int = 768, layers: int = 12) -> list[Shape]:
    """Return the shapes of GPT-2, the small one: 148 tensors, 124,439,808 elements."""
    norm: list[Shape] = [(width,), (width,)]
    layer = [*norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50_257, width), (1024, width), *(layers * layer), *norm]


MODELS = {"resnet50": resnet50, "gpt2": gpt2}


def gradients_like(shapes: Sequence[Shape], seed: int) -> list[Tensor]:
    """Return gradients with long tails, as those of training have."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) * torch.randn(shape, generator=draw).exp() for shape in shapes]


class GivenGradients(nn.Module):
    """Parameters whose gradients are given: the backward pass only scales them, by another factor in every step."""

    def __init__(self, shapes: Sequence[Shape], seed: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.gradients = gradients_like(shapes, seed)

    def forward(self, factor: float) -> Tensor:
        """Return a scalar whose gradients are the given ones times `factor`."""
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([_Given.apply(weight, gradient, factor) for weight, gradient in pairs]).sum()


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: Tensor, gradient: Tensor, factor: float) -> Tensor:
        context.gradient, context.factor = gradient, factor
        return torch.zeros(())

    @staticmethod
    def backward(context: Any, *incoming: Tensor) -> tuple[Tensor, None, None]:
        return context.gradient * context.factor, None, None
