"""The options of the Lightning callback, checked, and divided by the component that they are for."""

from dataclasses import dataclass
from typing import Any

from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.triggers import Schedule

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `CompressedCheckpoint`; see there."""

    run: RunSettings
    schedule: Schedule

    @classmethod
    def build(cls, **more: Any) -> "Settings":
        """Check and divide the callback's arguments.

        Raises:
            ConfigError: one of them has a value that cannot work.
        """
        schedule = Schedule.taken_from(more)
        return cls(run=RunSettings.build(**more), schedule=schedule)
