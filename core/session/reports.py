"""Reports of finished saves for loggers, and tracking of the best checkpoint."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shrinkpoint.engine.address import Address
from shrinkpoint.engine.retention import Record, keep_best
from shrinkpoint.reports import SaveReport

_log = logging.getLogger(__name__)
_LOGGED = """blocked_s adopt_s waited_s search_s write_s degradation degradation_high cost cost_high cost_delay
overhead update_error update_length redundancy"""


@dataclass(kw_only=True)
class BestCheckpoints:
    """The run's last and best checkpoints, as addresses."""

    url: str
    monitor: str | None
    mode: Literal["min", "max"]
    top_k: int
    last_path: str = ""
    best_path: str = ""
    current: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """The best `top_k` by address, oldest first; all of them with -1."""

    @property
    def best_score(self) -> float | None:
        """The metric of the best one; None without a monitor."""
        return self.scores.get(self.best_path)

    def add(self, step: int, metrics: Mapping[str, float], *, finite: bool = True) -> None:
        """Take a finished save into account.

        One that is not finite is the best only if there is no other: its metric may be an old one.
        The best is what `shrinkpoint.engine.retention.keep_best` keeps, of equals the older: it must still exist.
        Without a monitor the last one is the best one; where none of the best is kept there is no best one.
        """
        self.last_path = str(Address(url=self.url, step=step))
        if self.monitor is None:
            self.best_path = self.last_path
            return
        self.current = {"step": float(step), **metrics}.get(self.monitor)
        if self.top_k == 0 or self.current is None or not math.isfinite(self.current) or not finite:
            return
        self.scores.pop(self.last_path, None)
        self.scores[self.last_path] = self.current
        [self.best_path] = self._best(1)
        if self.top_k > 0:
            self.scores = {path: self.scores[path] for path in self._best(self.top_k)}

    def _best(self, count: int) -> list[str]:
        """Return the paths that retention would keep of these, oldest first."""
        steps = (int(path.rpartition("=")[2]) for path in self.scores)
        records = [
            Record(seq=at, step=step, metric=self.scores[path])
            for at, (path, step) in enumerate(zip(self.scores, steps, strict=True))
        ]
        kept = keep_best(records, count, self.mode)
        return [path for at, path in enumerate(self.scores) if at in kept]


def number_of(value: Any) -> float | None:
    """Return a number or a tensor of one element as a float; None of anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that a manifest can store: numbers, of which JSON has neither NaN nor infinity."""
    found = {name: number_of(value) for name, value in metrics.items()}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def numbers(report: SaveReport) -> dict[str, float]:
    """Return the numbers of a save for loggers, under the names that all integrations use; unmeasured ones are left out."""
    values = {
        "step": float(report.step),
        "ratio": report.ratio,
        "bytes": float(report.bytes),
        **{name: getattr(report, name) for name in _LOGGED.split()},
        **{f"degradation_after_{steps}_steps": rise for steps, rise in report.resumed.items()},
    }
    return {f"checkpoint/{name}": value for name, value in values.items() if value is not None}


def configuration(report: SaveReport) -> tuple[str, str]:
    """Return the chosen settings, for loggers that take text: the name, and the text."""
    return "checkpoint/configuration", f"{report.configuration} ({report.scheme})"


def log_line(report: SaveReport) -> None:
    """Write one line about a save to Python's log, at level INFO."""
    _log.info(
        "step %d saved as %s: %d bytes, %.1fx smaller, %s (%s)",
        *(report.step, report.kind, report.bytes, report.ratio, report.configuration, report.reason),
    )
    if report.redundancy is not None:
        _log.info(
            "step %d: %d of the run's stores may be lost now (parity %d)",
            *(report.step, report.redundancy, report.parity),
        )
