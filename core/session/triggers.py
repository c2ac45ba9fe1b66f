"""Decides when a checkpoint is due: framework-independent, and robust against counters that jump."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from shrinkpoint.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The save interval; the three kinds exclude each other, and without any a save is due after every epoch."""

    every_n_train_steps: int | None = None
    """Optimizer steps between checkpoints."""
    every_n_epochs: int | None = None
    train_time_interval: timedelta | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(sorted(given))} exclude each other: give one of them")
        for name, value in given.items():
            if name == "train_time_interval":
                positive = isinstance(value, timedelta) and value > timedelta(0)
                kind = "a positive timedelta, such as timedelta(minutes=10)"
            else:
                positive, kind = type(value) is int and value >= 1, "an integer of at least 1"
            if not positive:
                raise ConfigError(f"{name}={value!r} must be {kind}, or None")
        if not given:
            object.__setattr__(self, "every_n_epochs", 1)

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> "Schedule":
        """Of a callback's options, which have these fields no more afterwards."""
        return cls(**{item.name: options.pop(item.name) for item in fields(cls)})

    def saves(self, *, steps: int, epochs: int) -> int | None:
        """Return the number of saves that this plans; None where it does not follow from a trainer's limits, of which
        0 or less is none.

        Raises:
            ConfigError: a clock decides.
        """
        if self.train_time_interval is not None:
            raise ConfigError(
                "adopt=True with train_time_interval: a clock would decide which states are adopted; give every_n_train_steps or"
                " every_n_epochs"
            )
        if self.every_n_train_steps is not None:
            return None if steps <= 0 else max(1, steps // self.every_n_train_steps)
        return None if epochs <= 0 else max(1, epochs // (self.every_n_epochs or 1))


class Trigger:
    """Follows a run's counters and determines when a checkpoint is due.

    A checkpoint that is due stays due until `saved`: the moment at which the counter crosses a multiple is often not
    one at which a run can be saved exactly. Multiples are crossed, not hit: with several optimizers, or after a
    resume, a counter may step over them.
    """

    def __init__(self, schedule: Schedule, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is due before `start`; the clock gives seconds, and never goes back."""
        self._schedule = schedule
        self._clock = clock
        self._step = 0
        self._epochs = 0
        self._saved_at = clock()
        self.due = False
        """Whether a checkpoint is to be saved at the next moment at which the run can be continued exactly."""
        self.planned = False
        """Whether it is due by the schedule, and not only because it was requested."""

    def start(self, *, step: int, epochs: int) -> None:
        """Start counting: training starts or continues with these counters."""
        self._step, self._epochs, self._saved_at = step, epochs, self._clock()
        self.due = self.planned = False

    def after_step(self, step: int, *, agree: Callable[[bool], bool] = bool) -> None:
        """Note that an optimizer step has been made; `agree` makes all processes take the same decision where clocks decide."""
        self._plan(_crossed(self._step, step, self._schedule.every_n_train_steps))
        self._step = step
        interval = self._schedule.train_time_interval
        if interval is not None and not self.due:
            self._plan(agree(self._clock() - self._saved_at >= interval.total_seconds()))

    def after_epoch(self, epochs: int) -> None:
        """Note that an epoch's last step has been made."""
        self._plan(_crossed(self._epochs, epochs, self._schedule.every_n_epochs))
        self._epochs = epochs

    def after_validation(self, epochs: int) -> None:
        """Note that a validation within an epoch is over; `epochs` will be done when this one is."""
        every = self._schedule.every_n_epochs
        self.due |= every is not None and epochs % every == 0

    def _plan(self, due: bool) -> None:
        self.due |= due
        self.planned |= due

    def steps_until_due(self, step: int) -> int | None:
        """Return how many steps after `step` the next checkpoint is due; None where the schedule does not count steps."""
        every = self._schedule.every_n_train_steps
        return None if every is None else every - step % every

    def request(self) -> None:
        """Make a checkpoint due now, independently of the schedule."""
        self.due = True

    def saved(self) -> None:
        """Note that the due checkpoint has been taken, or skipped."""
        self.due = self.planned = False
        self._saved_at = self._clock()


def _crossed(before: int, now: int, every: int | None) -> bool:
    return every is not None and now // every > before // every
