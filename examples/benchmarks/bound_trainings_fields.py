"""Trainings of networks that represent a function, whose loss falls by orders of magnitude.

They were written to try a rule that was chosen on the equation of heat (`bound_trainings_more`), and nothing was chosen on them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from bound_models_fields import Poisson, Sines, borehole, surrogate
from bound_training import Kind, Training, generator, mean_loss, scheduled
from torch import Tensor

__all__ = ["FIELDS"]

_PROBE = 3
"""Held-out batches of the probe."""


def _sines(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    steps = kind.steps(quick)
    model = Sines(16 if quick else 64)
    adam = torch.optim.Adam(model.parameters(), lr=5e-4)

    def places(drawn: torch.Generator, count: int = 1024) -> Tensor:
        return 2 * torch.rand(count, 2, generator=drawn) - 1

    return Training(
        model=model,
        optimizers=[adam],
        train_loss=lambda index: model.loss(places(generator(seed, index))),
        probe=mean_loss(model, model.loss, [places(generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(model, model.loss, [places(generator(0, 100 + i), 4096) for i in range(4)]),
        scheduler=scheduled(adam, lambda step: 0.02 ** min(1.0, step / steps)),
    )


def _poisson(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    steps = kind.steps(quick)
    model = Poisson(16 if quick else 64, 8 if quick else 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def points(drawn: torch.Generator, count: int = 256) -> Tensor:
        return torch.rand(count, 2, generator=drawn)

    return Training(
        model=model,
        optimizers=[optimizer],
        train_loss=lambda index: model.loss(points(generator(seed, index))),
        probe=mean_loss(model, model.loss, [points(generator(0, 10 + i), 512) for i in range(_PROBE)]),
        final=mean_loss(model, model.loss, [points(generator(0, 100 + i), 2048) for i in range(4)]),
        scheduler=scheduled(optimizer, lambda step: (1 + math.cos(math.pi * min(1.0, step / steps))) / 2),
    )


def _borehole(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    steps = kind.steps(quick)
    model = surrogate(16 if quick else 96)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    known = torch.rand(4096, 8, generator=generator(0, 1))

    def loss(cube: Tensor) -> Tensor:
        return F.mse_loss(model(cube)[:, 0], borehole(cube))

    def held_out(index: int, count: int) -> Tensor:
        return torch.rand(count, 8, generator=generator(0, index))

    return Training(
        model=model,
        optimizers=[adam],
        train_loss=lambda index: loss(
            known[torch.randint(len(known), (256,), generator=generator(seed, index))]
        ),
        probe=mean_loss(model, loss, [held_out(10 + i, 512) for i in range(_PROBE)]),
        final=mean_loss(model, loss, [held_out(100 + i, 4096) for i in range(4)]),
        scheduler=scheduled(adam, lambda step: 0.5 ** (4 * min(1.0, step / steps))),
    )


FIELDS = (
    Kind(name="sines", title="Picture by a network of sines, Adam", build=_sines, every=160),
    Kind(name="poisson", title="Poisson's equation, Fourier features, AdamW", build=_poisson, every=160),
    Kind(name="borehole", title="Function of a simulation, Adam", build=_borehole, every=300),
)
