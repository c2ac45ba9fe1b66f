"""Logs finished saves to the trainer's loggers, and collects the metrics that are stored with them."""

from collections.abc import Sequence
from typing import Any

from shrinkpoint.reports import SaveReport
from shrinkpoint.session.probe import number_of
from shrinkpoint.session.reports import finite, log_line, numbers

__all__ = ["current_metrics", "log_reports"]

_LOGGERS = "transformers.integrations"


def current_metrics(state: Any) -> dict[str, float]:
    """Return the metrics logged at the present step that a manifest can store.

    Args:
        state: the trainer's ``TrainerState``. An evaluation of an earlier step does not apply to the present weights.
    """
    values: dict[str, Any] = {"epoch": state.epoch}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        values = {**entry, **values}
    found = {
        name: number_of(value)
        for name, value in values.items()
        if name != "step" and not isinstance(value, bool)
    }
    return finite({name: value for name, value in found.items() if value is not None})


def log_reports(trainer: Any, reports: Sequence[SaveReport]) -> None:
    """Log finished saves to TensorBoard, Weights & Biases and similar loggers at the present step, not to the log
    history.

    The history is part of the run's state, and would then depend on how long a save has taken.
    """
    for report in reports:
        log_line(report)
        logs = {**numbers(report), "checkpoint/step": float(report.step)}
        for callback in trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith(_LOGGERS):
                callback.on_log(
                    trainer.args, trainer.state, trainer.control, model=trainer.model, logs=dict(logs)
                )
