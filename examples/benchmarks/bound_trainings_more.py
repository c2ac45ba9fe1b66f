"""Trainings of further kinds, on which nothing was ever chosen: not among those that the bench runs unless they are asked for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from bound_data import code_text, windows
from bound_models_more import Game, Physics, Replay, TwoTowers, Values, pendulum
from bound_training import Kind, Training, generator, mean_loss, scheduled
from gpt import GPT, GPTConfig
from torch import Tensor, nn

__all__ = ["MORE"]

_PROBE = 3
"""Held-out batches of the probe."""


def _warm_cosine(steps: int, warmup: int, end: float) -> Callable[[int], float]:
    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2

    return rate


# --- pairs of images and texts --------------------------------------------------------------------------------

_TRAITS, _KINDS, _PIXELS, _LENGTH = 8, 12, 3 * 8 * 8, 8


@cache
def _looks() -> Tensor:
    """What each kind of each trait looks like."""
    return torch.randn(_TRAITS, _KINDS, _PIXELS, generator=torch.Generator().manual_seed(31))


def _pairs(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images that are a mixture of traits, with noise, and texts that name them in any order, one in six of them wrongly."""
    kinds = torch.randint(_KINDS, (count, _TRAITS), generator=drawn)
    images = _looks()[torch.arange(_TRAITS), kinds].sum(1).tanh()
    images = images + 0.5 * torch.randn(count, _PIXELS, generator=drawn)
    other = torch.randint(_KINDS, kinds.shape, generator=drawn)
    wrong = torch.rand(kinds.shape, generator=drawn) < 1 / 6
    words = torch.where(wrong, other, kinds) + _KINDS * torch.arange(_TRAITS)
    order = torch.rand(words.shape, generator=drawn).argsort(1)
    return images, words.gather(1, order)


def _clip(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    batch, steps = 128, kind.steps(quick)
    model = TwoTowers(16 if quick else 96, _TRAITS * _KINDS, _LENGTH, _PIXELS)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    return Training(
        model=model,
        optimizers=[optimizer],
        train_loss=lambda index: model.loss(_pairs(batch, generator(seed, index))),
        probe=mean_loss(model, model.loss, [_pairs(batch, generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(
            model, model.loss, [_pairs(batch, generator(0, 100 + i)) for i in range(4 if quick else 40)]
        ),
        scheduler=scheduled(optimizer, _warm_cosine(steps, steps // 10, 0.01)),
        after_step=model.limit,
    )


# --- reinforcement learning -----------------------------------------------------------------------------------

_TORQUES = torch.tensor([-2.0, -0.7, 0.0, 0.7, 2.0])
_DISCOUNT = 0.97


def _observed(angle: Tensor, speed: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin(), speed / 8], 1)


@dataclass(kw_only=True)
class _Playing(Training):
    """Plays before each step, and copies the network to its target now and then."""

    replay: Replay
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
        chosen = self.model(before).argmax(1)
        random = torch.randint(len(_TORQUES), chosen.shape, generator=drawn)
        share = max(0.05, 1 - index / self.explored)
        actions = torch.where(torch.rand(chosen.shape, generator=drawn) < share, random, chosen)
        angle, speed, reward = pendulum(replay.angle, replay.speed, _TORQUES[actions])
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
            angle, speed, reward = pendulum(angle, speed, torque)
            cost -= float(reward.double().mean()) / 150
    return cost


def _anywhere(count: int, number: int) -> Tensor:
    """Transitions of random actions from anywhere."""
    drawn = generator(0, number)
    angle = (2 * torch.rand(count, generator=drawn) - 1) * torch.pi
    speed = (2 * torch.rand(count, generator=drawn) - 1) * 6
    actions = torch.randint(len(_TORQUES), (count,), generator=drawn)
    after_angle, after_speed, reward = pendulum(angle, speed, _TORQUES[actions])
    rows = [_observed(angle, speed), actions[:, None].float(), reward[:, None]]
    return torch.cat([*rows, _observed(after_angle, after_speed)], 1)


def _dqn(seed: int, kind: Kind, quick: bool, probe: str) -> Training:
    torch.manual_seed(seed)
    model = Values(32 if quick else 160, len(_TORQUES))
    target = copy.deepcopy(model).requires_grad_(False)
    replay = Replay(2_000 if quick else 20_000, 32, 1000 + seed)

    def drawn(index: int) -> Tensor:
        known = min(replay.seen, len(replay.rows))
        return replay.rows[torch.randint(max(1, known), (128,), generator=generator(seed, index))]

    loss = partial(_difference, model, target)
    probes = {
        "return": lambda: _episodes(model, 128, 10),
        "difference": mean_loss(model, loss, [_anywhere(512, 10 + i) for i in range(_PROBE)]),
    }
    return _Playing(
        model=model,
        optimizers=[torch.optim.Adam(model.parameters(), lr=1e-3)],
        train_loss=lambda index: loss(drawn(index)),
        probe=probes[probe],
        final=lambda: _episodes(model, 64 if quick else 1024, 100),
        stateful={"target": target, "replay": replay},
        also={"temporal difference": mean_loss(model, loss, [_anywhere(8192, 50)])},
        clip=10.0,
        replay=replay,
        target=target,
        seed=seed,
        copies=100 if not quick else 4,
        explored=kind.steps(quick) // 3,
    )


# --- a game of two networks -----------------------------------------------------------------------------------


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


def _gan(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    noise, batch, steps = 8, 256, kind.steps(quick)
    model = Game(24 if quick else 128, noise)

    def train_loss(index: int) -> Tensor:
        drawn = generator(seed, index)
        return model.loss(_ring(batch, drawn), torch.randn(batch, noise, generator=drawn))

    def held_out(count: int, number: int) -> tuple[Tensor, Tensor]:
        drawn = generator(0, number)
        return _ring(count, drawn), torch.randn(count, noise, generator=drawn)

    def distance(pair: tuple[Tensor, Tensor]) -> Tensor:
        return _sliced(model.generator(pair[1]), pair[0])

    made = torch.optim.Adam(model.generator.parameters(), lr=2e-4, betas=(0.0, 0.99))
    judged = torch.optim.Adam(model.critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    rate = _warm_cosine(steps, 1, 0.02)
    both = [scheduled(made, rate), scheduled(judged, rate)]
    return Training(
        model=model,
        optimizers=[made, judged],
        train_loss=train_loss,
        probe=mean_loss(model, distance, [held_out(1024, 10 + i) for i in range(_PROBE)]),
        final=mean_loss(model, distance, [held_out(4096, 100 + i) for i in range(2 if quick else 10)]),
        scheduler=_Both(both),
    )


class _Both:
    """Schedulers that make a step together."""

    def __init__(self, schedulers: list[Any]) -> None:
        self._schedulers = schedulers

    def step(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(at): one.state_dict() for at, one in enumerate(self._schedulers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for at, one in enumerate(self._schedulers):
            one.load_state_dict(state[str(at)])


# --- physics --------------------------------------------------------------------------------------------------


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


def _pinn(seed: int, kind: Kind, quick: bool, closing: bool) -> Training:
    torch.manual_seed(seed)
    batch, steps = 256, kind.steps(quick)
    model = Physics(16 if quick else 64)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)

    def points(count: int, drawn: torch.Generator) -> Tensor:
        return torch.rand(count, 2, generator=drawn)

    shared: dict[str, Any] = {
        "model": model,
        "train_loss": lambda index: model.loss(points(batch, generator(seed, index))),
        "probe": mean_loss(model, model.loss, [points(512, generator(0, 10 + i)) for i in range(_PROBE)]),
        "final": mean_loss(model, model.loss, [points(2048, generator(0, 100 + i)) for i in range(4)]),
        "also": {"distance to the solution": mean_loss(model, model.error, [points(8192, generator(0, 50))])},
        "scheduler": scheduled(adam, lambda step: 0.05 ** min(1.0, step / steps)),
    }
    if not closing:
        return Training(optimizers=[adam], **shared)
    last = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=10, line_search_fn="strong_wolfe")
    return _Closing(
        optimizers=[adam, last], closes=steps * 6 // 11, fixed=points(512, generator(seed, 999_999)), **shared
    )


# --- pure bfloat16, gradients of several batches ----------------------------------------------------------------


def _bf16(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    steps = kind.steps(quick)
    shape = (
        GPTConfig(width=32, layers=2, heads=2, block=32)
        if quick
        else GPTConfig(width=96, layers=2, heads=4, block=48)
    )
    model = GPT(shape).to(torch.bfloat16)
    texts = code_text()
    half, length = len(texts[1]) // 2, shape.block + 1

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def train_loss(index: int) -> Tensor:
        pieces = windows(texts[0], 24, length, generator(seed, index)).split(8)
        for piece in pieces[:-1]:
            (loss(piece) / len(pieces)).backward()
        return loss(pieces[-1]) / len(pieces)

    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    probe = windows(texts[1][:half], _PROBE * 16, length, generator(0, 1)).split(16)
    truth = windows(texts[1][half:], (4 if quick else 32) * 16, length, generator(0, 2)).split(16)
    return _Accumulating(
        model=model,
        optimizers=[optimizer],
        train_loss=train_loss,
        probe=mean_loss(model, loss, list(probe)),
        final=mean_loss(model, loss, list(truth)),
        scheduler=scheduled(optimizer, _warm_cosine(steps, steps // 10, 0.1)),
        clip=1.0,
    )


@dataclass(kw_only=True)
class _Accumulating(Training):
    """Its loss adds the gradients of earlier pieces by itself: they are cleared before, not after it."""

    def step(self, index: int) -> float:
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.train_loss(index)
        loss.backward()
        self.clip_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(loss.detach())


MORE = (
    Kind(name="clip", title="Two towers, AdamW (0.9, 0.98), learned temperature", build=_clip, every=54),
    Kind(
        name="dqn",
        title="Double DQN, Adam, its return measured",
        build=partial(_dqn, probe="return"),
        every=330,
        quick_every=12,
    ),
    Kind(
        name="dqn-difference",
        title="Double DQN, Adam, the temporal difference measured",
        build=partial(_dqn, probe="difference"),
        every=330,
        quick_every=12,
    ),
    Kind(
        name="gan",
        title="GAN, Adam (0, 0.99) against Adam (0.5, 0.99)",
        build=_gan,
        every=240,
        quick_every=20,
    ),
    Kind(name="pinn", title="Equation of heat, Adam", build=partial(_pinn, closing=False), every=200),
    Kind(
        name="pinn-lbfgs",
        title="Equation of heat, Adam, then L-BFGS",
        build=partial(_pinn, closing=True),
        every=120,
    ),
    Kind(name="gpt-bf16", title="GPT in bfloat16, gradients of three batches, AdamW", build=_bf16, every=36),
)
