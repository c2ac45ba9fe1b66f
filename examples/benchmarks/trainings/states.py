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
    run: Run, optimizers: _Optimizers, dtype: torch.dtype = torch.float32, average: _Average | None = None, replay: bool = False
) -> Training:  # fmt: skip
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

    made = training(run, model, partial(next_loss, model), batch, ([], []), *optimizers(model))
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

_BUILDS: Mapping[str, tuple[_Optimizers, dict[str, Any]]] = {
    "AdamW": (_ADAMW, {}),
    "AdamW, amsgrad": (_of(optim.AdamW, lr=2e-3, amsgrad=True), {}),
    "AdamW, an EMA of the weights": (_ADAMW, {"average": _EMA}),
    "AdamW, SWA": (_ADAMW, {"average": AveragedModel}),
    "AdamW, a replay buffer that grows": (_ADAMW, {"replay": True}),
    "AdamW, bfloat16": (_ADAMW, {"dtype": _BF16}),
    "AdamW, float64": (_ADAMW, {"dtype": torch.float64}),
    "Adam of 8-bit codes": (_of(Adam8bit, lr=2e-3), {}),
    "NAdam": (_of(optim.NAdam, lr=2e-3), {}),
    "RAdam": (_of(optim.RAdam, lr=2e-3), {}),
    "Adamax": (_of(optim.Adamax, lr=4e-3), {}),
    "AdEMAMix": (_of(AdEMAMix, lr=2e-3), {}),
    "Adam of other names": (_of(RenamedAdam, lr=2e-3), {}),
    "Adafactor": (_ADAFACTOR, {}),
    "Adafactor, bfloat16": (_ADAFACTOR, {"dtype": _BF16}),
    "Lion": (_LION, {}),
    "Lion, bfloat16": (_LION, {"dtype": _BF16}),
    "Muon, AdamW": (_muon, {}),
    "Muon, AdamW, bfloat16": (_muon, {"dtype": _BF16}),
    "SGD": (_SGD, {}),
    "SGD, bfloat16": (_SGD, {"dtype": _BF16}),
    "SGD, momentum": (_MOMENTUM, {}),
    "SGD, momentum, bfloat16": (_MOMENTUM, {"dtype": _BF16}),
    "RMSprop": (_RMSPROP, {}),
    "RMSprop, momentum": (_of(optim.RMSprop, lr=3e-4, momentum=0.9), {}),
    "RMSprop, bfloat16": (_RMSPROP, {"dtype": _BF16}),
    "RMSprop, centered": (_of(optim.RMSprop, lr=1e-3, centered=True), {}),
    "Adagrad": (_of(optim.Adagrad, lr=2e-2), {}),
    "Adadelta": (_of(optim.Adadelta, lr=1.0), {}),
    "ASGD": (_of(optim.ASGD, lr=0.3, t0=100), {}),
    "Rprop": (_of(optim.Rprop, lr=1e-4, step_sizes=(1e-7, 1e-3)), {}),
}


def _kind(title: str, build: Callable[[Run], Training], every: int = 18) -> Kind:
    return Kind(f"state-{re.sub('[^a-z0-9]+', '-', title.lower())}", title, build, every)


_GPTS = [_kind(title, partial(_gpt, optimizers=made, **more)) for title, (made, more) in _BUILDS.items()]
_FIRST = _kind("SGD, momentum: a ResNet's first steps", _first_steps, 5)
_PLACE = [kind.title for kind in _GPTS].index("RMSprop")
STATES = (*_GPTS[:_PLACE], _FIRST, *_GPTS[_PLACE:])
