"""Calls of several threads one after another, with signals at any place."""

import random
import signal
import threading
import time

import pytest

from shrinkpoint.errors import ConfigError
from shrinkpoint.runtime.threads import Turns


def test_a_call_within_another_one_is_refused_by_name():
    turns, said = Turns(), []

    def nested():
        for call in (
            lambda: turns.take("step", lambda: 0),
            lambda: turns.take_within(9, "step", lambda: 0),
            lambda: turns.refuse("step"),
        ):
            with pytest.raises(ConfigError, match="step was called within save, by a function") as error:
                call()
            said.append(error)

    turns.take("save", nested)
    assert len(said) == 3
    assert turns.take("step", lambda: 7) == 7  # nothing is left of either


def test_an_error_inside_leaves_the_turn_to_others():
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        turns.take("save", lambda: 1 / 0)
    came = []
    thread = threading.Thread(target=lambda: came.append(turns.take("save", lambda: 1)))
    thread.start()
    thread.join(30)
    assert came == [1]


@pytest.mark.timeout(60)
def test_another_thread_waits_as_long_as_it_wants_to():
    turns, came, inside = Turns(), [], threading.Event()

    def other():
        came.append(turns.take_within(0.05, "close", lambda: True))
        inside.set()
        came.append(turns.take("save", lambda: True))
        came.append(turns.take_within(float("inf"), "close", lambda: True))

    def first():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(30)
        assert came == [None]
        return thread

    turns.take("step", first).join(30)
    assert came == [None, True, True]


class Interrupted(BaseException):
    pass


@pytest.fixture
def at_random():
    """Calls a handler at random moments of what is done again and again, for some seconds."""

    def run(handler, work, seconds):
        before = signal.signal(signal.SIGALRM, lambda *_: handler())
        generator, end, count, interrupts = random.Random(5), time.monotonic() + seconds, 0, 0
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, 6e-5))
                for _ in range(30):
                    work()
                    count += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupts += 1
        signal.signal(signal.SIGALRM, before)
        return count, interrupts

    return run


@pytest.mark.timeout(60)
def test_a_handler_that_calls_is_refused_or_served_and_never_waits_for_itself(at_random):
    turns, found = Turns(), {"served": 0, "refused": 0}

    def handler():
        try:
            turns.take("save", lambda: None)
            found["served"] += 1
        except ConfigError:
            found["refused"] += 1

    count, _ = at_random(handler, lambda: turns.take("step", lambda: None), 3)
    assert count > 100
    assert min(found.values()) > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_an_interrupt_at_any_place_leaves_the_turn_to_all(at_random, timeout_s):
    """As Ctrl-C is: the thread itself can go on at once, while the error is handled, too; and so can others."""
    turns = Turns()

    def handler():
        raise Interrupted

    def work():
        try:
            if timeout_s is None:
                turns.take("step", lambda: None)
            else:
                turns.take_within(timeout_s, "step", lambda: None)
        except Interrupted:
            assert turns.take("save", lambda: 1) == 1
            assert turns.take_within(5, "save", lambda: 1) == 1
            raise

    _, interrupts = at_random(handler, work, 3)
    assert interrupts > 100
    came = []
    thread = threading.Thread(target=lambda: came.append(turns.take_within(5, "save", lambda: 1)))
    thread.start()
    thread.join(30)
    assert came == [1]
