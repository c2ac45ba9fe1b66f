"""How many saves a schedule plans, which max_degradation is divided among."""

from datetime import timedelta

import pytest

from shrinkpoint.errors import ConfigError
from shrinkpoint.session.triggers import Schedule


@pytest.mark.parametrize(
    ("schedule", "steps", "epochs", "planned"),
    [
        (Schedule(every_n_train_steps=5), 44, -1, 8),
        (Schedule(every_n_train_steps=5), 45, -1, 9),
        (Schedule(every_n_train_steps=50), 44, -1, 1),
        (Schedule(every_n_train_steps=5), -1, 3, None),
        (Schedule(every_n_epochs=2), -1, 7, 3),
        (Schedule(every_n_epochs=2), 100, -1, None),
        (Schedule(), 100, 4, 4),
    ],
)
def test_saves_follow_from_the_trainers_limits(
    schedule: Schedule, steps: int, epochs: int, planned: int | None
) -> None:
    assert schedule.saves(steps=steps, epochs=epochs) == planned


def test_a_clock_is_refused() -> None:
    with pytest.raises(ConfigError, match="a clock would decide"):
        Schedule(train_time_interval=timedelta(minutes=1)).saves(steps=10, epochs=1)
