"""Logs finished saves to Lightning's loggers, and collects the metrics logged so far."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from shrinkpoint.integrations.common.reports import configuration, finite, log_line, numbers
from shrinkpoint.reports import SaveReport

__all__ = ["finite_metrics", "log_reports"]

_TAKE_TEXT = {"CSVLogger", "WandbLogger"}  # loggers whose log_metrics stores strings too


def finite_metrics(trainer: Trainer) -> dict[str, float]:
    """The metrics logged so far that a manifest can store."""
    logged = trainer.callback_metrics.items()
    return finite({name: float(value) for name, value in logged if value.numel() == 1})


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
