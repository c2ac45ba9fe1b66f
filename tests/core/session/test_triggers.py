"""When a checkpoint is due."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import ConfigError
from shrinkpoint.session.triggers import Schedule, Trigger


@given(every=st.integers(1, 50), start=st.integers(0, 500), jumps=st.lists(st.integers(1, 30), max_size=40))
def test_every_crossed_multiple_is_due_once(every: int, start: int, jumps: list[int]) -> None:
    trigger = Trigger(Schedule(every_n_train_steps=every))
    trigger.start(step=start, epochs=0)
    step = start
    for jump in jumps:
        crossed = any(number % every == 0 for number in range(step + 1, step + jump + 1))
        step += jump
        trigger.after_step(step)
        assert trigger.due == crossed
        trigger.saved()


def test_stays_due_until_saved() -> None:
    trigger = Trigger(Schedule(every_n_train_steps=4))
    trigger.start(step=0, epochs=0)
    for step in range(1, 7):
        trigger.after_step(step)
    assert trigger.due
    trigger.saved()
    trigger.after_step(7)
    assert not trigger.due


def test_epochs() -> None:
    trigger = Trigger(Schedule(every_n_epochs=2))
    trigger.start(step=0, epochs=1)
    trigger.after_step(100)
    assert not trigger.due
    trigger.after_epoch(2)
    assert trigger.due


def test_time_is_decided_together() -> None:
    now = [0.0]
    trigger = Trigger(Schedule(train_time_interval=timedelta(seconds=10)), clock=lambda: now[0])
    trigger.start(step=0, epochs=0)
    now[0] = 11.0
    trigger.after_step(1, agree=lambda mine: False)
    assert not trigger.due
    trigger.after_step(2)
    assert trigger.due
    trigger.saved()
    trigger.after_step(3)
    assert not trigger.due


def test_request() -> None:
    trigger = Trigger(Schedule(every_n_train_steps=100))
    trigger.request()
    assert trigger.due


def test_steps_until_due() -> None:
    trigger = Trigger(Schedule(every_n_train_steps=10))
    assert [trigger.steps_until_due(step) for step in (0, 1, 9, 10)] == [10, 9, 1, 10]
    assert Trigger(Schedule(every_n_epochs=1)).steps_until_due(3) is None


def test_without_a_schedule_every_epoch() -> None:
    assert Schedule() == Schedule(every_n_epochs=1)


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_train_steps": 0},
        {"every_n_train_steps": True},
        {"every_n_epochs": 1.5},
        {"train_time_interval": timedelta(0)},
        {"train_time_interval": 600},
        {"every_n_train_steps": timedelta(1)},
        {"every_n_epochs": 1, "every_n_train_steps": 1},
    ],
)
def test_impossible_schedules_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"every_n|train_time"):
        Schedule(**options)
