"""Composer's save intervals, as strings, numbers, times and functions."""

from typing import Any

import pytest

pytest.importorskip("composer")

from composer.core import Event, Time, Timestamp

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.composer.schedule import batches_between, save_scheduler, saves_until


class Clock:
    """As much of a State as an interval looks at."""

    max_duration = Time.from_timestring("2ep")
    dataloader_len = Time(8, "ba")

    def __init__(self) -> None:
        self.previous_timestamp: Timestamp | None = None
        self.timestamp = Timestamp()

    def get_elapsed_duration(self) -> Any:
        return self.timestamp.get(self.max_duration.unit) / self.max_duration

    def saves(self, interval: Any, *, at_end: bool = False) -> list[int]:
        """The batches, counted from 1, after which a checkpoint is due in two epochs of eight batches."""
        due, saved = save_scheduler(interval, at_end=at_end), []
        for _ in range(2):
            for _ in range(8):
                self._to(self.timestamp.to_next_batch(samples=4, tokens=1_000_000))
                if due(self, Event.BATCH_CHECKPOINT):  # type: ignore[arg-type]
                    saved.append(int(self.timestamp.batch))
            self._to(self.timestamp.to_next_epoch())
            if due(self, Event.EPOCH_CHECKPOINT):  # type: ignore[arg-type]
                saved.append(int(self.timestamp.batch))
        return saved

    def _to(self, timestamp: Timestamp) -> None:
        self.previous_timestamp, self.timestamp = self.timestamp, timestamp


@pytest.mark.parametrize(
    ("interval", "saves"),
    [
        ("5ba", [5, 10, 15]),
        ("1ep", [8, 16]),
        (2, [16]),
        (Time(6, "ba"), [6, 12]),
        ("24sp", [6, 12]),
        ("4000000tok", [4, 8, 12, 16]),
        ("4M tok", [4, 8, 12, 16]),
        ("0.004B tok", [4, 8, 12, 16]),
        ("4_000k tok", [4, 8, 12, 16]),
        ("0.25dur", [4, 8, 12, 16]),
        (lambda state, event: event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 3, [3]),
    ],
)
def test_saves_when_composer_would(interval: Any, saves: list[int]) -> None:
    assert Clock().saves(interval) == saves


def test_the_last_batch_counts_where_it_is_asked_for() -> None:
    clock = Clock()
    clock.max_duration = Time.from_timestring("16ba")
    assert clock.saves("5ba", at_end=True) == [5, 10, 15, 16, 16]  # at the batch's end and at the epoch's


@pytest.mark.parametrize("interval", ["5 foo", "", "0ba", "-3ba", 0, True, None, 1.5, "1.5ba", "M tok"])
def test_anything_else_is_refused_with_its_value_and_the_way_out(interval: Any) -> None:
    with pytest.raises(ConfigError, match="save_interval=") as refused:
        save_scheduler(interval, at_end=False)
    assert repr(interval) in str(refused.value)


@pytest.mark.parametrize(
    ("interval", "batches"), [("50ba", 50), (Time(7, "ba"), 7), ("1ep", None), (2, None), (bool, None)]
)
def test_batches_between_saves_are_known_where_batches_count(interval: Any, batches: int | None) -> None:
    assert batches_between(interval) == batches


@pytest.mark.parametrize(
    ("interval", "end", "saves"),
    [
        ("5ba", "44ba", 8),
        ("50ba", "44ba", 1),
        ("1k ba", "2500ba", 2),
        (2, "7ep", 3),
        ("0.1dur", "44ba", 10),
        ("5ba", "2ep", None),
    ],
)
def test_saves_until_the_end(interval: Any, end: str, saves: int | None) -> None:
    assert saves_until(interval, Time.from_timestring(end)) == saves


def test_saves_that_a_function_or_a_clock_decides() -> None:
    assert saves_until(lambda state, event: True, Time.from_timestring("2ep")) is None
    assert saves_until("5ba", None) is None
    with pytest.raises(ConfigError, match="a clock would decide"):
        saves_until("60sec", Time.from_timestring("2ep"))
