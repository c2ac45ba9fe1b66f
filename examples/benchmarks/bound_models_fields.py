"""Networks that represent a function: of places, or of a simulation's parameters."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["Poisson", "Sines", "borehole", "picture", "surrogate"]


class _Sine(nn.Module):
    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, values: Tensor) -> Tensor:
        return (self.frequency * values).sin()


class Sines(nn.Module):
    """A network of sines that represents a picture (SIREN, arXiv 2006.09661, with its initial weights).

    Args:
        width: of the three hidden layers.
        frequency: of the sines.
    """

    def __init__(self, width: int, frequency: float = 20.0) -> None:
        super().__init__()
        sizes = (2, width, width, width, 3)
        layers: list[nn.Module] = []
        for index, (entering, leaving) in enumerate(pairwise(sizes)):
            layer = nn.Linear(entering, leaving)
            bound = 1 / entering if index == 0 else math.sqrt(6 / entering) / frequency
            nn.init.uniform_(layer.weight, -bound, bound)
            layers += [layer, _Sine(frequency)]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, places: Tensor) -> Tensor:
        found: Tensor = self.layers(places)
        return found

    def loss(self, places: Tensor) -> Tensor:
        """Mean square of what is missed of the picture."""
        return (self(places) - picture(places)).square().mean()


def picture(places: Tensor) -> Tensor:
    """Three colours at places of the square from -1 to 1: waves, a disc with a soft edge, and a grating."""
    across, down = places.unbind(1)
    disc = torch.sigmoid(40 * (0.5 - (across.square() + down.square()).sqrt()))
    waves = (9 * across + 3 * (4 * down).sin()).sin()
    grating = (14 * (across + down)).cos() * (1 - disc)
    return torch.stack([disc, waves * disc, grating], 1)


class Poisson(nn.Module):
    """The solution of Poisson's equation in a square: zero at its edges by construction, random Fourier features at its start.

    Args:
        width: of the two hidden layers.
        features: how many waves.
    """

    def __init__(self, width: int, features: int = 32) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 * torch.randn(2, features))
        self.layers = nn.Sequential(
            nn.Linear(2 * features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, points: Tensor) -> Tensor:
        turned = points @ self.waves
        found: Tensor = self.layers(torch.cat([turned.sin(), turned.cos()], 1))
        across, down = points.unbind(1)
        return found[:, 0] * across * (1 - across) * down * (1 - down) * 16

    @staticmethod
    def source(points: Tensor) -> Tensor:
        """The equation's right side."""
        across, down = (torch.pi * points).unbind(1)
        return 2 * across.sin() * down.sin() + 5 * (2 * across).sin() * (3 * down).sin()

    def loss(self, points: Tensor) -> Tensor:
        """Mean square of what is missed of the equation."""
        with torch.enable_grad():
            inner = points.detach().requires_grad_()
            first = torch.autograd.grad(self(inner).sum(), inner, create_graph=True)[0]
            bent = sum(
                torch.autograd.grad(first[:, axis].sum(), inner, create_graph=True)[0][:, axis]
                for axis in (0, 1)
            )
            return (bent / torch.pi**2 + self.source(points)).square().mean()


def borehole(unit: Tensor) -> Tensor:
    """The flow of water through a borehole by eight parameters of a cube from 0 to 1, near 0 with a spread near 1.

    A usual test function of surrogate models (W. Morris, T. Mitchell, D. Ylvisaker, 1993), by its logarithm.
    """
    low = torch.tensor([0.05, 100.0, 63070.0, 990.0, 63.1, 700.0, 1120.0, 9855.0])
    high = torch.tensor([0.15, 50000.0, 115600.0, 1110.0, 116.0, 820.0, 1680.0, 12045.0])
    radius, influence, upper, head, lower, below, length, conducts = (low + (high - low) * unit).unbind(1)
    ratio = (influence / radius).log()
    flow = 2 * torch.pi * upper * (head - below)
    flow = flow / (ratio * (1 + 2 * length * upper / (ratio * radius.square() * conducts) + upper / lower))
    return (flow.log() - 4.1) / 0.55


def surrogate(width: int) -> nn.Sequential:
    """A network for such a function."""
    return nn.Sequential(
        nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 1),
    )  # fmt: skip
