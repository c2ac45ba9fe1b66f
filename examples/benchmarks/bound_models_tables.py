"""Models of the bench on tables: a recommender, factors, a normalizing flow, a forecaster, a graph network."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Factors", "Flow", "Forecaster", "GraphNetwork", "Recommender"]


class Recommender(nn.Module):
    """Whether somebody who liked some items likes another one.

    Args:
        items: to choose from.
        width: of an item's row.
        sparse: whether gradients name only the rows that were used.
    """

    def __init__(self, items: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, liked: Tensor, offered: Tensor) -> Tensor:
        """Logits ``(batch,)`` for ids ``(batch, some)`` and ``(batch,)``."""
        taste, item = self.items(liked).mean(1), self.items(offered)
        return self.layers(torch.cat([taste, item, taste * item * 4], 1))[:, 0]

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of what was liked, offered and taken."""
        liked, offered, taken = batch
        return F.binary_cross_entropy_with_logits(self(liked, offered), taken)


class Factors(nn.Module):
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


class Flow(nn.Module):
    """Affine couplings, each of which moves one half of the coordinates by what the other half says.

    Args:
        width: coordinates of a point.
        hidden: of the couplings' layers.
        couplings: one after another.
    """

    def __init__(self, width: int, hidden: int, couplings: int) -> None:
        super().__init__()
        self.half = width // 2
        self.couplings = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.half, hidden),
                nn.GELU(),
                nn.Linear(hidden, hidden),
                nn.GELU(),
                nn.Linear(hidden, width),
            )
            for _ in range(couplings)
        )
        for coupling in self.couplings:
            nn.init.zeros_(coupling[-1].weight)
        self.scale = nn.Parameter(torch.zeros(width))

    def loss(self, points: Tensor) -> Tensor:
        """Mean negative log-likelihood in nats per point."""
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


class Forecaster(nn.Module):
    """A GRU that reads a series and says its next values.

    Args:
        width: of the state.
        ahead: how many values.
    """

    def __init__(self, width: int, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.cells = nn.GRU(1, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, ahead))

    def loss(self, series: Tensor) -> Tensor:
        """Mean squared error of the last `ahead` values, relative to the last one that was read."""
        read, true = series[:, : -self.ahead], series[:, -self.ahead :]
        last = read[:, -1:]
        said = self.head(self.cells((read - last)[:, :, None])[0][:, -1])
        return F.mse_loss(said, true - last)


class GraphNetwork(nn.Module):
    """Nodes that tell their neighbours what they know, some times over.

    Args:
        width: of a node's state.
        rounds: of telling.
        kinds: of nodes, to be told apart.
    """

    def __init__(self, width: int, rounds: int, kinds: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(rounds)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self.head = nn.Linear(width, kinds)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the nodes' kinds.

        Args:
            batch: neighbours as matrices, the nodes' marks, their kinds.
        """
        near, mark, kinds = batch
        degree = near.sum(2)
        x = self.first(torch.stack([mark, degree / 10], 2))
        for layers, norm in zip(self.rounds, self.norms, strict=True):
            heard = (near @ x) / (1 + degree)[:, :, None]
            x = norm(x + layers(torch.cat([x, heard], 2)))
        return F.cross_entropy(self.head(x).flatten(0, 1), kinds.flatten())
