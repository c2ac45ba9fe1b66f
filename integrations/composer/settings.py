"""The options of the Composer callback, checked, and divided by the component that they are for."""

from dataclasses import dataclass
from typing import Any

from shrinkpoint.integrations.common.settings import RunSettings
from shrinkpoint.integrations.composer.schedule import (
    SaveInterval,
    Scheduler,
    batches_between,
    save_scheduler,
)

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `CompressedCheckpoint`; see there."""

    run: RunSettings
    due: Scheduler
    planned: Scheduler
    """As `due`, without the save at the end of training."""
    interval: SaveInterval
    """As given."""
    every_batches: int | None
    """Batches between two saves; None where saves are not due by batches."""

    @classmethod
    def build(cls, *, save_interval: SaveInterval, save_last: bool, **more: Any) -> "Settings":
        """Check and divide the callback's arguments.

        Raises:
            ConfigError: one of them has a value that cannot work.
        """
        return cls(
            run=RunSettings.build(save_last=save_last, **more),
            due=save_scheduler(save_interval, at_end=save_last),
            planned=save_scheduler(save_interval, at_end=False),
            interval=save_interval,
            every_batches=batches_between(save_interval),
        )
