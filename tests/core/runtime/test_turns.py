import threading

import pytest

from shrinkpoint.errors import ConfigError
from shrinkpoint.runtime.turns import Turns


def test_a_call_within_another_one_is_refused_by_name():
    turns = Turns()
    with (
        turns.turn("save"),
        pytest.raises(ConfigError, match="step was called within save, by a function"),
        turns.turn("step"),
    ):
        pass
    with turns.turn("step") as came:  # nothing is left of either
        assert came


def test_an_error_inside_leaves_the_turn_to_others():
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.turn("save"):
        raise ZeroDivisionError
    with turns.turn("save") as came:
        assert came


@pytest.mark.timeout(60)
def test_another_thread_waits_as_long_as_it_wants_to():
    turns, came, inside = Turns(), [], threading.Event()

    def other():
        with turns.turn("close", 0.05) as first:
            came.append(first)
        inside.set()
        with turns.turn("save") as second:
            came.append(second)

    with turns.turn("save"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(30)
        assert came == [False]
    thread.join()
    assert came == [False, True]
