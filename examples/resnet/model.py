"""ResNet-18 (He et al., "Deep Residual Learning for Image Recognition", 2015), with random weights from a seed.

Every process that builds it with the same seed has the same weights: nothing needs to be sent or downloaded, and
what a worker computes can be checked anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BasicBlock", "ResNet18", "build"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Args:
        width_in: channels of the input.
        width: channels of the output.
        stride: of the first convolution; with 2 the output has half the height and width.
    """

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Images of shape (n, width_in, h, w) to (n, width, h / stride, w / stride)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """A stem, four stages of two blocks, and a linear classifier of `classes` classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        width_in = 64
        for stage, width in enumerate((64, 128, 256, 512)):
            blocks += [BasicBlock(width_in, width, 1 if stage == 0 else 2), BasicBlock(width, width, 1)]
            width_in = width
        self.stages = nn.Sequential(*blocks)
        self.classify = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images of shape (n, 3, h, w), float32, to scores of shape (n, classes)."""
        features = self.stages(self.stem(images)).mean(dim=(2, 3))
        scores: Tensor = self.classify(features)
        return scores


def build(device: torch.device, seed: int = 18) -> ResNet18:
    """The model with the weights that `seed` gives, ready to classify."""
    torch.manual_seed(seed)
    model = ResNet18()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model.eval().to(device)
