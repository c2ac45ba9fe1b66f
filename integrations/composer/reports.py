"""Logs finished saves to Composer's loggers, and collects the metrics that are stored with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from composer.core import State
from composer.loggers import Logger

from shrinkpoint.reports import SaveReport
from shrinkpoint.session.probe import number_of
from shrinkpoint.session.reports import finite, log_line, numbers

__all__ = ["current_metrics", "log_reports"]


def current_metrics(state: State, evaluated: Mapping[str, int]) -> dict[str, float]:
    """The metrics of the present weights, in training and evaluation, under the names that Composer logs; finite numbers only.

    A metric of the first evaluator is also found under its bare name.

    Args:
        state: after a batch.
        evaluated: at which batch each evaluator was run last, by its label; Composer goes on showing its metrics.
    """
    values: dict[str, Any] = {"epoch": float(state.timestamp.epoch.value)} | {
        f"loss/train/{name.removeprefix('loss/train/')}": value
        for name, value in (state.total_loss_dict or {}).items()
    }
    values |= {f"metrics/train/{name}": value for name, value in state.train_metric_values.items()}
    for label, metrics in reversed(list(state.eval_metrics.items())):
        if evaluated.get(label) != int(state.timestamp.batch):
            continue
        known = {name: _computed(state, name, metric) for name, metric in metrics.items()}
        values |= {f"metrics/{label}/{name}": value for name, value in known.items()}
        values |= known
    found = {name: number_of(value) for name, value in values.items()}
    return finite({name: value for name, value in found.items() if value is not None})


def _computed(state: State, name: str, metric: Any) -> Any:
    # Composer keeps one value by name, whichever evaluator came last; a metric remembers its own.
    own = getattr(metric, "_computed", None)
    return own if own is not None else state.eval_metric_values.get(name)


def log_reports(logger: Logger, reports: Sequence[SaveReport]) -> None:
    """Give finished saves to the run's loggers.

    They are logged at the present batch, since some loggers (Weights & Biases) drop values of an earlier one; the saved
    batch is among the numbers.
    """
    for report in reports:
        log_line(report)
        logger.log_metrics({**numbers(report), "checkpoint/batch": float(report.step)})
