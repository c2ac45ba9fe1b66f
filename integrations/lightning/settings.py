"""The options of the Lightning callback, checked, and divided by the component that they are for."""

from dataclasses import dataclass
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
    def build(cls, *, save_on_train_epoch_end: bool | None, **more: Any) -> "Settings":
        """Check and divide the callback's arguments.

        Raises:
            ConfigError: one of them has a value that cannot work.
        """
        schedule = Schedule.taken_from(more)
        return cls(run=RunSettings.build(**more), schedule=schedule, on_epoch_end=save_on_train_epoch_end)
