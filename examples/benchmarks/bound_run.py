"""One cell of the bench of the bound: a training undisturbed, or restored ten times from the store."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from cells import Cell, library_digest, machine_digest
from trainings import KINDS, Kind
from trainings.base import Training

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import Advanced, SaverConfig
from shrinkpoint.quality.budget import NO_COST, RestoreCost, reserve_of
from shrinkpoint.reports import SaveReport

KEYS = ("training", "seed", "part", "quick", "scheme", "options", "config")
"""Columns that tell cells apart."""
PARTS = ("plain", "nudged", "spread")
UNDISTURBED = ("plain", "nudged")
"""Those that restore nothing."""
_SUMMED = ("bytes", "raw_bytes", "evaluations", "search_s", "blocked_s", "encode_s")
_NUDGE = 1e-6
"""Of each weight: a few times what rounding to fp32 changes it by, and less than any scheme that changes something."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How runs are saved: the options of the scheme and the others, those of `Advanced` among them, that are not at their defaults."""

    scheme: str = "auto"
    options: str = "{}"
    config: str = "{}"

    @property
    def given(self) -> dict[str, Any]:
        """What `Checkpointer` is given."""
        config, changed = json.loads(self.config), json.loads(self.options)
        known = {item.name for item in fields(Advanced)}
        advanced = {name: config.pop(name) for name in [*config] if name in known}
        scheme = {"name": self.scheme, **changed} if changed else self.scheme
        return {"scheme": scheme, "advanced": Advanced(**advanced), **config}

    def build(self) -> SaverConfig:
        return SaverConfig.of(**self.given)


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    """Of the training."""
    seed: int
    part: str
    quick: bool = False
    setting: Setting = Setting()

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def key(self) -> dict[str, Any]:
        """Its place among the cells; undisturbed runs have no setting."""
        key: dict[str, Any] = {
            "training": self.name,
            "seed": self.seed,
            "part": self.part,
            "quick": self.quick,
        }
        return key if self.part in UNDISTURBED else {**key, **vars(self.setting)}


def measure(task: Task) -> Cell:
    result = plain(task) if task.part in UNDISTURBED else _restored(task)
    return {**result, "library": library_digest(), "machine": machine_digest()}


def losses(training: Training) -> Cell:
    return {
        "final": training.final(),
        "probe": training.probe(),
        "abilities": {name: measured() for name, measured in training.abilities.items()},
        "also": {name: measured() for name, measured in training.also.items()},
    }


def plain(task: Task) -> Cell:
    """The undisturbed run; as ``nudged``, with an error of a millionth in all weights wherever others are restored."""
    kind = task.kind
    training = kind.make(task.seed, task.quick)
    restores = kind.save_steps(task.quick)[:-1]
    started = time.perf_counter()
    for step in range(1, kind.steps(task.quick) + 1):
        training.step(step - 1)
        if task.part == "nudged" and step in restores:
            _nudge(training.model, step - 1)
        if step in restores and training.after_restore is not None:
            training.after_restore()
    seconds = time.perf_counter() - started
    return {**losses(training), "train_s": round(seconds, 3)}


def _nudge(model: torch.nn.Module, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + _NUDGE * torch.randn(parameter.shape, generator=noise))


def _restored(task: Task) -> Cell:
    """A run that is thrown away and restored from the store after every checkpoint but the last, which is read at the end."""
    steps, done, train_s = task.kind.save_steps(task.quick), 0, 0.0
    reports: list[SaveReport] = []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        training, checkpointer = _begin(task, folder, 0)
        for step in steps:
            for index in range(done, step):
                started = time.perf_counter()
                training.step(index)
                train_s += time.perf_counter() - started
                checkpointer.step(index + 1)
            done = step
            checkpointer.save(step, wait=True)
            reports.append(checkpointer.reports()[-1])
            if reports[-1].step != step:
                raise RuntimeError(f"{task}: the save of step {step} has failed")
            checkpointer.close()
            if step == steps[-1]:
                final = {**losses(training), "frozen_changes": training.frozen_changes()}
            del training, checkpointer  # as a crash would: nothing but the store is left
            training, checkpointer = _begin(task, folder, step)
            if step != steps[-1] and training.after_restore is not None:
                training.after_restore()
        checkpointer.close()
    summed = summary(reports, task.setting.build())
    return {**final, "last": training.final(), "train_s": round(train_s, 3), **summed}


def checkpointed(training: Training, url: str, **more: Any) -> Checkpointer:
    """Make a checkpointer of all that a training has."""
    given = {"evaluate": training.probe, "train_loss": training.train_loss, "clip_grad_norm": training.clip}
    return Checkpointer(url, training.model, list(training.optimizers), **given, **more, **training.saved)


def _begin(task: Task, url: str, step: int) -> tuple[Training, Checkpointer]:
    """Everything anew, and restored; `step` is where it must go on from."""
    training = task.kind.make(task.seed, task.quick)
    checkpointer = checkpointed(training, url, **task.setting.given)
    resumed = checkpointer.resume()
    if resumed != step:
        raise RuntimeError(f"{task}: resumed from step {resumed}, and the checkpoint of {step} is there")
    return training, checkpointer


def summary(reports: Sequence[SaveReport], config: SaverConfig) -> Cell:
    """Sum up the reports; the last checkpoint's costs do not count, since a run is restored from those before."""
    reserve, total = reserve_of(config), NO_COST
    restored = reports[:-1]
    for report in restored:
        cost, high, delay = report.cost, report.cost_high, report.cost_delay
        if report.configuration != "exact" and cost is not None and high is not None and delay is not None:
            total += RestoreCost(cost - delay / 2, high - max(reserve, delay), delay, reserve)
    return {
        **{name: sum(getattr(report, name) for report in reports) for name in _SUMMED},
        "cost": total.mean,
        "cost_high": total.high,
        "unmeasured": sum(report.degradation is None for report in restored),
        "exact": sum(report.configuration == "exact" for report in restored),
        "update_error": _range([report.update_error for report in reports]),
        "update_length": _range([report.update_length for report in reports]),
    }


def _range(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
