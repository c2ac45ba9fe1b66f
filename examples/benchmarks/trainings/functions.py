"""Trainings of networks that represent a function, whose loss falls by orders of magnitude: equations, pictures, sounds.

The equation of heat is the one on which the rule of finer moments was chosen; the others were written to try that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adam, AdamW, Optimizer

from trainings.base import (
    PROBE,
    Kind,
    Made,
    Run,
    Training,
    generator,
    held_out,
    mean_loss,
    on_drawn,
    training,
)
from trainings.parts import Rate, cosine, falling, mlp


class _Wave(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form

    def forward(self, values: Tensor) -> Tensor:
        return self.form(values)


class _Waves(nn.Module):
    """A network of sines (SIREN, arXiv 2006.09661), or of bells (arXiv 2111.15135), that is to give values at places."""

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

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean square of what is missed."""
        return (self.layers(batch[0]) - batch[1]).square().mean()


def _picture(places: Tensor) -> Tensor:
    """Three colours at places of the square from -1 to 1: waves, a disc with a soft edge, and a grating."""
    across, down = places.unbind(1)
    disc = torch.sigmoid(40 * (0.5 - (across.square() + down.square()).sqrt()))
    waves = (9 * across + 3 * (4 * down).sin()).sin()
    grating = (14 * (across + down)).cos() * (1 - disc)
    return torch.stack([disc, waves * disc, grating], 1)


def _pixels(side: int) -> tuple[Tensor, Tensor]:
    """Places and colours of all pixels of the picture."""
    axis = torch.linspace(-1, 1, side)
    places = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 2)
    return places, _picture(places)


def _sound(samples: int) -> tuple[Tensor, Tensor]:
    """Times from -1 to 1 and a sound: three tones that come and go, one of which glides."""
    time = torch.linspace(-1, 1, samples)[:, None]
    glide = (40 * time + 15 * time.square()).sin() * (-4 * time.square()).exp()
    return time, 0.4 * glide + 0.3 * (23 * time).sin() * (3 * time).cos() + 0.2 * (61 * time).cos() * time


class _Poisson(nn.Module):
    """The solution of Poisson's equation in a square: zero at its edges by construction, random Fourier features at its start."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 * torch.randn(2, features))
        self.layers = mlp(2 * features, width, width, 1, form=nn.SiLU)

    def forward(self, points: Tensor) -> Tensor:
        turned = points @ self.waves
        found: Tensor = self.layers(torch.cat([turned.sin(), turned.cos()], 1))
        across, down = points.unbind(1)
        return found[:, 0] * across * (1 - across) * down * (1 - down) * 16

    def loss(self, points: Tensor) -> Tensor:
        """Mean square of what is missed of the equation."""
        with torch.enable_grad():
            inner = points.detach().requires_grad_()
            first = torch.autograd.grad(self(inner).sum(), inner, create_graph=True)[0]
            bent = sum(
                torch.autograd.grad(first[:, axis].sum(), inner, create_graph=True)[0][:, axis]
                for axis in (0, 1)
            )
            across, down = (torch.pi * points).unbind(1)
            source = 2 * across.sin() * down.sin() + 5 * (2 * across).sin() * (3 * down).sin()
            return (bent / torch.pi**2 + source).square().mean()


class _Heat(nn.Module):
    """The temperature of a rod by place and time: a network whose derivatives must obey the equation of heat."""

    RATE = 0.1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = mlp(2, width, width, width, 1, form=nn.Tanh)

    def forward(self, points: Tensor) -> Tensor:
        found: Tensor = self.layers(points)
        return found[:, 0]

    def loss(self, points: Tensor) -> Tensor:
        """How far the equation, the ends and the beginning are missed at these places and times."""
        with torch.enable_grad():
            inner = points.detach().requires_grad_()
            first = torch.autograd.grad(self(inner).sum(), inner, create_graph=True)[0]
            bent = torch.autograd.grad(first[:, 0].sum(), inner, create_graph=True)[0][:, 0]
            missed = (first[:, 1] - self.RATE * bent).square().mean()
        place, time = points.unbind(1)
        zero = torch.zeros_like(place)
        begins = (torch.pi * place).sin() + 0.3 * (2 * torch.pi * place).sin()
        start = self(torch.stack([place, zero], 1)) - begins
        ends = [self(torch.stack([zero + end, time], 1)) for end in (0, 1)]
        return missed + 10 * start.square().mean() + 10 * sum(end.square().mean() for end in ends)

    @torch.no_grad()
    def error(self, points: Tensor) -> Tensor:
        """Mean squared distance to the solution."""
        place, time = points.unbind(1)
        slow, fast = (torch.exp(-self.RATE * (k * torch.pi) ** 2 * time) for k in (1, 2))
        truth = (torch.pi * place).sin() * slow + 0.3 * (2 * torch.pi * place).sin() * fast
        return (self(points) - truth).square().mean()


class _Surrogate(nn.Sequential):
    """A network instead of a simulation."""

    def loss(self, cube: Tensor) -> Tensor:
        """Mean square of what is missed."""
        return nn.functional.mse_loss(self(cube)[:, 0], _borehole(cube))


def _borehole(unit: Tensor) -> Tensor:
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


# --- trainings ----------------------------------------------------------------------------------------------


def _points(count: int, drawn: torch.Generator) -> Tensor:
    return torch.rand(count, 2, generator=drawn)


def _sines(run: Run) -> Training:
    model = _Waves((2, *3 * (run.size(16, 64),), 3), 20.0)

    def batch(drawn: torch.Generator, count: int = 1024) -> tuple[Tensor, Tensor]:
        places = 2 * _points(count, drawn) - 1
        return places, _picture(places)

    held, adam = (batch, partial(batch, count=4096)), Adam(model.parameters(), lr=5e-4)
    return on_drawn(run, model, batch, adam, held=held, truth=(4, 4), rate=falling(run.steps, 0.02))


def _fitted(run: Run, data: tuple[Tensor, Tensor], model: _Waves, optimizer: Made, rate: Rate) -> Training:
    """Fits all of the data; the probe sees parts of it, the truth is the whole."""
    places, values = data

    def some(drawn: torch.Generator, size: int = 1024) -> tuple[Tensor, Tensor]:
        taken = torch.randint(len(places), (size,), generator=drawn)
        return places[taken], values[taken]

    def batch(drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        return data if len(places) <= 1024 else some(drawn)

    held = held_out(partial(some, size=512), 10, PROBE), [data]
    return training(run, model, model.loss, batch, held, optimizer(model.parameters()), rate=rate)


def _fitted_picture(run: Run) -> Training:
    model = _Waves((2, *3 * (run.size(16, 64),), 3), 10.0)
    return _fitted(run, _pixels(run.size(16, 24)), model, partial(Adam, lr=1e-3), cosine(run.steps))


def _fitted_sound(run: Run) -> Training:
    model = _Waves((1, *3 * (run.size(16, 64),), 1), 20.0)
    return _fitted(run, _sound(run.size(512, 1536)), model, partial(Adam, lr=1e-3), falling(run.steps, 0.01))


def _fitted_deep(run: Run) -> Training:
    model = _Waves((2, *5 * (run.size(16, 48),), 3), 10.0)
    adamw = partial(AdamW, lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    return _fitted(run, _pixels(run.size(16, 40)), model, adamw, cosine(run.steps, 0.01))


def _fitted_bells(run: Run) -> Training:
    model = _Waves((2, *3 * (run.size(16, 64),), 3), 6.0, bells=True)
    return _fitted(run, _pixels(run.size(16, 40)), model, partial(Adam, lr=2e-3), cosine(run.steps, 0.01))


def _on_points(run: Run, model: Any, optimizer: Optimizer, rate: Rate) -> Training:
    held = partial(_points, 512), partial(_points, 2048)
    return on_drawn(run, model, partial(_points, 256), optimizer, held=held, truth=(4, 4), rate=rate)


def _poisson(run: Run) -> Training:
    model = _Poisson(*run.size((16, 8), (64, 32)))
    return _on_points(run, model, AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4), cosine(run.steps))


def _surrogate(run: Run) -> Training:
    width = run.size(16, 96)
    model = _Surrogate(*mlp(8, width, width, width, 1))
    known = torch.rand(4096, 8, generator=generator(0, 1))

    def batch(drawn: torch.Generator) -> Tensor:
        return known[torch.randint(len(known), (256,), generator=drawn)]

    def unknown(count: int, drawn: torch.Generator) -> Tensor:
        return torch.rand(count, 8, generator=drawn)

    held, adam = (partial(unknown, 512), partial(unknown, 4096)), Adam(model.parameters(), lr=2e-3)
    rate: Rate = lambda step: 0.5 ** (4 * min(1.0, step / run.steps))  # noqa: E731
    return on_drawn(run, model, batch, adam, held=held, truth=(4, 4), rate=rate)


def _heat(run: Run) -> Training:
    model = _Heat(run.size(16, 64))
    made = _on_points(run, model, Adam(model.parameters(), lr=2e-3), rate=falling(run.steps, 0.05))
    made.also = {"distance to the solution": mean_loss(model, model.error, [_points(8192, generator(0, 50))])}
    return made


@dataclass(kw_only=True)
class _Closing(Training):
    """The first optimizer alone makes the steps, until from some step on the last one, L-BFGS, makes them on fixed points."""

    closes: int
    fixed: Tensor

    def step(self, index: int) -> float:
        if index < self.closes:
            every, self.optimizers = self.optimizers, self.optimizers[:1]
            try:
                return super().step(index)
            finally:
                self.optimizers = every
        model: Any = self.model

        def closure() -> float:
            model.zero_grad()
            loss: Tensor = model.loss(self.fixed)
            loss.backward()
            return float(loss.detach())

        found = self.optimizers[-1].step(closure)
        return math.nan if found is None else float(found)


def _heat_closing(run: Run) -> Training:
    made = _heat(run)
    last = LBFGS(made.model.parameters(), max_iter=4, history_size=10, line_search_fn="strong_wolfe")
    fields = {**vars(made), "optimizers": [*made.optimizers, last]}
    fixed = _points(512, generator(run.seed, 999_999))
    return _Closing(**fields, closes=run.steps * 6 // 11, fixed=fixed)


HEAT = (
    Kind("pinn", "Equation of heat, Adam", _heat, 200),
    Kind("pinn-lbfgs", "Equation of heat, Adam, then L-BFGS", _heat_closing, 120),
)
FIELDS = (
    Kind("sines", "Picture by a network of sines, Adam", _sines, 160),
    Kind("poisson", "Poisson's equation, Fourier features, AdamW", _poisson, 160),
    Kind("borehole", "Function of a simulation, Adam", _surrogate, 300),
)
FITTED = (
    Kind("sines-fit", "Picture by heart, sines, Adam, cosine", _fitted_picture, 160),
    Kind("sines-sound", "Sound by heart, sines, Adam", _fitted_sound, 120),
    Kind("sines-deep", "Picture by heart, five layers of sines, AdamW", _fitted_deep, 120),
    Kind("bells-fit", "Picture by heart, bells, Adam", _fitted_bells, 120),
)
