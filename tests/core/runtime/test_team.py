"""Threads that share work: all of it is done once, in order, and large pieces are shared where no whole one is left."""

import itertools
import threading

import pytest
from support.teams import in_team

from shrinkpoint.runtime.threads import map_in_order, map_in_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(threads: int) -> None:
    sizes = [3, 1, 2, 5, 4]
    assert list(map_in_order(lambda item: item * 10, sizes, threads, lambda item: item)) == [
        30,
        10,
        20,
        50,
        40,
    ]
    assert in_team(threads, lambda: map_in_threads(lambda item: item + 1, range(9))) == list(range(1, 10))
    assert (
        list(map_in_order(lambda item: item, [], threads))
        == in_team(threads, lambda: map_in_threads(str, []))
        == []
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_parts_are_all_done(threads: int) -> None:
    def whole(item: int) -> list[list[int]]:
        return map_in_threads(lambda part: map_in_threads(lambda n: item * part * n, range(4)), range(3))

    expected = [[[item * part * n for n in range(4)] for part in range(3)] for item in range(20)]
    assert list(map_in_order(whole, range(20), threads)) == expected


def test_a_thread_without_work_takes_parts_of_another_s() -> None:
    both = threading.Barrier(2)
    (names,) = map_in_order(
        lambda _: map_in_threads(lambda _: (both.wait(60), threading.current_thread().name)[1], range(2)),
        ["one"],
        2,
    )
    assert len(set(names)) == 2


def test_whoever_is_alone_does_all_parts() -> None:
    told: list[str] = []
    held, free = threading.Event(), threading.Event()

    def whole(item: str) -> None:
        if item == "held":
            held.set()
            assert free.wait(60)
        else:
            assert held.wait(60)
            map_in_threads(lambda part: told.append(f"{item} {part}"), range(3))
            free.set()

    list(map_in_order(whole, ["held", "alone"], 2))
    assert sorted(told) == ["alone 0", "alone 1", "alone 2"]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_arrives_where_the_work_came_from(threads: int) -> None:
    def part(number: int) -> None:
        if number == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_team(threads, lambda: map_in_threads(part, range(5)))
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda item: map_in_threads(part, range(item)), [1, 2, 3, 1], threads))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_threads_that_have_begun_do_not_wait_for_one_that_cannot(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    start, asked, failed = threading.Thread.start, itertools.count(1), threading.Event()

    def start_two(thread: threading.Thread) -> None:
        if next(asked) == 3:
            failed.set()
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(error):
        list(map_in_order(lambda _: failed.wait(60), range(4), 4))
