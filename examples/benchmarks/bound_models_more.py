"""Models of the bench's further trainings: pairs, reinforcement learning, a game of two networks, physics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

__all__ = ["Game", "Physics", "Replay", "TwoTowers", "Values", "pendulum"]


class TwoTowers(nn.Module):
    """Images and texts in one space, with a temperature that is learned: CLIP in small.

    Args:
        width: of both towers.
        symbols: that texts are made of.
        length: of a text.
        pixels: of an image, all channels.
    """

    GREATEST = 100.0
    """Of the inverse temperature."""

    def __init__(self, width: int, symbols: int, length: int, pixels: int) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(pixels, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)
        )
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.text = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(1 / 0.07).log())
        nn.init.normal_(self.symbols.weight, std=0.02)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy of each image among all texts, and the other way round."""
        images, texts = batch
        seen = F.normalize(self.image(images), dim=1)
        hidden = self.text(self.symbols(texts) + self.places)
        read = F.normalize(self.out(self.norm(hidden).mean(1)), dim=1)
        logits = self.scale.exp() * seen @ read.mT
        same = torch.arange(len(images))
        return (F.cross_entropy(logits, same) + F.cross_entropy(logits.mT, same)) / 2

    @torch.no_grad()
    def limit(self) -> None:
        """Keep the temperature where it is trainable, after every step."""
        self.scale.clamp_(max=float(torch.tensor(self.GREATEST).log()))


class Values(nn.Module):
    """What each action is worth in a state.

    Args:
        width: of the two hidden layers.
        actions: how many there are.
    """

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions)
        )

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.layers(states)
        return found


def pendulum(angle: Tensor, speed: Tensor, torque: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of many pendulums, as Gym has them: the new angles and speeds, and the rewards."""
    away = (angle + torch.pi) % (2 * torch.pi) - torch.pi
    reward = -(away.square() + 0.1 * speed.square() + 0.001 * torque.square()) / 16.3
    speed = (speed + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
    return angle + speed * 0.05, speed, reward


class Replay:
    """The last transitions, and where the players are: all of a reinforcement learning's state beside its networks.

    Args:
        capacity: transitions that are kept.
        players: that play side by side.
        seed: of the places where they begin.
    """

    def __init__(self, capacity: int, players: int, seed: int) -> None:
        begun = torch.Generator().manual_seed(seed)
        self.rows = torch.zeros(capacity, 8)
        """State, action, reward, next state."""
        self.angle = (2 * torch.rand(players, generator=begun) - 1) * torch.pi
        self.speed = 2 * torch.rand(players, generator=begun) - 1
        self.seen = 0

    def add(self, rows: Tensor) -> None:
        """Overwrite the oldest ones."""
        places = (self.seen + torch.arange(len(rows))) % len(self.rows)
        self.rows[places] = rows
        self.seen += len(rows)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "angle": self.angle, "speed": self.speed, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"].clone()
        self.angle, self.speed, self.seen = state["angle"].clone(), state["speed"].clone(), state["seen"]


class Game(nn.Module):
    """A generator of points and a critic with a spectral norm, whose power iteration is in its buffers.

    Args:
        width: of the hidden layers.
        noise: numbers that a point is made of.
    """

    def __init__(self, width: int, noise: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, width),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(width, width)),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def loss(self, points: Tensor, noise: Tensor) -> Tensor:
        """Both sides' losses at once: each side's gradients are those of its own."""
        made = self.generator(noise)
        judged = self.critic(torch.cat([points, made.detach()]))
        true, false = judged.split(len(points))
        own = F.softplus(-true).mean() + F.softplus(false).mean()
        for parameter in self.critic.parameters():
            parameter.requires_grad_(False)
        other = F.softplus(-self.critic(made)).mean()
        for parameter in self.critic.parameters():
            parameter.requires_grad_(True)
        return own + other


class Physics(nn.Module):
    """The temperature of a rod by place and time: a network whose derivatives must obey the equation of heat.

    Args:
        width: of the three hidden layers.
    """

    RATE = 0.1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width),
            nn.Tanh(), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, points: Tensor) -> Tensor:
        found: Tensor = self.layers(points)
        return found[:, 0]

    @staticmethod
    def begins(place: Tensor) -> Tensor:
        """The temperature at time 0."""
        return (torch.pi * place).sin() + 0.3 * (2 * torch.pi * place).sin()

    def truth(self, points: Tensor) -> Tensor:
        """The solution."""
        place, time = points.unbind(1)
        slow, fast = (torch.exp(-self.RATE * (k * torch.pi) ** 2 * time) for k in (1, 2))
        return (torch.pi * place).sin() * slow + 0.3 * (2 * torch.pi * place).sin() * fast

    def loss(self, points: Tensor) -> Tensor:
        """How far the equation, the ends and the beginning are missed at these places and times."""
        with torch.enable_grad():
            inner = points.detach().requires_grad_()
            first = torch.autograd.grad(self(inner).sum(), inner, create_graph=True)[0]
            bent = torch.autograd.grad(first[:, 0].sum(), inner, create_graph=True)[0][:, 0]
            missed = (first[:, 1] - self.RATE * bent).square().mean()
        place, time = points.unbind(1)
        zero = torch.zeros_like(place)
        start = self(torch.stack([place, zero], 1)) - self.begins(place)
        ends = [self(torch.stack([zero + end, time], 1)) for end in (0, 1)]
        return missed + 10 * start.square().mean() + 10 * sum(end.square().mean() for end in ends)

    @torch.no_grad()
    def error(self, points: Tensor) -> Tensor:
        """Mean squared distance to the solution."""
        return (self(points) - self.truth(points)).square().mean()
