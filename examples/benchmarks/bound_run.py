"""One cell of the bench of the bound: a training undisturbed, or restored ten times from the store. And what it was told."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bound_training import Kind, Training
from bound_trainings import KINDS, source_digest

import shrinkpoint
from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import SaverConfig
from shrinkpoint.schemes.catalogue import options_of

__all__ = [
    "PARTS",
    "UNDISTURBED",
    "Setting",
    "Task",
    "checkpointed",
    "library_digest",
    "machine_digest",
    "measure",
    "plain",
    "restored",
]

PARTS = ("plain", "nudged", "spread", "late")

UNDISTURBED = ("plain", "nudged")
"""Those that restore nothing."""
_NUDGE = 1e-6
"""Of each weight: what rounding to fp32 changes it by a few times over, and no scheme could do less but by changing nothing."""

_REPORTED = (
    "step",
    "kind",
    "bytes",
    "raw_bytes",
    "configuration",
    "reason",
    "degradation",
    "resumed",
    "baseline",
    "evaluations",
    "blocked_s",
    "search_s",
    "encode_s",
)
_REPORTED_LATER = (
    "degradation_low",
    "degradation_high",
    "measured",
    "allowed",
    "resumed_high",
    "update_error",
    "update_length",
    "lost_steps",
    "cost",
    "cost_high",
    "cost_delay",
    "overhead",
)
"""Of a report, where the library has them."""
_CURVE = 20
"""Points of a training loss that are kept."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How runs are saved. Whatever is not given is the library's default."""

    scheme: str = "auto"
    options: str = "{}"
    """Of the scheme, a JSON object of the fields that are not at their defaults."""
    config: str = "{}"
    """The same of `SaverConfig`."""

    @property
    def label(self) -> str:
        """For readers: the scheme, and what is not at its default."""
        others = {**json.loads(self.options), **json.loads(self.config)}
        return " ".join([self.scheme, *(f"{name}={value}" for name, value in others.items())])

    def build(self) -> SaverConfig:
        """The library's own form of it.

        Raises:
            ConfigError, TypeError: there is no such option, or it cannot have this value.
        """
        changed = json.loads(self.options)
        options = replace(options_of(self.scheme), **changed) if changed else None
        fields: dict[str, Any] = {"scheme": self.scheme, "options": options, **json.loads(self.config)}
        return SaverConfig(**fields)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Which cell."""

    name: str
    """Of the training."""
    seed: int
    part: str
    quick: bool = False
    setting: Setting = Setting()

    @property
    def kind(self) -> Kind:
        """The training."""
        return KINDS[self.name]

    @property
    def key(self) -> dict[str, Any]:
        """Its place among the cells; undisturbed runs have no setting."""
        key = {"training": self.name, "seed": self.seed, "part": self.part, "quick": self.quick}
        if self.part not in UNDISTURBED:
            key |= {
                "scheme": self.setting.scheme,
                "options": json.loads(self.setting.options),
                "config": json.loads(self.setting.config),
            }
        return {**key, "source": source_digest(self.kind)}


def _sources(root: Path) -> Iterator[Path]:
    """Also of packages that are links, as in a checkout whose parts are linked together; `Path.rglob` passes those by."""
    for folder, _, files in os.walk(root, followlinks=True):
        yield from (Path(folder, file) for file in files if file.endswith(".py"))


@cache
def library_digest() -> str:
    """Another one whenever the library's source has changed: which of its states a cell was measured with."""
    hashed = hashlib.sha256()
    for path in sorted(_sources(Path(shrinkpoint.__file__).parent)):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


@cache
def machine_digest() -> str:
    """Another one on another kind of processor, whose sums are rounded otherwise: some trainings then end elsewhere."""
    info = Path("/proc/cpuinfo")
    told = info.read_text() if info.exists() else platform.processor()
    lines = dict.fromkeys(
        line for line in told.splitlines() if line.startswith(("model", "cpu family", "flags"))
    )
    versions = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return hashlib.sha256("\n".join([versions, *(lines or [told])]).encode()).hexdigest()[:12]


def measure(task: Task) -> dict[str, Any]:
    """The result of a cell, of JSON's kinds."""
    started = time.perf_counter()
    result = plain(task) if task.part in UNDISTURBED else restored(task)
    return {
        **result,
        "machine": machine_digest(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def plain(task: Task) -> dict[str, Any]:
    """The undisturbed run; as ``nudged``, with an error of a millionth in all weights wherever others are restored."""
    kind = task.kind
    training = kind.build(task.seed, kind, task.quick)
    before = _losses(training)
    changes = set(kind.save_steps("spread", task.quick)[:-1]) if kind.only_spread else set()
    nudges = set(kind.save_steps("spread", task.quick)[:-1]) if task.part == "nudged" else set()
    losses, started = [], time.perf_counter()
    for index in range(kind.steps(task.quick)):
        losses.append(training.step(index))
        if index + 1 in nudges:
            _nudge(training.model, index)
        if index + 1 in changes and training.after_restore is not None:
            training.after_restore()
    seconds = time.perf_counter() - started
    return {**_losses(training), "before": before, "curve": _thin(losses), "train_s": round(seconds, 3)}


def _nudge(model: torch.nn.Module, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + _NUDGE * torch.randn(parameter.shape, generator=noise))


def restored(task: Task) -> dict[str, Any]:
    """A run that is thrown away and restored from the store after every checkpoint but the last, which is read at the end."""
    run, library = _Restored(task), library_digest()
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        try:
            result = run.run(f"{folder}/run")
        except Exception as error:
            said = "; ".join(dict.fromkeys(str(one.message) for one in caught))
            raise RuntimeError(f"{task} failed, and was warned: {said or 'of nothing'}") from error
    texts = [f"{one.category.__name__}: {one.message}" for one in caught]
    ours = [text for text in texts if text.startswith("Shrinkpoint")]
    return {**result, "warnings": list(dict.fromkeys(ours)), "library": library}


def checkpointed(task: Task, url: str, step: int = 0) -> tuple[Training, Checkpointer]:
    """A training made anew, and restored from the newest checkpoint of a run.

    Args:
        task: which training and setting.
        url: where its checkpoints are.
        step: where it must go on from.

    Raises:
        RuntimeError: it goes on from another step.
    """
    training = task.kind.build(task.seed, task.kind, task.quick)
    checkpointer = Checkpointer(
        url,
        training.model,
        list(training.optimizers),
        evaluate=training.probe,
        train_loss=training.train_loss,
        clip_grad_norm=training.clip,
        config=task.setting.build(),
        **training.saved,
    )
    resumed = checkpointer.resume()
    if resumed != step:
        raise RuntimeError(f"{task}: resumed from step {resumed}, and the checkpoint of {step} is there")
    return training, checkpointer


class _Restored:
    """The state of one such run."""

    def __init__(self, task: Task) -> None:
        self._task, self._kind = task, task.kind
        self._saves: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._train_s = self._wall_s = 0.0

    def run(self, url: str) -> dict[str, Any]:
        """The whole run.

        Args:
            url: where its checkpoints go.
        """
        steps = self._kind.save_steps(self._task.part, self._task.quick)
        training, checkpointer = self._begin(url)
        for step in steps:
            self._train(training, checkpointer, step)
            self._save(training, checkpointer, step)
            if step == steps[-1]:
                continue
            checkpointer.close()
            del training, checkpointer  # as a crash would: nothing but the store is left
            training, checkpointer = self._begin(url, step)
            if training.after_restore is not None:
                training.after_restore()
        checkpointer.close()
        final = {**_losses(training), "frozen_changes": training.frozen_changes()}
        training, checkpointer = self._begin(url, steps[-1])
        checkpointer.close()
        return {
            **final,
            "last": {**_losses(training), "frozen_changes": training.frozen_changes()},
            "saves": self._saves,
            "curve": _thin(self._losses),
            "train_s": round(self._train_s, 3),
            "wall_s": round(self._wall_s, 3),
        }

    def _begin(self, url: str, step: int = 0) -> tuple[Training, Checkpointer]:
        """Everything anew, and restored; `step` is where it must go on from."""
        started = time.perf_counter()
        begun = checkpointed(self._task, url, step)
        self._wall_s += time.perf_counter() - started
        return begun

    def _train(self, training: Training, checkpointer: Checkpointer, to: int) -> None:
        begun = len(self._losses)
        for index in range(begun, to):
            started = time.perf_counter()
            self._losses.append(training.step(index))
            stepped = time.perf_counter()
            checkpointer.step(index + 1)
            self._train_s += stepped - started
            self._wall_s += time.perf_counter() - started

    def _save(self, training: Training, checkpointer: Checkpointer, step: int) -> None:
        started = time.perf_counter()
        checkpointer.save(step, wait=True)
        self._wall_s += time.perf_counter() - started
        reports = checkpointer.reports()
        if not reports or reports[-1].step != step:
            raise RuntimeError(f"the save of step {step} has failed")
        report = reports[-1]
        kept = {name: getattr(report, name) for name in _REPORTED}
        kept |= {name: getattr(report, name) for name in _REPORTED_LATER if hasattr(report, name)}
        kept["stored_exactly"] = _stored_exactly(report.raw_sections, report.sections)
        kept["kept_exactly"] = len(report.kept_exactly)
        self._saves.append(_plain_numbers(kept))


def _losses(training: Training) -> dict[str, Any]:
    return {
        "final": training.final(),
        "probe": training.probe(),
        "abilities": {name: measured() for name, measured in training.abilities.items()},
        "also": {name: measured() for name, measured in training.also.items()},
    }


def _stored_exactly(raw: Mapping[str, int], stored: Mapping[str, int]) -> list[str]:
    """Roles of tensors that took more than two thirds of their bytes: what is stored exactly, or nearly so."""
    return sorted(role for role, size in raw.items() if size > 4096 and stored.get(role, 0) > size * 2 / 3)


def _thin(losses: list[float]) -> list[float]:
    """Means of so many pieces of the curve."""
    each = max(1, len(losses) // _CURVE)
    pieces = [losses[at : at + each] for at in range(0, len(losses), each)]
    return [round(sum(piece) / len(piece), 6) for piece in pieces]


def _plain_numbers(value: Any) -> Any:
    """The same of JSON's kinds; what is not finite is None, as JSON has no word for it."""
    if isinstance(value, Mapping):
        return {str(name): _plain_numbers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, torch.Tensor):
        return _plain_numbers(value.item())
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
