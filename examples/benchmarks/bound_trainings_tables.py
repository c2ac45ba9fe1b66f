"""The bench's trainings on ids, points, series and graphs. Nothing here knows of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from bound_data import density, graphs, series, zipf
from bound_models_tables import Factors, Flow, Forecaster, GraphNetwork, Recommender
from bound_training import Kind, Training, generator, mean_loss, scheduled
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["TABLES"]

_ITEMS, _WIDTH, _LIKED = 20_000, 32, 8
_USERS, _RATED = 3_000, 2_000
_PROBE = 3
"""Held-out batches of the probe."""


def _cosine(steps: int, end: float) -> Callable[[int], float]:
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2


def _training(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batch: Callable[[torch.Generator], Any],
    seed: int,
    quick: bool,
    optimizers: Sequence[Optimizer],
    truth: int = 40,
) -> Training:
    """A training whose batches are drawn afresh: held-out ones are those of a seed that no run has."""
    return Training(
        model=model,
        optimizers=optimizers,
        train_loss=lambda index: loss(batch(generator(seed, index))),
        probe=mean_loss(model, loss, [batch(generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(model, loss, [batch(generator(0, 100 + i)) for i in range(4 if quick else truth)]),
    )


# --- ids ----------------------------------------------------------------------------------------------------


@cache
def _tastes(count: int, width: int) -> Tensor:
    """What there is to know of every item: a few numbers, and which of them are more popular says nothing of it."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def _offers(items: int, batch: int, drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Items liked, an item offered, and whether it was taken: items that are alike are liked together."""
    tastes = _tastes(items, 6)
    liked, offered = zipf(items, (batch, _LIKED), drawn), zipf(items, (batch,), drawn)
    fit = (tastes[liked].mean(1) * tastes[offered]).sum(1) * (2.5 * _LIKED**0.5 / 6**0.5)
    taken = torch.rand(batch, generator=drawn) < torch.sigmoid(fit + 0.8 * tastes[offered][:, 0])
    return liked, offered, taken.float()


def _recommender(seed: int, kind: Kind, quick: bool, optimizer: str) -> Training:
    torch.manual_seed(seed)
    items, batch, steps = 500 if quick else _ITEMS, 256 if quick else 4096, kind.steps(quick)
    model = Recommender(items, _WIDTH, sparse=optimizer == "sparse-adam")
    everything = model.parameters()
    optimizers: dict[str, Callable[[], list[Optimizer]]] = {
        "adam": lambda: [torch.optim.Adam(everything, lr=3e-3)],
        "adagrad": lambda: [torch.optim.Adagrad(everything, lr=0.05)],
        "sparse-adam": lambda: [
            torch.optim.SparseAdam(model.items.parameters(), lr=1e-2),
            torch.optim.Adam(model.layers.parameters(), lr=3e-3),
        ],
    }
    made = optimizers[optimizer]()
    training = _training(model, model.loss, partial(_offers, items, batch), seed, quick, made)
    if optimizer == "adam":
        training.scheduler = scheduled(made[0], _cosine(steps, 0.1))
    return training


@cache
def _ratings(part: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Users, items and ratings: products of hidden numbers, with noise."""
    drawn = torch.Generator().manual_seed(500 + part)
    users = torch.randint(_USERS, (count,), generator=drawn)
    items = zipf(_RATED, (count,), drawn)
    hidden = (_tastes(_USERS, 6)[users] * _tastes(_RATED, 6)[items]).sum(1) / 6**0.5
    return users, items, 3.5 + hidden + 0.5 * torch.randn(count, generator=drawn)


def _factors(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    batch, steps = 4096, kind.steps(quick)
    model = Factors(_USERS, _RATED, 8 if quick else 24)
    known, unknown = _ratings(0, 600_000), _ratings(1, 20_000)

    def drawn(numbers: torch.Generator) -> tuple[Tensor, ...]:
        chosen = torch.randint(len(known[0]), (batch,), generator=numbers)
        return tuple(column[chosen] for column in known)

    batches = list(zip(*(column.split(1000) for column in unknown), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(
        model=model,
        optimizers=[optimizer],
        train_loss=lambda index: model.loss(drawn(generator(seed, index))),
        probe=mean_loss(model, model.loss, batches[:_PROBE]),
        final=mean_loss(model, model.loss, batches[_PROBE:]),
        scheduler=scheduled(optimizer, _cosine(steps, 0.1)),
    )


# --- points, series, graphs ---------------------------------------------------------------------------------


def _flow(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    batch = 512
    model = Flow(12, 32 if quick else 160, 4 if quick else 8)
    train, probe, truth = density(0, 50_000), density(1, 3 * batch), density(2, 2048 if quick else 16_384)

    def train_loss(index: int) -> Tensor:
        return model.loss(train[torch.randint(len(train), (batch,), generator=generator(seed, index))])

    return Training(
        model=model,
        optimizers=[torch.optim.Adamax(model.parameters(), lr=3e-3)],
        train_loss=train_loss,
        probe=mean_loss(model, model.loss, list(probe.split(batch))),
        final=mean_loss(model, model.loss, list(truth.split(1024))),
        clip=5.0,
    )


def _forecasting(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    batch, steps, length = 64, kind.steps(quick), 60
    model = Forecaster(24 if quick else 128, 12)
    train, probe, truth = series(0, 8_192, length), series(1, 3 * batch, length), series(2, 2_048, length)

    def train_loss(index: int) -> Tensor:
        return model.loss(train[torch.randint(len(train), (batch,), generator=generator(seed, index))])

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(
        model=model,
        optimizers=[optimizer],
        train_loss=train_loss,
        probe=mean_loss(model, model.loss, list(probe.split(batch))),
        final=mean_loss(model, model.loss, list(truth.split(256))[: 1 if quick else None]),
        scheduler=scheduled(optimizer, _cosine(steps, 0.05)),
        clip=1.0,
    )


def _hidden_edges(drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Graphs of which every seventh edge is not seen: without a rest that nobody can know, seeds would end anywhere near zero."""
    near, mark, distance = graphs(32, 48, drawn)
    seen = torch.rand(near.shape, generator=drawn).triu() > 1 / 7
    return near * (seen | seen.mT), mark, distance


def _graphs(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    steps = kind.steps(quick)
    model = GraphNetwork(24, 5, 6) if quick else GraphNetwork(128, 5, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    training = _training(model, model.loss, _hidden_edges, seed, quick, [optimizer])
    training.scheduler = scheduled(optimizer, _cosine(steps, 0.05))
    return training


def _recommending(name: str, title: str, optimizer: str) -> Kind:
    return Kind(
        name=name, title=f"Recommender, {title}", build=partial(_recommender, optimizer=optimizer), every=72
    )


TABLES = (
    _recommending("recommender", "Adam", "adam"),
    _recommending("recommender-adagrad", "Adagrad", "adagrad"),
    _recommending("recommender-sparse", "SparseAdam and Adam", "sparse-adam"),
    Kind(name="matrix-factorization", title="Matrix factorization, Adam", build=_factors, every=120),
    Kind(name="flow", title="Normalizing flow, Adamax", build=_flow, every=54),
    Kind(name="forecasting", title="Forecasting with a GRU, Adam", build=_forecasting, every=48),
    Kind(name="graph", title="Graph network, Adam", build=_graphs, every=36),
)
