"""The bench's trainings on ids, points, series, graphs and sequences. Nothing here knows of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, SparseAdam

from trainings.base import PROBE, Kind, Made, Run, Training, chosen, on_drawn, split, training
from trainings.data import density, graphs, series, zipf
from trainings.parts import cosine, mlp

_ITEMS, _WIDTH, _LIKED = 20_000, 32, 8
_USERS, _RATED = 3_000, 2_000


class _Recommender(nn.Module):
    """Whether somebody who liked some items likes another one; sparse gradients name only the rows that were used."""

    def __init__(self, items: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width, sparse=sparse)
        self.layers = mlp(3 * width, 64, 1, form=nn.ReLU)
        nn.init.normal_(self.items.weight, std=0.1)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of what was liked, offered and taken."""
        liked, offered, taken = batch
        taste, item = self.items(liked).mean(1), self.items(offered)
        logits = self.layers(torch.cat([taste, item, taste * item * 4], 1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, taken)


class _Factors(nn.Module):
    """Ratings as products of rows for users and items, with a bias each."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.zeros(()))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.2)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean squared error of users' ratings of items."""
        users, items, ratings = batch
        said = (self.users(users) * self.items(items)).sum(1)
        said = said + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0] + self.mean
        return F.mse_loss(said, ratings)


class _Flow(nn.Module):
    """Affine couplings, each of which moves one half of the coordinates by what the other half says."""

    def __init__(self, width: int, hidden: int, couplings: int) -> None:
        super().__init__()
        self.half = width // 2
        self.couplings = nn.ModuleList(mlp(self.half, hidden, hidden, width) for _ in range(couplings))
        for coupling in self.couplings:
            nn.init.zeros_(coupling[-1].weight)
        self.scale = nn.Parameter(torch.zeros(width))

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        """Mean negative log-likelihood in nats per point."""
        (points,) = batch
        x, volume = points * self.scale.exp(), self.scale.sum()
        first, second = x[:, : self.half], x[:, self.half :]
        for coupling in self.couplings:
            shift, stretch = coupling(first).chunk(2, 1)
            stretch = 2 * (stretch / 2).tanh()
            first, second = second * stretch.exp() + shift, first
            volume = volume + stretch.sum(1)
        squares = (first**2).sum(1) + (second**2).sum(1)
        constant = self.half * math.log(2 * math.pi)
        return (squares / 2 - volume).mean() + constant


class _Forecaster(nn.Module):
    """A GRU that reads a series and says its next values."""

    def __init__(self, width: int, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.cells = nn.GRU(1, width, batch_first=True)
        self.head = mlp(width, width, ahead)

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        """Mean squared error of the last `ahead` values, relative to the last one that was read."""
        (series,) = batch
        read, true = series[:, : -self.ahead], series[:, -self.ahead :]
        last = read[:, -1:]
        said = self.head(self.cells((read - last)[:, :, None])[0][:, -1])
        return F.mse_loss(said, true - last)


class _GraphNetwork(nn.Module):
    """Nodes that tell their neighbours what they know, some times over."""

    def __init__(self, width: int, rounds: int, kinds: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.rounds = nn.ModuleList(mlp(2 * width, width, width, form=nn.ReLU) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self.head = nn.Linear(width, kinds)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the nodes' kinds, of neighbours as matrices, the nodes' marks, their kinds."""
        near, mark, kinds = batch
        degree = near.sum(2)
        x = self.first(torch.stack([mark, degree / 10], 2))
        for layers, norm in zip(self.rounds, self.norms, strict=True):
            heard = (near @ x) / (1 + degree)[:, :, None]
            x = norm(x + layers(torch.cat([x, heard], 2)))
        return F.cross_entropy(self.head(x).flatten(0, 1), kinds.flatten())


_SYMBOLS, _LETTERS, _FRAMES, _FEATURES = 8, 5, 24, 12


def _utterances(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
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


class _Reader(nn.Module):
    """A recurrent network that writes down what is spoken, by connectionist temporal classification."""

    def __init__(self, width: int, cell: type[nn.RNNBase], both: bool) -> None:
        super().__init__()
        self.cell = cell(_FEATURES, width, batch_first=True, bidirectional=both)
        self.head = nn.Linear(2 * width if both else width, _SYMBOLS + 1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The negative logarithm of the words' probability, by symbol."""
        heard, words = batch
        said = self.head(self.cell(heard)[0]).log_softmax(2).transpose(0, 1)
        frames = torch.full((len(heard),), _FRAMES)
        return F.ctc_loss(said, words, frames, torch.full((len(heard),), _LETTERS))


class _Summer(nn.Module):
    """A recurrent network that adds the two marked numbers of a sequence (the adding problem)."""

    def __init__(self, width: int, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = cell(2, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean square of what the sum is missed by."""
        wanted = (rows[:, :, 0] * rows[:, :, 1]).sum(1)
        return (self.head(self.cell(rows)[0][:, -1])[:, 0] - wanted).square().mean()


def _marked(length: int, count: int, drawn: torch.Generator) -> Tensor:
    """Numbers from 0 to 1, of which one in each half is marked."""
    numbers = torch.rand(count, length, generator=drawn)
    half = length // 2
    marks = torch.zeros(count, length)
    for begin, size in ((0, half), (half, length - half)):
        marks[torch.arange(count), begin + torch.randint(size, (count,), generator=drawn)] = 1
    return torch.stack([numbers, marks], 2)


class _Autoencoder(nn.Module):
    """One hidden layer that is wider than its input, so that the loss falls as long as it is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = mlp(width, 2 * width, width, form=nn.Tanh)

    def loss(self, points: Tensor) -> Tensor:
        """Mean squared error of the points."""
        return (self.layers(points) - points).square().mean()


# --- trainings ----------------------------------------------------------------------------------------------


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


def _recommender(run: Run, made: Callable[[_Recommender], list[Optimizer]], sparse: bool = False) -> Training:
    items, batch = run.size(500, _ITEMS), run.size(256, 4096)
    model = _Recommender(items, _WIDTH, sparse)
    rate = cosine(run.steps, 0.1) if made is _adam else None
    return on_drawn(run, model, partial(_offers, items, batch), *made(model), rate=rate)


def _adam(model: _Recommender) -> list[Optimizer]:
    return [Adam(model.parameters(), lr=3e-3)]


def _adagrad(model: _Recommender) -> list[Optimizer]:
    return [Adagrad(model.parameters(), lr=0.05)]


def _sparse_adam(model: _Recommender) -> list[Optimizer]:
    return [SparseAdam(model.items.parameters(), lr=1e-2), Adam(model.layers.parameters(), lr=3e-3)]


@cache
def _ratings(part: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Users, items and ratings: products of hidden numbers, with noise."""
    drawn = torch.Generator().manual_seed(500 + part)
    users = torch.randint(_USERS, (count,), generator=drawn)
    items = zipf(_RATED, (count,), drawn)
    hidden = (_tastes(_USERS, 6)[users] * _tastes(_RATED, 6)[items]).sum(1) / 6**0.5
    return users, items, 3.5 + hidden + 0.5 * torch.randn(count, generator=drawn)


def _factors(run: Run) -> Training:
    model = _Factors(_USERS, _RATED, run.size(8, 24))
    known, unknown = _ratings(0, 600_000), split(_ratings(1, 20_000), 1000)
    adam, held, rate = (
        Adam(model.parameters(), lr=1e-2),
        (unknown[:PROBE], unknown[PROBE:]),
        cosine(run.steps, 0.1),
    )
    return training(run, model, model.loss, chosen(known, 4096), held, adam, rate=rate)


def _flow(run: Run) -> Training:
    batch = 512
    model = _Flow(12, *run.size((32, 4), (160, 8)))
    train, probe, truth = density(0, 50_000), density(1, PROBE * batch), density(2, run.size(2048, 16_384))
    adamax, held = Adamax(model.parameters(), lr=3e-3), (split((probe,), batch), split((truth,), 1024))
    return training(run, model, model.loss, chosen((train,), batch), held, adamax, clip=5.0)


def _forecasting(run: Run, made: Made, width: int, length: int, count: int, truth: int) -> Training:
    batch = 64
    model = _Forecaster(run.size(24, width), 12)
    train, probe, rest = series(0, count, length), series(1, PROBE * batch, length), series(2, truth, length)
    held = split((probe,), batch), split((rest,), 256)[: run.size(1, None)]
    optimizer, rate = made(model.parameters()), cosine(run.steps, 0.05)
    return training(run, model, model.loss, chosen((train,), batch), held, optimizer, rate=rate, clip=1.0)


def _hidden_edges(drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Graphs of which every seventh edge is not seen: without a rest that nobody can know, seeds would end anywhere near zero."""
    near, mark, distance = graphs(32, 48, drawn)
    seen = torch.rand(near.shape, generator=drawn).triu() > 1 / 7
    return near * (seen | seen.mT), mark, distance


def _graphs(run: Run) -> Training:
    model = _GraphNetwork(run.size(24, 128), 5, 6)
    return on_drawn(
        run, model, _hidden_edges, Adam(model.parameters(), lr=1e-3), rate=cosine(run.steps, 0.05)
    )


def _spoken(run: Run, cell: type[nn.RNNBase], both: bool, made: Made, end: float) -> Training:
    model = _Reader(run.size(16, 48), cell, both)
    return _sequences(run, model, _utterances, (32, 64, 256), made, end)


def _adding(run: Run, cell: type[nn.RNNBase], made: Made) -> Training:
    model = _Summer(run.size(16, 48), cell)
    return _sequences(run, model, partial(_marked, run.size(8, 16)), (64, 128, 1024), made, 0.02)


def _sequences(
    run: Run, model: nn.Module, draw: Callable[..., object], sizes: tuple[int, ...], made: Made, end: float
) -> Training:
    batch, *held = (partial(draw, size) for size in sizes)
    optimizer, rate = made(model.parameters()), cosine(run.steps, end)
    return on_drawn(run, model, batch, optimizer, held=tuple(held), truth=(1, 8), rate=rate, clip=1.0)


def _autoencoder(run: Run) -> Training:
    """Ends while its loss still falls steeply."""
    width = run.size(16, 64)
    model = _Autoencoder(width)

    def batch(drawn: torch.Generator) -> Tensor:
        return torch.randn(64, width, generator=drawn)

    return on_drawn(run, model, batch, AdamW(model.parameters(), lr=1e-3), probe=4, truth=(40, 40))


_GRU = partial(_forecasting, made=partial(Adam, lr=3e-3), width=128, length=60, count=8192, truth=2048)
_NADAM = partial(_forecasting, made=partial(NAdam, lr=2e-3), width=64, length=48, count=4096, truth=1024)
_BOTH = partial(_spoken, cell=nn.GRU, both=True, made=partial(Adam, lr=2e-3), end=1.0)
_SPEECH_ADAMW, _SUM_ADAMW = (
    partial(AdamW, lr=4e-3, betas=(0.9, 0.98)),
    partial(AdamW, lr=1e-2, betas=(0.9, 0.99)),
)
_ONE = partial(_spoken, cell=nn.LSTM, both=False, made=_SPEECH_ADAMW, end=0.05)
_SPARSE = partial(_recommender, made=_sparse_adam, sparse=True)

TABLES = (
    Kind("recommender", "Recommender, Adam", partial(_recommender, made=_adam), 72),
    Kind("recommender-adagrad", "Recommender, Adagrad", partial(_recommender, made=_adagrad), 72),
    Kind("recommender-sparse", "Recommender, SparseAdam and Adam", _SPARSE, 72),
    Kind("matrix-factorization", "Matrix factorization, Adam", _factors, 120),
    Kind("flow", "Normalizing flow, Adamax", _flow, 54),
    Kind("forecasting", "Forecasting with a GRU, Adam", _GRU, 48),
    Kind("graph", "Graph network, Adam", _graphs, 36),
)
SHORT = (
    Kind("autoencoder", "Autoencoder, AdamW, ends while the loss falls by half", _autoencoder, 40),
    Kind("autoencoder-short", "Autoencoder, AdamW, checkpoints ten steps apart", _autoencoder, 10),
)
SERIES_NADAM = Kind("series-nadam", "Forecasting with a GRU, NAdam", _NADAM, 24)
SEQUENCES = (
    Kind("gru-ctc", "Words by a GRU in both directions, CTC, Adam", _BOTH, 40),
    Kind("lstm-ctc", "Words by an LSTM, CTC, AdamW", _ONE, 40),
    Kind("gru-adding", "Sums by a GRU, Adam", partial(_adding, cell=nn.GRU, made=partial(Adam, lr=5e-3)), 60),
    Kind("lstm-adding", "Sums by an LSTM, AdamW", partial(_adding, cell=nn.LSTM, made=_SUM_ADAMW), 60),
)
