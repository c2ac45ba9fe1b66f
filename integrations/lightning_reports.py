"""Telling the user's loggers about finished saves, and keeping track of the best checkpoint."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from shrinkpoint.address import Address
from shrinkpoint.reports import SaveReport
from shrinkpoint.store.manifest import Manifest

__all__ = ["BestCheckpoints", "finite_metrics", "log_reports", "metrics_of"]

_log = logging.getLogger(__name__)
_TAKE_TEXT = {"CSVLogger", "WandbLogger"}  # loggers whose log_metrics stores strings too


@dataclass(kw_only=True)
class BestCheckpoints:
    """The run's last and best checkpoints, as addresses, under the names that Lightning's loggers look for."""

    url: str
    monitor: str | None
    mode: Literal["min", "max"]
    top_k: int
    last_path: str = ""
    best_path: str = ""
    current: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """The best `top_k` by address; all of them with -1."""

    @property
    def best_score(self) -> float | None:
        """The metric of the best one; None without a monitor."""
        return self.scores.get(self.best_path)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a finished save into account; without a monitor the last one is the best one."""
        self.last_path = str(Address(url=self.url, step=step))
        if self.monitor is None:
            self.best_path = self.last_path
            return
        self.current = metrics.get(self.monitor)
        if self.current is None:
            return
        self.scores[self.last_path] = self.current
        ranked = sorted(self.scores, key=self.scores.__getitem__, reverse=self.mode == "max")
        kept = ranked if self.top_k < 0 else ranked[: max(1, self.top_k)]
        self.scores = {path: self.scores[path] for path in kept}
        self.best_path = kept[0]


def finite_metrics(trainer: Trainer) -> dict[str, float]:
    """What has been logged so far, as far as it can stand in a manifest: JSON knows neither NaN nor infinity."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """The metrics that were stored with a checkpoint."""
    save = manifest.meta.get("save")
    metrics = save.get("metrics") if isinstance(save, dict) else None
    return dict(metrics) if isinstance(metrics, dict) else {}


def log_reports(trainer: Trainer, reports: Sequence[SaveReport]) -> None:
    """Give finished saves to the trainer's loggers, at the saves' own steps, past Lightning's collection of metrics."""
    for report in reports:
        _log.info(
            "step %d saved as %s: %d bytes, %.1fx smaller, %s (%s)",
            *(report.step, report.kind, report.bytes, report.ratio, report.configuration, report.reason),
        )
        numbers = {
            "ratio": report.ratio,
            "bytes": float(report.bytes),
            "blocked_s": report.blocked_s,
            "search_s": report.search_s,
            "write_s": report.write_s,
            "degradation": report.degradation,
        }
        values = {f"checkpoint/{name}": value for name, value in numbers.items() if value is not None}
        for logger in trainer.loggers:
            _log_to(logger, values, f"{report.configuration} ({report.scheme})", report.step)


def _log_to(logger: Logger, values: dict[str, float], configuration: str, step: int) -> None:
    name = "checkpoint/configuration"
    kinds = {base.__name__ for base in type(logger).__mro__}
    text: dict[str, Any] = {name: configuration} if kinds & _TAKE_TEXT else {}
    logger.log_metrics(values | text, step=step)
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_text(name, configuration, step)
