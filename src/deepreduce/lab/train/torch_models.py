"""The models of the tasks in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .batches import Data
from .torch_gpt import GPT
from .torch_resnet50 import ResNet50


class ResNet20(nn.Module):
    """The CIFAR ResNet of 20 layers, with shortcuts that pad with zeros: 269,722 parameters (paper, Table 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.blocks = nn.Sequential(*(_Residual(*width) for width in widths))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        features = self.blocks(functional.relu(self.norm(self.stem(images))))
        return cast(Tensor, self.head(features.mean((2, 3))))


class _Residual(nn.Module):
    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.stride, self.grown = stride, outward - inward
        self.conv1 = nn.Conv2d(inward, outward, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outward)
        self.conv2 = nn.Conv2d(outward, outward, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outward)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return functional.relu(inner + functional.pad(shortcut, (0, 0, 0, 0, 0, self.grown)))


class DenseNet40(nn.Module):
    """DenseNet of 40 layers with growth rate 12, without bottlenecks: 1,019,722 parameters."""

    def __init__(self, growth: int = 12) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
        width = 16
        for block in range(3):
            for _ in range(12):
                layers.append(_Dense(width, growth))
                width += growth
            if block < 2:
                layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1, bias=False), nn.AvgPool2d(2)]
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return cast(Tensor, self.layers(images))


class _Dense(nn.Module):
    def __init__(self, inward: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inward)
        self.conv = nn.Conv2d(inward, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(functional.relu(self.norm(x)))], 1)


def convnet() -> nn.Module:
    """Two convolutions and three linear layers for 32x32 images: 1,756,426 parameters, eight times as many per multiplication as ResNet-20.

    The shape that federated averaging was tried with on CIFAR-10 (McMahan et al. 2017), without its normalisation of local responses.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, 10),
    )


class NeuMF(nn.Module):
    """Neural matrix factorisation: 64 factors that are multiplied beside 128 that go through three layers, for users and items each.

    With the 138,493 users and 26,744 items of MovieLens-20M: 31,832,577 parameters (paper, Table 1).
    """

    def __init__(self, users: int, items: int, factors: int = 64, deep: int = 128) -> None:
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_deep, self.item_deep = nn.Embedding(users, deep), nn.Embedding(items, deep)
        sizes = [(2 * deep, 256), (256, 128), (128, 64)]
        self.layers = nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())))
        self.head = nn.Linear(factors + 64, 1)
        for embedding in (self.user_factors, self.item_factors, self.user_deep, self.item_deep):
            nn.init.normal_(embedding.weight, std=0.01)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a score for each pair."""
        product = self.user_factors(users) * self.item_factors(items)
        deep = self.layers(torch.cat([self.user_deep(users), self.item_deep(items)], -1))
        return cast(Tensor, self.head(torch.cat([product, deep], -1)).squeeze(-1))


def mlp(hidden: int = 1024) -> nn.Module:
    """Two wide hidden layers for 8x8 images: 1,126,410 parameters, so that there is something to compress."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def cnn() -> nn.Module:
    """Two convolutions and a layer for 8x8 images: 151,306 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


_MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "mlp": lambda data: mlp(),
    "cnn": lambda data: cnn(),
    "resnet20": lambda data: ResNet20(),
    "densenet40": lambda data: DenseNet40(),
    "convnet": lambda data: convnet(),
    "resnet50": lambda data: ResNet50(),
    "gpt": lambda data: GPT(),
    "neumf": lambda data: NeuMF(data.user_count, data.item_count),
}


def build(name: str, data: Data, seed: int) -> nn.Module:
    """Return the model of this name for this data, with the initial weights of this seed."""
    torch.manual_seed(seed)
    return _MODELS[name](data)


def parameter_count(model: nn.Module) -> int:
    """Return the number of elements of all parameters.

    >>> parameter_count(ResNet20()), parameter_count(DenseNet40()), parameter_count(convnet())
    (269722, 1019722, 1756426)
    """
    return sum(parameter.numel() for parameter in model.parameters())
