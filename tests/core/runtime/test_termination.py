"""A SIGTERM or Ctrl-C is kept for a good moment, and nothing of the previous handler is lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shrinkpoint.runtime.termination import Pace, TerminationRequest


@pytest.fixture(autouse=True)
def _handler_of_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_noted_and_the_process_goes_on() -> None:
    request = TerminationRequest()
    request.watch()
    signal.raise_signal(signal.SIGTERM)
    assert request.received


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_second_signal_ends_the_process_at_once() -> None:
    clock = Clock()
    request = TerminationRequest(clock=clock)
    request.watch()
    signal.raise_signal(signal.SIGTERM)
    clock.now = 1.5
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_launcher_that_repeats_a_ctrl_c_as_sigterm_means_the_same() -> None:
    request = TerminationRequest(clock=Clock())
    request.watch()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        request.end()


def test_a_ctrl_c_is_noted_told_and_ends_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    request = TerminationRequest()
    request.watch()
    signal.raise_signal(signal.SIGINT)
    assert request.received
    assert "SIGINT: the run is saved after this step" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        request.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    request.watch()
    assert not request.received


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after nohup
    request = TerminationRequest()
    request.watch()
    signal.raise_signal(signal.SIGINT)
    assert not request.received
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_end_is_the_one_that_was_arranged_before() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    request = TerminationRequest()
    request.watch()
    signal.raise_signal(signal.SIGTERM)
    assert seen == []
    with pytest.raises(SystemExit):
        request.end()
    assert seen == [signal.SIGTERM]


def test_the_signal_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = TerminationRequest()
    request.watch()
    request.watch()
    request.unwatch()
    request.unwatch()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_came_later_stays() -> None:
    request = TerminationRequest()
    request.watch()

    def later(number: int, frame: Any) -> None: ...

    signal.signal(signal.SIGTERM, later)
    request.unwatch()
    assert signal.getsignal(signal.SIGTERM) is later


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_that_a_later_request_puts_back_notes_nothing_any_more(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    first, second = TerminationRequest(), TerminationRequest()
    first.watch()
    second.watch()
    first.unwatch()
    second.unwatch()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        signal.raise_signal(number)
    assert not first.received
    signal.signal(number, before)


def test_a_handler_left_behind_calls_the_one_from_before() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    first, second = TerminationRequest(), TerminationRequest()
    first.watch()
    second.watch()
    first.unwatch()
    second.unwatch()
    signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM]


def test_outside_the_main_thread_nothing_is_taken_over() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = TerminationRequest()
    thread = threading.Thread(target=request.watch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def _status_of_fork(number: int, times: int) -> int:
    """How a forked process ends that gets a signal; 0 if it does not end of it."""
    pid = os.fork()
    if pid == 0:
        try:
            for _ in range(times):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_process_ends_of_a_sigterm_as_ever() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = TerminationRequest()
    request.watch()
    assert _status_of_fork(signal.SIGTERM, 1) == -signal.SIGTERM
    assert not request.received


_FORKS = """
import os, signal, sys, time
from shrinkpoint.runtime.termination import TerminationRequest

number = int(sys.argv[1])
request = TerminationRequest()
request.watch()
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
lost = 0
for _ in range(40):
    pid = os.fork()
    if pid == 0:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not (number == signal.SIGINT and request.received):
            time.sleep(0.001)
        os._exit(7 if request.received else 1)
    os.kill(pid, number)
    lost += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != (7 if number == signal.SIGINT else -number)
    if lost == 3:
        break
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
assert not request.received
print(lost)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_signal_is_lost_at_the_moment_of_a_fork(number: signal.Signals) -> None:
    """Most of these new processes get it before they have run any Python code, and Python forgets such signals.

    A SIGTERM ends them; a Ctrl-C is noted, since their parent may still need them.
    """
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(int(number))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_forked_process_leaves_the_first_ctrl_c_to_its_parent() -> None:
    ticks = iter(range(0, 100, 2))
    request = TerminationRequest(clock=lambda: next(ticks))
    request.watch()
    assert _status_of_fork(signal.SIGINT, 1) == 0
    assert _status_of_fork(signal.SIGINT, 2) == 7


def test_a_signal_that_nobody_will_answer_ends_the_process_at_once() -> None:
    request = TerminationRequest(answered=lambda: False)
    request.watch()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_visit_is_expected_for_a_minute_or_ten_times_the_longest_way() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert not pace.expected()
    with pace.visit(first=True):
        clock.now = 1000
        assert pace.expected()  # however long it takes
    clock.now += 59
    assert pace.expected()
    clock.now += 2
    assert not pace.expected()
    with pace.visit():  # 61 seconds after the one before
        pass
    clock.now += 600
    assert pace.expected()
    clock.now += 11
    assert not pace.expected()


def test_a_handler_that_waits_for_other_processes_is_not_called() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    request = TerminationRequest([signal.SIGTERM], replaces=True)
    request.watch()
    signal.raise_signal(signal.SIGTERM)
    assert request.number == signal.SIGTERM
    with pytest.raises(SystemExit):
        request.end()
    assert calls == []


def test_a_process_ends_by_the_signal_that_another_one_received() -> None:
    request = TerminationRequest()
    request.watch()
    assert request.number is None
    with pytest.raises(SystemExit) as ended:
        request.end(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
