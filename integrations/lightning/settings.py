"""The options of the Lightning callback, checked, and divided by the component that they are for."""

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from shrinkpoint.integrations.common.settings import RunSettings
from shrinkpoint.integrations.common.triggers import Schedule

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `CompressedCheckpoint`; see there."""

    run: RunSettings
    schedule: Schedule
    on_epoch_end: bool | None
    """Whether to save at epochs' ends alone, or right after validations alone; None does both."""

    @classmethod
    def build(
        cls,
        *,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        on_epoch_end: bool | None,
        **more: Any,
    ) -> "Settings":
        """Check and divide the callback's arguments; `more` are those of `RunSettings.build`.

        Raises:
            ConfigError: one of them has a value that cannot work.
        """
        schedule = Schedule(
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            train_time_interval=train_time_interval,
        )
        known = [item.name for item in fields(Schedule)]
        run = RunSettings.build(known=[*known, "save_on_train_epoch_end"], **more)
        return cls(run=run, schedule=schedule, on_epoch_end=on_epoch_end)
