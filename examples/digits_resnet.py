"""A ResNet for images of 8 x 8 pixels, and scikit-learn's handwritten digits.

Used by digits.py and digits_plain.py.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        return functional.relu(self.path(x) + self.around(x))


def resnet():
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(
        stem,
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def load_images():
    """1437 images to train with, 360 to validate."""
    digits = load_digits()
    images, target = (
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(digits.target),
    )
    return TensorDataset(images[:1437], target[:1437]), TensorDataset(images[1437:], target[1437:])
