"""ResNet-50 for ImageNet in PyTorch."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional


class ResNet50(nn.Module):
    """The ImageNet ResNet of 50 layers with bottlenecks: 25,557,032 parameters (paper, Table 1)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inward = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(_Bottleneck(inward, width, stride if number == 0 else 1))
                inward = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inward, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return cast(Tensor, self.head(self.blocks(self.stem(images)).mean((2, 3))))


class _Bottleneck(nn.Module):
    def __init__(self, inward: int, width: int, stride: int) -> None:
        super().__init__()
        outward = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inward, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outward, 1, bias=False), nn.BatchNorm2d(outward)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))
            if stride != 1 or inward != outward
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        inner = functional.relu(self.norm2(self.conv2(inner)))
        return functional.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))
