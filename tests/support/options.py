"""Options of a callback or a `Checkpointer`, as the tests' own trainings pass them on, and an end without a last save."""

from dataclasses import fields, replace
from typing import Any

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import Advanced
from shrinkpoint.steps.options import chosen_log

__all__ = ["grouped", "leave"]

_ADVANCED = {item.name for item in fields(Advanced)}


def grouped(*, log_url: str | None = None, after_step: Any = None, **options: Any) -> dict[str, Any]:
    """Put what `Advanced` and `StepLog` have into these, so that a training of the tests takes it beside its other options.

    Args:
        log_url: the folder of the step log, if there is one.
        after_step: see `StepLog.after_step`.
        options: of the callback, or of `Advanced`.
    """
    if options.get("step_log") is not None:
        log = chosen_log(options["step_log"])
        more = {"url": log_url, "after_step": after_step}
        options["step_log"] = replace(
            log, **{name: value for name, value in more.items() if value is not None}
        )
    advanced = {name: options.pop(name) for name in [*options] if name in _ADVANCED}
    return {**options, "advanced": Advanced(**advanced)} if advanced else options


def leave(checkpointer: Checkpointer) -> None:
    """Let go of a run whose last steps are not saved: what a later start finds is what planned saves have stored."""
    checkpointer._saved_step = checkpointer._last_step
    checkpointer.close()
