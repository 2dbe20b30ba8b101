"""The reference nets."""

# No postponed annotations here: torch.jit.script wants those of a module as objects.
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

GREY_LEVELS = 17
CLASSES = 10


class LeNet(nn.Module):
    """Images of 1x28x28 to 10 classes: two 5x5 convolutions, then linears 192 → 120 → 60 → 10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 12, 5)
        self.fc1 = nn.Linear(192, 120)
        self.fc2 = nn.Linear(120, 60)
        self.out = nn.Linear(60, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.out(F.relu(self.fc2(x)))
        return logits


class MLP(nn.Module):
    """
    ``depth`` linears without bias, ``size`` wide, with a ReLU after each but the last.

    Inputs of any shape are flattened; ``inputs`` and ``outputs`` are ``size`` unless given. One layer holds
    size² elements, so a file of any size is two numbers away.
    """

    def __init__(self, size: int, depth: int, *, inputs: int | None = None, outputs: int | None = None) -> None:
        super().__init__()
        widths = [inputs or size, *[size] * (depth - 1), outputs or size]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after, bias=False), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.flatten(1))
        return logits


class CifarNet(nn.Module):
    """Images of 3x32x32 to 10 classes: three 3x3 convolutions with max-pooling, then two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.fc2 = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for convolution in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class TiedReader(nn.Module):
    """
    Reads an image of 1x28x28 as a sentence of 49 grey levels and answers with the word for its class.

    It holds what breaks loaders: an embedding and a head that are one parameter, the running statistics and
    the integer counter of a BatchNorm, a buffer that no state_dict contains (``positions``), and an LSTM,
    which keeps its weights a second time outside its parameters.
    """

    positions: Tensor

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(GREY_LEVELS + CLASSES, size)
        self.register_buffer("positions", _sinusoids(49, size), persistent=False)
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.norm = nn.BatchNorm1d(size)
        self.head = nn.Linear(size, GREY_LEVELS + CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, images: Tensor) -> Tensor:
        # Grey levels 0 to 16 and the last ten words as literals: TorchScript sees no global numbers.
        levels = F.avg_pool2d(images, 4).flatten(1).clamp(0, 1).mul(16).round().long()
        states = self.lstm(self.embedding(levels) + self.positions)[0]
        words: Tensor = self.head(self.norm(states.mean(1)))
        return words[:, -10:]


def _sinusoids(length: int, size: int) -> Tensor:
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, size, 2) * (-math.log(1e4) / size))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :size].contiguous()


@dataclass(frozen=True, slots=True)
class NetRow:
    """How to build a net and what it is trained on: a data set and the side of its images in pixels."""

    build: Callable[[], nn.Module]
    data: str
    side: int


NETS = {
    "lenet": NetRow(LeNet, "digits", 28),
    "mlp": NetRow(lambda: MLP(64, 3, inputs=64, outputs=CLASSES), "digits", 8),
    "tied": NetRow(TiedReader, "digits", 28),
    "cifar": NetRow(CifarNet, "cifar10", 32),
}
