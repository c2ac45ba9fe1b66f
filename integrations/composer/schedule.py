"""The options of Composer's callback, and its save schedule: Composer's own intervals, with a more liberal syntax."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from composer.core import Event, State, Time, TimeUnit
from composer.utils import create_interval_scheduler

from shrinkpoint.errors import ConfigError
from shrinkpoint.session.settings import RunSettings

Scheduler: TypeAlias = Callable[[State, Event], bool]
"""Whether a checkpoint is due at one of Composer's checkpoint events."""

SaveInterval: TypeAlias = str | int | Time | Scheduler
"""``"1ep"``, ``"1000ba"``, ``"10M tok"``, ``"0.1dur"``; a number of epochs; a ``Time``; or a `Scheduler`."""

_THOUSANDS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
# A multiplier in front of a unit; scientific notation and underscores are Composer's and Python's own.
_WITH_MULTIPLIER = re.compile(r"([0-9][0-9_.]*)\s*([kKMBGT])\s*([a-z]+)")


def _time(interval: SaveInterval) -> Time | None:
    """None where a function decides."""
    if callable(interval) and not isinstance(interval, Time):
        return None
    return Time.from_input(_without_multiplier(interval) if isinstance(interval, str) else interval, "ep")


def batches_between(interval: SaveInterval) -> int | None:
    """Number of batches between two saves; None where the interval does not count batches."""
    time = _time(interval)
    return int(time) if time is not None and time.unit == TimeUnit.BATCH else None


def saves_until(interval: SaveInterval, end: Time | None) -> int | None:
    """Return the number of saves until the end of training; None where the two have different units, or a function decides.

    Raises:
        ConfigError: a clock decides.
    """
    every = _time(interval)
    if every is None:
        return None
    if every.unit == TimeUnit.SECOND:
        raise ConfigError(
            f"adopt=True with save_interval={interval!r}: a clock would decide which states are adopted; give batches, samples,"
            " tokens or epochs"
        )
    if every.unit == TimeUnit.DURATION:
        return max(1, int(1 / every.value))
    return None if end is None or end.unit != every.unit else max(1, int(end.value) // int(every.value))


def save_scheduler(interval: SaveInterval, *, at_end: bool) -> Scheduler:
    """Turn the option ``save_interval`` into a predicate of checkpoint events, and of the last batch with `at_end`.

    Raises:
        ConfigError: Composer cannot read it.
    """
    if callable(interval) and not isinstance(interval, Time):
        return interval
    text: Any = _without_multiplier(interval) if isinstance(interval, str) else interval
    try:
        if isinstance(text, bool):
            raise TypeError("a bool is not an interval")
        scheduler: Scheduler = create_interval_scheduler(text, include_end_of_training=at_end)
        positive = Time.from_input(text, "ep").value > 0
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"save_interval={interval!r} cannot be read ({error}): give a time string as '1ep', '1000ba' or '10M tok', a"
            " number of epochs, a Time, or a function of (state, event)"
        ) from error
    if not positive:
        raise ConfigError(f"save_interval={interval!r} must be greater than 0")
    return scheduler


def _without_multiplier(text: str) -> str:
    """``"10M tok"`` as ``"10000000tok"``; everything else unchanged, without the blanks."""
    bare = text.strip().replace(" ", "")
    match = _WITH_MULTIPLIER.fullmatch(bare)
    if match is None:
        return bare
    number, multiplier, unit = match.groups()
    value = float(number) * _THOUSANDS[multiplier]
    return f"{value:.0f}{unit}" if value.is_integer() else bare


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
    def build(cls, *, save_interval: SaveInterval, **more: Any) -> "Settings":
        """Check and divide the callback's arguments."""
        return cls(
            run=RunSettings.build(**more),
            due=save_scheduler(save_interval, at_end=True),
            planned=save_scheduler(save_interval, at_end=False),
            interval=save_interval,
            every_batches=batches_between(save_interval),
        )
