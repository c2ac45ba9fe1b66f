"""Logs finished saves to Lightning's loggers, and collects the metrics logged so far."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from shrinkpoint.reports import SaveReport
from shrinkpoint.session.reports import configuration, finite, log_line, numbers

__all__ = ["Measured", "log_reports"]

_TAKE_TEXT = {"CSVLogger", "WandbLogger"}  # loggers whose log_metrics stores strings too


class Measured:
    """At which step each logged metric was measured: Lightning goes on showing a metric until it is logged again."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[torch.Tensor, int, int]] = {}

    def note(self, trainer: Trainer, *, at: int | None = None) -> None:
        """Look for new values; called, on every rank, wherever metrics may have been logged.

        Args:
            trainer: its metrics may be summed over all ranks here.
            at: the step that new ones belong to; None is the present one.
        """
        step = trainer.global_step if at is None else at
        for name, value in trainer.callback_metrics.items():
            known = self._found.get(name)  # that its tensor is kept, no other one can be at the same place
            if known is None or (known[0].data_ptr(), known[1]) != (value.data_ptr(), value._version):
                self._found[name] = (value, value._version, step)

    def of_these_weights(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics of the present step that a manifest can store."""
        self.note(trainer)
        step = trainer.global_step
        found = {name: value for name, (value, _, at) in self._found.items() if at == step}
        values = {name: float(value) for name, value in found.items() if value.numel() == 1}
        return finite({"epoch": float(trainer.current_epoch), **values})


def log_reports(trainer: Trainer, reports: Sequence[SaveReport]) -> None:
    """Give finished saves to the trainer's loggers, at the saves' own steps, bypassing Lightning's collection of
    metrics."""
    for report in reports:
        log_line(report)
        for logger in trainer.loggers:
            _log_to(logger, report)


def _log_to(logger: Logger, report: SaveReport) -> None:
    name, words = configuration(report)
    kinds = {base.__name__ for base in type(logger).__mro__}
    text: dict[str, Any] = {name: words} if kinds & _TAKE_TEXT else {}
    logger.log_metrics(numbers(report) | text, step=report.step)
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_text(name, words, report.step)
