"""Trainings of pairs, of reinforcement learning and of a game of two networks, on which nothing was ever chosen."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import LambdaLR

from trainings.base import PROBE, Kind, Run, Training, generator, held_out, mean_loss, on_drawn
from trainings.parts import attention, decayed, mlp, warm_cosine

# --- pairs of images and texts --------------------------------------------------------------------------------

_TRAITS, _KINDS, _PIXELS, _LENGTH = 8, 12, 3 * 8 * 8, 8


class _TwoTowers(nn.Module):
    """Images and texts in one space, with a temperature that is learned: CLIP in small."""

    def __init__(self, width: int, symbols: int, length: int, pixels: int) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(pixels, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)
        )
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.text = nn.TransformerEncoder(attention(width, 2 * width), 2, enable_nested_tensor=False)
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
        """Keep the inverse temperature below 100, after every step."""
        self.scale.clamp_(max=float(torch.tensor(100.0).log()))


@cache
def _looks() -> Tensor:
    """What each kind of each trait looks like."""
    return torch.randn(_TRAITS, _KINDS, _PIXELS, generator=torch.Generator().manual_seed(31))


def _pairs(drawn: torch.Generator, count: int = 128) -> tuple[Tensor, Tensor]:
    """Images that are a mixture of traits, with noise, and texts that name them in any order, one in six of them wrongly."""
    kinds = torch.randint(_KINDS, (count, _TRAITS), generator=drawn)
    images = _looks()[torch.arange(_TRAITS), kinds].sum(1).tanh()
    images = images + 0.5 * torch.randn(count, _PIXELS, generator=drawn)
    other = torch.randint(_KINDS, kinds.shape, generator=drawn)
    wrong = torch.rand(kinds.shape, generator=drawn) < 1 / 6
    words = torch.where(wrong, other, kinds) + _KINDS * torch.arange(_TRAITS)
    order = torch.rand(words.shape, generator=drawn).argsort(1)
    return images, words.gather(1, order)


def _clip(run: Run) -> Training:
    model = _TwoTowers(run.size(16, 96), _TRAITS * _KINDS, _LENGTH, _PIXELS)
    adamw = torch.optim.AdamW(decayed(model, 0.2), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    rate = warm_cosine(run.steps, run.steps // 10, 0.01)
    return on_drawn(run, model, _pairs, adamw, rate=rate, after_step=model.limit)


# --- reinforcement learning -----------------------------------------------------------------------------------

_TORQUES = torch.tensor([-2.0, -0.7, 0.0, 0.7, 2.0])
_DISCOUNT = 0.97


def _pendulum(angle: Tensor, speed: Tensor, torque: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of many pendulums, as Gym has them: the new angles and speeds, and the rewards."""
    away = (angle + torch.pi) % (2 * torch.pi) - torch.pi
    reward = -(away.square() + 0.1 * speed.square() + 0.001 * torque.square()) / 16.3
    speed = (speed + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
    return angle + speed * 0.05, speed, reward


def _observed(angle: Tensor, speed: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin(), speed / 8], 1)


class _Replay:
    """The last transitions, and where the players are: all of a reinforcement learning's state beside its networks."""

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


@dataclass(kw_only=True)
class _Playing(Training):
    """Plays before each step, and copies the network to its target now and then."""

    replay: _Replay
    target: nn.Module
    seed: int
    copies: int
    """Steps between two copies."""
    explored: int
    """Steps until few actions are random."""

    def step(self, index: int) -> float:
        self._play(index)
        loss = super().step(index)
        if (index + 1) % self.copies == 0:
            self.target.load_state_dict(self.model.state_dict())
        return loss

    @torch.no_grad()
    def _play(self, index: int) -> None:
        drawn, replay = generator(self.seed + 500, index), self.replay
        before = _observed(replay.angle, replay.speed)
        best = self.model(before).argmax(1)
        random = torch.randint(len(_TORQUES), best.shape, generator=drawn)
        share = max(0.05, 1 - index / self.explored)
        actions = torch.where(torch.rand(best.shape, generator=drawn) < share, random, best)
        angle, speed, reward = _pendulum(replay.angle, replay.speed, _TORQUES[actions])
        after = _observed(angle, speed)
        replay.add(torch.cat([before, actions[:, None].float(), reward[:, None], after], 1))
        anew = torch.rand(angle.shape, generator=drawn) < 1 / 100
        begun = (2 * torch.rand(2, len(angle), generator=drawn) - 1) * torch.tensor([[torch.pi], [1.0]])
        replay.angle = torch.where(anew, begun[0], angle)
        replay.speed = torch.where(anew, begun[1], speed)


def _difference(model: nn.Module, target: nn.Module, rows: Tensor) -> Tensor:
    """Huber's loss of the temporal difference, with the target's values of the network's choices."""
    before, action, reward, after = rows[:, :3], rows[:, 3].long(), rows[:, 4], rows[:, 5:]
    with torch.no_grad():
        best = model(after).argmax(1, keepdim=True)
        worth = reward + _DISCOUNT * target(after).gather(1, best)[:, 0]
    return F.smooth_l1_loss(model(before).gather(1, action[:, None])[:, 0], worth)


def _episodes(model: nn.Module, count: int, number: int) -> float:
    """The mean cost of a step of fixed episodes of 150 steps."""
    drawn = generator(0, number)
    angle = (2 * torch.rand(count, generator=drawn) - 1) * torch.pi
    speed = 2 * torch.rand(count, generator=drawn) - 1
    cost = 0.0
    with torch.no_grad():
        for _ in range(150):
            torque = _TORQUES[model(_observed(angle, speed)).argmax(1)]
            angle, speed, reward = _pendulum(angle, speed, torque)
            cost -= float(reward.double().mean()) / 150
    return cost


def _anywhere(count: int, number: int) -> Tensor:
    """Transitions of random actions from anywhere."""
    drawn = generator(0, number)
    angle = (2 * torch.rand(count, generator=drawn) - 1) * torch.pi
    speed = (2 * torch.rand(count, generator=drawn) - 1) * 6
    actions = torch.randint(len(_TORQUES), (count,), generator=drawn)
    after_angle, after_speed, reward = _pendulum(angle, speed, _TORQUES[actions])
    rows = [_observed(angle, speed), actions[:, None].float(), reward[:, None]]
    return torch.cat([*rows, _observed(after_angle, after_speed)], 1)


def _dqn(run: Run, probe: str) -> Training:
    width = run.size(32, 160)
    model = mlp(3, width, width, len(_TORQUES), form=nn.ReLU)  # what each action is worth in a state
    target = copy.deepcopy(model).requires_grad_(False)
    replay = _Replay(run.size(2_000, 20_000), 32, 1000 + run.seed)
    loss = partial(_difference, model, target)

    def train_loss(index: int) -> Tensor:
        known = min(replay.seen, len(replay.rows))
        places = torch.randint(max(1, known), (128,), generator=generator(run.seed, index))
        return loss(replay.rows[places])

    probes = {
        "return": lambda: _episodes(model, 128, 10),
        "difference": mean_loss(model, loss, [_anywhere(512, 10 + i) for i in range(PROBE)]),
    }
    return _Playing(
        model=model,
        optimizers=[torch.optim.Adam(model.parameters(), lr=1e-3)],
        train_loss=train_loss,
        probe=probes[probe],
        final=lambda: _episodes(model, run.size(64, 1024), 100),
        stateful={"target": target, "replay": replay},
        also={"temporal difference": mean_loss(model, loss, [_anywhere(8192, 50)])},
        clip=10.0,
        replay=replay,
        target=target,
        seed=run.seed,
        copies=run.size(4, 100),
        explored=run.steps // 3,
    )


# --- a game of two networks -----------------------------------------------------------------------------------


class _Game(nn.Module):
    """A generator of points and a critic with a spectral norm, whose power iteration is in its buffers."""

    def __init__(self, width: int, noise: int) -> None:
        super().__init__()
        self.generator = mlp(noise, width, width, 2, form=nn.ReLU)
        first, middle = nn.Linear(2, width), spectral_norm(nn.Linear(width, width))
        self.critic = nn.Sequential(first, nn.LeakyReLU(0.2), middle, nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def loss(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Both sides' losses at once: each side's gradients are those of its own."""
        points, noise = pair
        made = self.generator(noise)
        judged = self.critic(torch.cat([points, made.detach()]))
        true, false = judged.split(len(points))
        own = F.softplus(-true).mean() + F.softplus(false).mean()
        self.critic.requires_grad_(False)
        other = F.softplus(-self.critic(made)).mean()
        self.critic.requires_grad_(True)
        return own + other


def _ring(count: int, drawn: torch.Generator) -> Tensor:
    """Eight heaps of points around the middle."""
    turn = torch.randint(8, (count,), generator=drawn) * (torch.pi / 4)
    heaps = torch.stack([turn.cos(), turn.sin()], 1)
    return 1.5 * heaps + 0.15 * torch.randn(count, 2, generator=drawn)


def _sliced(made: Tensor, true: Tensor) -> Tensor:
    """Sliced Wasserstein distance of two heaps of equally many points."""
    turn = torch.arange(32) * (torch.pi / 32)
    seen = torch.stack([turn.cos(), turn.sin()])
    return ((made @ seen).sort(0).values - (true @ seen).sort(0).values).abs().mean()


def _gan(run: Run) -> Training:
    noise = 8
    model = _Game(run.size(24, 128), noise)

    def batch(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        return _ring(count, drawn), torch.randn(count, noise, generator=drawn)

    def distance(pair: tuple[Tensor, Tensor]) -> Tensor:
        return _sliced(model.generator(pair[1]), pair[0])

    made = torch.optim.Adam(model.generator.parameters(), lr=2e-4, betas=(0.0, 0.99))
    judged = torch.optim.Adam(model.critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    rate = warm_cosine(run.steps, 1, 0.02)
    judged_rate = LambdaLR(judged, rate)
    return Training(
        model=model,
        optimizers=[made, judged],
        train_loss=lambda index: model.loss(batch(256, generator(run.seed, index))),
        probe=mean_loss(model, distance, held_out(partial(batch, 1024), 10, PROBE)),
        final=mean_loss(model, distance, held_out(partial(batch, 4096), 100, run.size(2, 10))),
        scheduler=LambdaLR(made, rate),
        stateful={"critic_scheduler": judged_rate},
        after_step=judged_rate.step,
    )


_RETURN, _DIFFERENCE = partial(_dqn, probe="return"), partial(_dqn, probe="difference")
PLAY = (
    Kind("clip", "Two towers, AdamW (0.9, 0.98), learned temperature", _clip, 54),
    Kind("dqn", "Double DQN, Adam, its return measured", _RETURN, 330, 12),
    Kind("dqn-difference", "Double DQN, Adam, the temporal difference measured", _DIFFERENCE, 330, 12),
    Kind("gan", "GAN, Adam (0, 0.99) against Adam (0.5, 0.99)", _gan, 240, 20),
)
