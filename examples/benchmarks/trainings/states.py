"""A small GPT with each optimizer, and with what else a training may keep: what `auto` makes of every kind of state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from gpt import GPT, GPTConfig
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainings.base import PROBE, Kind, Run, Training, generator, mean_loss, training
from trainings.data import code_text, windows
from trainings.images import resnet
from trainings.optimizers import Adam8bit, AdEMAMix, Lion, Muon, RenamedAdam
from trainings.text import next_loss

_BATCH = 8
_Optimizers = Callable[[nn.Module], list[Optimizer]]
_Average = Callable[[nn.Module], AveragedModel]


class _Replay:
    """A replay buffer to which every step adds rows: an observation of 32 float32, of a random walk, and what it was worth."""

    def __init__(self) -> None:
        self.observations, self.rewards = torch.zeros(0, 32), torch.zeros(0)

    def add(self) -> None:
        """Add the rows of one step."""
        rows = torch.randn(8, 32, generator=generator(7, len(self.rewards) // 8)).cumsum(0)
        self.observations = torch.cat([self.observations, rows])
        self.rewards = torch.cat([self.rewards, rows.square().mean(1)])

    def state_dict(self) -> dict[str, Tensor]:
        return {"observations": self.observations, "rewards": self.rewards}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.observations, self.rewards = state["observations"], state["rewards"]


def _gpt(
    run: Run,
    optimizers: _Optimizers,
    dtype: torch.dtype = torch.float32,
    average: _Average | None = None,
    replay: bool = False,
) -> Training:
    """What is measured is the average of the weights, where there is one."""
    width, block = run.size((16, 8), (48, 32))
    model = GPT(GPTConfig(width=width, layers=1, heads=2, block=block)).to(dtype)
    train, held = code_text()
    half = len(held) // 2
    averaged = None if average is None else average(model)
    measured = model if averaged is None else averaged.module

    def measure(text: Tensor, count: int, number: int) -> Callable[[], float]:
        batches = windows(text, count * _BATCH, block + 1, generator(0, number)).split(_BATCH)
        return mean_loss(measured, partial(next_loss, measured), batches)

    def batch(drawn: torch.Generator) -> Tensor:
        return windows(train, _BATCH, block + 1, drawn)

    made = training(model, partial(next_loss, model), batch, run.seed, [], [], *optimizers(model))
    made.probe, made.final = measure(held[:half], PROBE, 1), measure(held[half:], run.size(4, 24), 2)
    if averaged is not None:
        made.stateful, made.after_step = {"average": averaged}, lambda: averaged.update_parameters(model)
    if replay:
        buffer = _Replay()
        made.stateful, made.after_step = {"replay": buffer}, buffer.add
    return made


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [Muon(matrices, lr=0.01), optim.AdamW(others, lr=2e-3)]


def _first_steps(run: Run) -> Training:
    made = resnet(run)
    made.scheduler = None
    return made


def _of(kind: Callable[..., Optimizer], **options: Any) -> _Optimizers:
    return lambda model: [kind(model.parameters(), **options)]


_ADAMW, _LION = _of(optim.AdamW, lr=2e-3), _of(Lion, lr=3e-4)
_SGD, _MOMENTUM = _of(optim.SGD, lr=0.3), _of(optim.SGD, lr=0.05, momentum=0.9)
_RMSPROP, _ADAFACTOR = _of(optim.RMSprop, lr=1e-3), _of(optim.Adafactor, lr=1e-2)
_BF16 = torch.bfloat16
_EMA = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.98))

_BUILDS: Mapping[str, Callable[[Run], Training]] = {
    "AdamW": partial(_gpt, optimizers=_ADAMW),
    "AdamW, amsgrad": partial(_gpt, optimizers=_of(optim.AdamW, lr=2e-3, amsgrad=True)),
    "AdamW, an EMA of the weights": partial(_gpt, optimizers=_ADAMW, average=_EMA),
    "AdamW, SWA": partial(_gpt, optimizers=_ADAMW, average=AveragedModel),
    "AdamW, a replay buffer that grows": partial(_gpt, optimizers=_ADAMW, replay=True),
    "AdamW, bfloat16": partial(_gpt, optimizers=_ADAMW, dtype=_BF16),
    "AdamW, float64": partial(_gpt, optimizers=_ADAMW, dtype=torch.float64),
    "Adam of 8-bit codes": partial(_gpt, optimizers=_of(Adam8bit, lr=2e-3)),
    "NAdam": partial(_gpt, optimizers=_of(optim.NAdam, lr=2e-3)),
    "RAdam": partial(_gpt, optimizers=_of(optim.RAdam, lr=2e-3)),
    "Adamax": partial(_gpt, optimizers=_of(optim.Adamax, lr=4e-3)),
    "AdEMAMix": partial(_gpt, optimizers=_of(AdEMAMix, lr=2e-3)),
    "Adam of other names": partial(_gpt, optimizers=_of(RenamedAdam, lr=2e-3)),
    "Adafactor": partial(_gpt, optimizers=_ADAFACTOR),
    "Adafactor, bfloat16": partial(_gpt, optimizers=_ADAFACTOR, dtype=_BF16),
    "Lion": partial(_gpt, optimizers=_LION),
    "Lion, bfloat16": partial(_gpt, optimizers=_LION, dtype=_BF16),
    "Muon, AdamW": partial(_gpt, optimizers=_muon),
    "Muon, AdamW, bfloat16": partial(_gpt, optimizers=_muon, dtype=_BF16),
    "SGD": partial(_gpt, optimizers=_SGD),
    "SGD, bfloat16": partial(_gpt, optimizers=_SGD, dtype=_BF16),
    "SGD, momentum": partial(_gpt, optimizers=_MOMENTUM),
    "SGD, momentum, bfloat16": partial(_gpt, optimizers=_MOMENTUM, dtype=_BF16),
    "SGD, momentum: a ResNet's first steps": _first_steps,
    "RMSprop": partial(_gpt, optimizers=_RMSPROP),
    "RMSprop, momentum": partial(_gpt, optimizers=_of(optim.RMSprop, lr=3e-4, momentum=0.9)),
    "RMSprop, bfloat16": partial(_gpt, optimizers=_RMSPROP, dtype=_BF16),
    "RMSprop, centered": partial(_gpt, optimizers=_of(optim.RMSprop, lr=1e-3, centered=True)),
    "Adagrad": partial(_gpt, optimizers=_of(optim.Adagrad, lr=2e-2)),
    "Adadelta": partial(_gpt, optimizers=_of(optim.Adadelta, lr=1.0)),
    "ASGD": partial(_gpt, optimizers=_of(optim.ASGD, lr=0.3, t0=100)),
    "Rprop": partial(_gpt, optimizers=_of(optim.Rprop, lr=1e-4, step_sizes=(1e-7, 1e-3))),
}

STATES = tuple(
    Kind(
        name=f"state-{re.sub('[^a-z0-9]+', '-', title.lower())}",
        title=title,
        build=build,
        every=5 if build is _first_steps else 18,
    )
    for title, build in _BUILDS.items()
)
