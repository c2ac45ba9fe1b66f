"""Networks whose loss falls by orders of magnitude, or whose weights are signs: where small errors of an optimizer's state count."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from bound_models_fields import picture
from torch import Tensor, nn

__all__ = ["Fitted", "Reader", "Summer", "coarse_signs", "fine_signs", "pixels", "sound", "utterances"]


# --- networks that know a picture or a sound by heart -------------------------------------------------------------


class _Wave(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form

    def forward(self, values: Tensor) -> Tensor:
        return self.form(values)


class Fitted(nn.Module):
    """A network of sines (SIREN, arXiv 2006.09661), or of bells (arXiv 2111.15135), that is to give fixed values at fixed places.

    Args:
        sizes: of all layers.
        frequency: of the sines.
        bells: whether units are bells of that steepness instead of sines.
    """

    def __init__(self, sizes: tuple[int, ...], frequency: float, *, bells: bool = False) -> None:
        super().__init__()
        form = (lambda x: (-(x.square()) * frequency).exp()) if bells else (lambda x: (frequency * x).sin())
        layers: list[nn.Module] = []
        for index, (entering, leaving) in enumerate(pairwise(sizes)):
            layer = nn.Linear(entering, leaving)
            bound = 1 / entering if index == 0 or bells else math.sqrt(6 / entering) / frequency
            nn.init.uniform_(layer.weight, -bound, bound)
            layers += [layer, _Wave(form)]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, places: Tensor) -> Tensor:
        found: Tensor = self.layers(places)
        return found

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean square of what is missed."""
        return (self(batch[0]) - batch[1]).square().mean()


def pixels(side: int) -> tuple[Tensor, Tensor]:
    """Places and colours of all pixels of the picture."""
    axis = torch.linspace(-1, 1, side)
    places = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 2)
    return places, picture(places)


def sound(samples: int) -> tuple[Tensor, Tensor]:
    """Times from -1 to 1 and a sound: three tones that come and go, one of which glides."""
    time = torch.linspace(-1, 1, samples)[:, None]
    glide = (40 * time + 15 * time.square()).sin() * (-4 * time.square()).exp()
    return time, 0.4 * glide + 0.3 * (23 * time).sin() * (3 * time).cos() + 0.2 * (61 * time).cos() * time


# --- readers of sequences --------------------------------------------------------------------------------------

_SYMBOLS, _LETTERS, _FRAMES, _FEATURES = 8, 5, 24, 12


def utterances(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words of five symbols, each spoken for three to five frames with noise: ``(count, 24, 12)`` and ``(count, 5)``."""
    looks = torch.randn(_SYMBOLS + 1, _FEATURES, generator=torch.Generator().manual_seed(53))
    words = torch.randint(1, _SYMBOLS + 1, (count, _LETTERS), generator=drawn)
    lengths = torch.randint(3, 6, (count, _LETTERS), generator=drawn)
    ends = lengths.cumsum(1)
    frame = torch.arange(_FRAMES)[None, :, None]
    at = (frame >= ends[:, None, :]).sum(2)
    spoken = torch.where(at < _LETTERS, words.gather(1, at.clamp(max=_LETTERS - 1)), 0)
    heard = looks[spoken] + 0.3 * torch.randn(count, _FRAMES, _FEATURES, generator=drawn)
    return heard, words


class Reader(nn.Module):
    """A recurrent network that writes down what is spoken, by connectionist temporal classification.

    Args:
        width: of the recurrent layer.
        cell: its kind.
        both: whether it reads in both directions.
    """

    def __init__(self, width: int, cell: type[nn.RNNBase], *, both: bool) -> None:
        super().__init__()
        self.cell = cell(_FEATURES, width, batch_first=True, bidirectional=both)
        self.head = nn.Linear(2 * width if both else width, _SYMBOLS + 1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The negative logarithm of the words' probability, by symbol."""
        heard, words = batch
        said = self.head(self.cell(heard)[0]).log_softmax(2).transpose(0, 1)
        frames = torch.full((len(heard),), _FRAMES)
        return F.ctc_loss(said, words, frames, torch.full((len(heard),), _LETTERS))


class Summer(nn.Module):
    """A recurrent network that adds the two marked numbers of a sequence (the adding problem)."""

    def __init__(self, width: int, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = cell(2, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    @staticmethod
    def drawn(count: int, length: int, generator: torch.Generator) -> Tensor:
        """Numbers from 0 to 1, of which one in each half is marked."""
        numbers = torch.rand(count, length, generator=generator)
        half = length // 2
        marks = torch.zeros(count, length)
        for begin, size in ((0, half), (half, length - half)):
            marks[torch.arange(count), begin + torch.randint(size, (count,), generator=generator)] = 1
        return torch.stack([numbers, marks], 2)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean square of what the sum is missed by."""
        wanted = (rows[:, :, 0] * rows[:, :, 1]).sum(1)
        return (self.head(self.cell(rows)[0][:, -1])[:, 0] - wanted).square().mean()


# --- weights that are signs ---------------------------------------------------------------------------------------


class _Coarse(torch.autograd.Function):
    """A sign, or zero where the weight is below a threshold; the gradient passes as if it were the weight."""

    @staticmethod
    def forward(ctx: object, weight: Tensor, threshold: float) -> Tensor:
        return weight.sign() * (weight.abs() > threshold)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Signs(nn.Module):
    """A linear or a convolutional layer of signs, after which a BatchNorm sets the size."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, threshold: float) -> None:
        super().__init__()
        self.layer, self.threshold = layer, threshold
        conv = isinstance(layer, nn.Conv2d)
        self.norm = nn.BatchNorm2d(layer.out_channels) if conv else nn.BatchNorm1d(layer.out_features)

    def forward(self, values: Tensor) -> Tensor:
        weight = _Coarse.apply(self.layer.weight, self.threshold)
        if isinstance(self.layer, nn.Conv2d):
            return self.norm(F.conv2d(values, weight, None, self.layer.stride, self.layer.padding))
        return self.norm(F.linear(values, weight))


def coarse_signs(width: int, kinds: int, threshold: float = 0.0) -> nn.Sequential:
    """A convolutional network of signs for images of one channel."""
    sizes = ((1, width), (width, 2 * width), (2 * width, 2 * width))
    layers: list[nn.Module] = []
    for entering, leaving in sizes:
        layers += [_Signs(nn.Conv2d(entering, leaving, 3, 2, 1, bias=False), threshold), nn.Hardtanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(kinds))


def fine_signs(pixels: int, width: int, kinds: int) -> nn.Sequential:
    """Fully connected layers of signs."""
    first, second = (nn.Linear(entering, width, bias=False) for entering in (pixels, width))
    return nn.Sequential(
        nn.Flatten(),
        _Signs(first, 0.0),
        nn.Hardtanh(),
        _Signs(second, 0.0),
        nn.Hardtanh(),
        nn.Linear(width, kinds),
    )
