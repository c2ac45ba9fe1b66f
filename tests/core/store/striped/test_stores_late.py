"""Stores that answer late: how long they are waited for, what becomes of a container without them, and of a restore."""

import os
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
from support.newest import newest_sound
from support.stores import Stores, take

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.store.striped.blobs import MIRROR_BELOW
from shrinkpoint.store.striped.calls import Calls, Health, Patience
from shrinkpoint.store.striped.shards import Geometry

BIG = os.urandom(3 * MIRROR_BELOW + 11)
KEY = "data/000000000001-0123456789abcdef-0123456789abcdef.shrink"


@pytest.fixture(autouse=True)
def _told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        yield


def asked(
    patience: Patience, others_s: float, late: threading.Event | float, enough: int = 2, known: bool = True
) -> tuple[set[int], float, Health]:
    """Who of three has answered, after how many seconds, and what is thought of them; the last one is late."""
    health = Health(["a", "b", "c"])
    if known:
        health.answered(2)

    def work(store: int) -> None:
        if store < 2:
            time.sleep(others_s)
        elif isinstance(late, float):
            time.sleep(late)
        else:
            late.wait(60)

    began = time.monotonic()
    answers = Calls(health, patience).ask(range(3), work, enough=enough)
    return set(answers.of), time.monotonic() - began, health


def test_one_that_hangs_is_left_out_after_the_floor() -> None:
    release = threading.Event()
    there, seconds, health = asked(
        Patience(late_floor_s=0.2, late_factor=0.0, limit_s=50.0), others_s=0.0, late=release
    )
    release.set()
    assert there == {0, 1}
    assert 0.2 <= seconds < 50
    assert health.failing == [2]
    assert "has not answered for" in str(health.why(2))


def test_where_the_others_take_long_it_has_so_many_times_as_long() -> None:
    release = threading.Event()
    there, seconds, _ = asked(
        Patience(late_floor_s=0.0, late_factor=4.0, limit_s=50.0), others_s=0.1, late=release
    )
    release.set()
    assert there == {0, 1}
    assert 4 * 0.1 <= seconds < 50


@pytest.mark.parametrize(
    "patience",
    [Patience(late_floor_s=40.0, late_factor=0.0), Patience(late_floor_s=0.0, late_factor=100.0)],
)
def test_within_either_it_counts(patience: Patience) -> None:
    there, _, health = asked(patience, others_s=0.1, late=0.3)
    assert there == {0, 1, 2}
    assert health.failing == []


def test_the_first_answer_may_take_as_long_as_it_takes_to_connect() -> None:
    patience = Patience(late_floor_s=0.0, late_factor=0.0, alone_s=40.0)
    there, _, health = asked(patience, others_s=0.0, late=0.3, known=False)
    assert there == {0, 1, 2}
    assert health.failing == []
    there, _, health = asked(patience, others_s=0.0, late=0.3)
    assert there == {0, 1}
    assert health.failing == [2]


def test_nobody_is_late_as_long_as_too_few_have_answered() -> None:
    there, _, health = asked(Patience(late_floor_s=0.0, late_factor=0.0), others_s=0.0, late=0.3, enough=3)
    assert there == {0, 1, 2}
    assert health.failing == []


def test_the_limit_ends_all_waiting() -> None:
    release = threading.Event()
    there, seconds, _ = asked(Patience(limit_s=0.3), others_s=0.0, late=release, enough=3)
    release.set()
    assert there == {0, 1}
    assert seconds >= 0.3


def test_a_container_is_cut_anew_without_the_straggler() -> None:
    stores = Stores(4)
    objects = stores.objects()
    objects.put("probe/0123456789abcdef", b"")
    release = stores.each[1].hang(["put"])
    objects.put(KEY, BIG)
    others = [store for store in range(4) if store != 1]
    for store in others:  # 3+1 was begun, and 2+1 is whole without it
        assert Geometry(2, 1, len(BIG)) in {name.geometry for name in stores.shards(store)}
    assert stores.shards(1) == []
    assert objects.group.health.failing == [1]
    release.set()
    for lost in others:  # the redundancy is what it was
        stores.each[lost].lose()
        assert stores.objects().get(KEY, max_size=len(BIG)) == BIG
        stores.each[lost].heal()


@pytest.mark.parametrize("passing", [True, False])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_store_that_fails_in_the_middle_of_a_restore(victim: int, passing: bool) -> None:
    """At each operation in turn, for once or from then on: the restore is the same."""
    stores = Stores()
    writer = stores.run().writer()
    parent = None
    blobs = [os.urandom(3 * MIRROR_BELOW), os.urandom(100), os.urandom(2 * MIRROR_BELOW + 1)]
    for step, blob in enumerate(blobs, 1):
        kind = "base" if parent is None else "delta"
        parent = writer.commit(blob, step=step, kind=kind, parent=parent, state_digest="", meta={})
    each = stores.each[victim]
    for at in range(60):
        each.calls.clear()
        each.fail_at(at)
        if passing:
            fail = each.before
            times = iter(range(at + 1))
            each.before = lambda operation, key, fail=fail, times=times: (
                fail(operation, key) if next(times, None) is not None else None
            )
        found = newest_sound(stores.run(), take)
        each.heal()
        assert found is not None
        assert (found[0].step, found[1]) == (3, blobs)
        if len(each.calls) <= at:
            return
    raise AssertionError("a restore takes fewer operations")
