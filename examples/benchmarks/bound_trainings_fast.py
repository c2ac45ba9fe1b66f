"""Trainings in which small errors of an optimizer's state count: losses that fall by orders of magnitude, NAdam, weights that are signs.

Of each kind the first was shown to the project from outside, by its failure; the others were written for its mending.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bound_data import SHAPES, code_text, images, series, windows
from bound_models_fast import Fitted, Reader, Summer, coarse_signs, fine_signs, pixels, sound, utterances
from bound_models_images import Autoencoder
from bound_models_tables import Forecaster
from bound_models_text import next_loss
from bound_training import Kind, Training, generator, mean_loss, scheduled
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["FAST"]

_PROBE = 3
"""Held-out batches of the probe."""


def _cosine(steps: int, end: float = 0.0) -> Callable[[int], float]:
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2


def _seeded(model: Callable[[], nn.Module], seed: int) -> Any:
    torch.manual_seed(seed)
    return model()


# --- a picture, a sound by heart ----------------------------------------------------------------------------------


def _fitted(
    data: tuple[Tensor, Tensor],
    model: Callable[[], Fitted],
    optimizer: Callable[[Any], Optimizer],
    rate: Callable[[int], float],
    seed: int,
) -> Training:
    """Fits all of the data; the probe sees parts of it, the truth is the whole."""
    fitted = _seeded(model, seed)
    places, values = data
    made, count = optimizer(fitted.parameters()), 1024

    def some(drawn: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(places), (size,), generator=drawn)
        return places[chosen], values[chosen]

    return Training(
        model=fitted,
        optimizers=[made],
        train_loss=lambda index: fitted.loss(
            data if len(places) <= count else some(generator(seed, index), count)
        ),
        probe=mean_loss(fitted, fitted.loss, [some(generator(0, 10 + i), count // 2) for i in range(_PROBE)]),
        final=mean_loss(fitted, fitted.loss, [data]),
        scheduler=scheduled(made, rate),
    )


def _picture(seed: int, kind: Kind, quick: bool) -> Training:
    width, steps = 16 if quick else 64, kind.steps(quick)
    return _fitted(
        pixels(16 if quick else 24),
        lambda: Fitted((2, width, width, width, 3), 10.0),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        _cosine(steps),
        seed,
    )


def _sound(seed: int, kind: Kind, quick: bool) -> Training:
    width, steps = 16 if quick else 64, kind.steps(quick)
    return _fitted(
        sound(512 if quick else 1536),
        lambda: Fitted((1, width, width, width, 1), 20.0),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        lambda step: 0.01 ** min(1.0, step / steps),
        seed,
    )


def _deep(seed: int, kind: Kind, quick: bool) -> Training:
    width, steps = 16 if quick else 48, kind.steps(quick)
    return _fitted(
        pixels(16 if quick else 40),
        lambda: Fitted((2, *5 * (width,), 3), 10.0),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4),
        _cosine(steps, 0.01),
        seed,
    )


def _bells(seed: int, kind: Kind, quick: bool) -> Training:
    width, steps = 16 if quick else 64, kind.steps(quick)
    return _fitted(
        pixels(16 if quick else 40),
        lambda: Fitted((2, width, width, width, 3), 6.0, bells=True),
        lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        _cosine(steps, 0.01),
        seed,
    )


# --- sequences -----------------------------------------------------------------------------------------------------


def _read(
    cell: type[nn.RNNBase], both: bool, optimizer: Callable[[Any], Optimizer], rate: Callable[[int], float], seed: int, quick: bool
) -> Training:  # fmt: skip
    model = _seeded(lambda: Reader(16 if quick else 48, cell, both=both), seed)
    made = optimizer(model.parameters())
    return Training(
        model=model,
        optimizers=[made],
        train_loss=lambda index: model.loss(utterances(32, generator(seed, index))),
        probe=mean_loss(model, model.loss, [utterances(64, generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(model, model.loss, [utterances(256, generator(0, 100 + i)) for i in range(1 if quick else 8)]),
        scheduler=scheduled(made, rate),
        clip=1.0,
    )  # fmt: skip


def _gru_ctc(seed: int, kind: Kind, quick: bool) -> Training:
    adam = partial(torch.optim.Adam, lr=2e-3)
    return _read(nn.GRU, True, adam, lambda step: 1.0, seed, quick)


def _lstm_ctc(seed: int, kind: Kind, quick: bool) -> Training:
    adamw = partial(torch.optim.AdamW, lr=4e-3, betas=(0.9, 0.98))
    return _read(nn.LSTM, False, adamw, _cosine(kind.steps(quick), 0.05), seed, quick)


def _adding(
    cell: type[nn.RNNBase], optimizer: Callable[[Any], Optimizer], seed: int, kind: Kind, quick: bool
) -> Training:
    model = _seeded(lambda: Summer(16 if quick else 48, cell), seed)
    made, length = optimizer(model.parameters()), 8 if quick else 16
    rows = partial(Summer.drawn, length=length)
    return Training(
        model=model,
        optimizers=[made],
        train_loss=lambda index: model.loss(rows(64, generator=generator(seed, index))),
        probe=mean_loss(model, model.loss, [rows(128, generator=generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(model, model.loss, [rows(1024, generator=generator(0, 100 + i)) for i in range(1 if quick else 8)]),
        scheduler=scheduled(made, _cosine(kind.steps(quick), 0.02)),
        clip=1.0,
    )  # fmt: skip


# --- NAdam ---------------------------------------------------------------------------------------------------------


def _gpt_nadam(seed: int, kind: Kind, quick: bool) -> Training:
    shape = (
        GPTConfig(width=32, layers=2, heads=2, block=32)
        if quick
        else GPTConfig(width=96, layers=2, heads=4, block=64)
    )
    model = _seeded(lambda: GPT(shape), seed)
    train, held = code_text()
    half, loss = len(held) // 2, partial(next_loss, model)

    def truth(text: Tensor, number: int, count: int) -> list[Tensor]:
        return list(windows(text, 16 * count, shape.block + 1, generator(0, number)).split(16))

    return Training(
        model=model,
        optimizers=[torch.optim.NAdam(model.parameters(), lr=2e-3)],
        train_loss=lambda index: loss(windows(train, 12, shape.block + 1, generator(seed, index))),
        probe=mean_loss(model, loss, truth(held[:half], 1, _PROBE)),
        final=mean_loss(model, loss, truth(held[half:], 2, 4 if quick else 24)),
        clip=1.0,
    )


def _vae_nadam(seed: int, kind: Kind, quick: bool) -> Training:
    size, batch = 16, 64
    model = _seeded(lambda: Autoencoder(size * size, 32 if quick else 160, 8), seed)
    made = torch.optim.NAdam(model.parameters(), lr=1e-3, weight_decay=1e-2, decoupled_weight_decay=True)
    train, held = images(0, 256 if quick else 4096, size)[0], images(1, 512 if quick else 2560, size)[0]

    def batch_of(pool: Tensor, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = pool[torch.randint(len(pool), (batch,), generator=drawn)]
        return chosen, torch.randn(batch, 8, generator=drawn)

    return Training(
        model=model,
        optimizers=[made],
        train_loss=lambda index: model.loss(batch_of(train, generator(seed, index))) / 100,
        probe=mean_loss(model, model.loss, [batch_of(held[:256], generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(model, model.loss, [batch_of(held[256:], generator(0, 100 + i)) for i in range(4 if quick else 32)]),
        scheduler=scheduled(made, _cosine(kind.steps(quick), 0.1)),
    )  # fmt: skip


def _series_nadam(seed: int, kind: Kind, quick: bool) -> Training:
    batch, length = 64, 48
    model = _seeded(lambda: Forecaster(24 if quick else 64, 12), seed)
    made = torch.optim.NAdam(model.parameters(), lr=2e-3)
    train, probe, truth = series(0, 4096, length), series(1, _PROBE * batch, length), series(2, 1024, length)
    return Training(
        model=model,
        optimizers=[made],
        train_loss=lambda index: model.loss(train[torch.randint(len(train), (batch,), generator=generator(seed, index))]),
        probe=mean_loss(model, model.loss, list(probe.split(batch))),
        final=mean_loss(model, model.loss, list(truth.split(256))),
        scheduler=scheduled(made, _cosine(kind.steps(quick), 0.05)),
        clip=1.0,
    )  # fmt: skip


# --- classifiers of images -----------------------------------------------------------------------------------------


def _classified(
    model: Callable[[], nn.Module], optimizer: Callable[[Any], Optimizer], seed: int, kind: Kind, quick: bool, *, clamped: bool = True
) -> Training:  # fmt: skip
    """Shapes of images; weights that are taken by their signs are kept between -1 and 1."""
    size, batch = 16, 64
    train, probe, truth = (
        images(0, 256 if quick else 8192, size),
        images(1, _PROBE * 64, size),
        images(2, 128 if quick else 2048, size),
    )

    def built() -> nn.Module:
        made = model()
        made(train[0][:4])  # which sets the size of the last layer
        return made

    classifier = _seeded(built, seed)
    made = optimizer(classifier.parameters())

    def loss(pairs: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(classifier(pairs[0]), pairs[1])

    def some(index: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(train[0]), (batch,), generator=generator(seed, index))
        return train[0][chosen], train[1][chosen]

    def clamp() -> None:
        with torch.no_grad():
            for name, parameter in classifier.named_parameters():
                if name.endswith("layer.weight"):
                    parameter.clamp_(-1, 1)

    def batches(data: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*(part.split(64) for part in data), strict=True))

    return Training(
        model=classifier,
        optimizers=[made],
        train_loss=lambda index: loss(some(index)),
        probe=mean_loss(classifier, loss, batches(probe)),
        final=mean_loss(classifier, loss, batches(truth)),
        scheduler=scheduled(made, _cosine(kind.steps(quick), 0.05)),
        after_step=clamp if clamped else None,
    )


def _mlp(quick: bool) -> nn.Module:
    width = 32 if quick else 128
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(256, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, SHAPES),
    )


def _mlp_nadam(seed: int, kind: Kind, quick: bool) -> Training:
    nadam = partial(torch.optim.NAdam, lr=1e-3, betas=(0.95, 0.999))
    return _classified(partial(_mlp, quick), nadam, seed, kind, quick, clamped=False)


def _signs(
    optimizer: Callable[[Any], Optimizer], threshold: float, seed: int, kind: Kind, quick: bool
) -> Training:
    network = partial(coarse_signs, 8 if quick else 24, SHAPES, threshold)
    return _classified(network, optimizer, seed, kind, quick)


def _fine_signs(seed: int, kind: Kind, quick: bool) -> Training:
    network = partial(fine_signs, 256, 32 if quick else 128, SHAPES)
    return _classified(network, partial(torch.optim.Adam, lr=2e-3), seed, kind, quick)


_binary = partial(_signs, partial(torch.optim.NAdam, lr=2e-3), 0.0)
_ternary = partial(_signs, partial(torch.optim.AdamW, lr=2e-3, weight_decay=1e-3), 0.05)
_binary_sgd = partial(_signs, partial(torch.optim.SGD, lr=0.05, momentum=0.9), 0.0)
_gru_adding = partial(_adding, nn.GRU, partial(torch.optim.Adam, lr=5e-3))
_lstm_adding = partial(_adding, nn.LSTM, partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.99)))

FAST = (
    Kind(name="sines-fit", title="Picture by heart, sines, Adam, cosine", build=_picture, every=160),
    Kind(name="sines-sound", title="Sound by heart, sines, Adam", build=_sound, every=120),
    Kind(name="sines-deep", title="Picture by heart, five layers of sines, AdamW", build=_deep, every=120),
    Kind(name="bells-fit", title="Picture by heart, bells, Adam", build=_bells, every=120),
    Kind(name="gru-ctc", title="Words by a GRU in both directions, CTC, Adam", build=_gru_ctc, every=40),
    Kind(name="lstm-ctc", title="Words by an LSTM, CTC, AdamW", build=_lstm_ctc, every=40),
    Kind(name="gru-adding", title="Sums by a GRU, Adam", build=_gru_adding, every=60),
    Kind(name="lstm-adding", title="Sums by an LSTM, AdamW", build=_lstm_adding, every=60),
    Kind(name="gpt-nadam", title="GPT, NAdam", build=_gpt_nadam, every=16),
    Kind(name="vae-nadam", title="Variational autoencoder, NAdam with decay", build=_vae_nadam, every=30),
    Kind(name="series-nadam", title="Forecasting with a GRU, NAdam", build=_series_nadam, every=24),
    Kind(name="mlp-nadam", title="Classifier, NAdam (0.95, 0.999)", build=_mlp_nadam, every=30),
    Kind(name="binary", title="Signs as weights, convolutions, BatchNorm, NAdam", build=_binary, every=24),
    Kind(
        name="ternary",
        title="Signs and zeros as weights, convolutions, BatchNorm, AdamW",
        build=_ternary,
        every=24,
    ),
    Kind(
        name="binary-sgd", title="Signs as weights, convolutions, BatchNorm, SGD", build=_binary_sgd, every=24
    ),
    Kind(name="binary-mlp", title="Signs as weights, BatchNorm, Adam", build=_fine_signs, every=24),
)
