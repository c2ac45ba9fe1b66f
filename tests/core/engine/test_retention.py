import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.engine.retention import Record, RetentionPolicy, keep_every, keep_last
from shrinkpoint.errors import ConfigError


def saves(*steps: int, metrics: tuple[float | None, ...] = ()) -> list[Record]:
    padded = [*metrics, *[None] * len(steps)]
    return [Record(seq=seq, step=step, metric=padded[seq]) for seq, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("policy", "records", "kept"),
    [
        (RetentionPolicy(), saves(1, 2, 3), {0, 1, 2}),
        (RetentionPolicy(keep_last=2), saves(1, 2, 3), {1, 2}),
        (RetentionPolicy(keep_last=9), saves(1, 2, 3), {0, 1, 2}),
        (RetentionPolicy(keep_last=1), [], set()),
        # the first of each window, although no save falls on its beginning
        (RetentionPolicy(keep_every=100), saves(30, 90, 120, 190, 210), {0, 2, 4}),
        (RetentionPolicy(keep_every=100), saves(0, 50, 100, 150, 200), {0, 2, 4}),
        # step 20 was saved twice, after a resume: the newer one counts
        (RetentionPolicy(keep_every=20), saves(0, 10, 20, 30, 20, 30, 40), {0, 4, 6}),
        (RetentionPolicy(keep_best=1), saves(1, 2, 3, metrics=(1.0, 0.5, 2.0)), {1, 2}),
        (RetentionPolicy(keep_best=1, mode="max"), saves(1, 2, 3, metrics=(3.0, 0.5, 2.0)), {0, 2}),
        (
            RetentionPolicy(keep_best=1),
            saves(1, 2, 3, metrics=(0.5, 0.5, 1.0)),
            {0, 2},
        ),  # of equals, the older
        # step 10 was saved again after a resume, with the same metric
        (RetentionPolicy(keep_best=1), saves(10, 20, 10, 30, metrics=(0.5, 0.5, 0.5, 1.0)), {2, 3}),
        (RetentionPolicy(keep_total=2), saves(1, 2, 3, metrics=(0.5, 1.0, 2.0)), {0, 2}),
        (RetentionPolicy(keep_total=2), saves(1, 2, 3, metrics=(2.0, 0.5, 1.0)), {1, 2}),
        (RetentionPolicy(keep_total=1), saves(1, 2, 3, metrics=(2.0, 0.5, 1.0)), {1, 2}),
        (RetentionPolicy(keep_total=1), saves(1, 2, 3, metrics=(2.0, 1.0, 0.5)), {2}),
        (RetentionPolicy(keep_total=2), saves(1, 2, 3), {1, 2}),
        (RetentionPolicy(keep_best=1), saves(1, 2, 3, metrics=(math.nan, None, math.inf)), {2}),
        (RetentionPolicy(keep_best=1), saves(1, 2, 3, metrics=(None, None, None)), {0, 1, 2}),
        (RetentionPolicy(keep_last=1, keep_best=1), saves(1, 2, 3, metrics=(None, 5.0, None)), {1, 2}),
        (
            RetentionPolicy(keep_last=1, keep_every=20, keep_best=1),
            saves(0, 10, 20, 30, 40, 50, metrics=(9, 8, 7, 1, 7, 7)),
            {0, 2, 3, 4, 5},
        ),
    ],
)
def test_steps_in_steps_kept(policy: RetentionPolicy, records: list[Record], kept: set[int]) -> None:
    assert policy.select(records) == kept
    assert policy.select(reversed(records)) == kept


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (RetentionPolicy(keep_last=1), {2, 5}),
        (RetentionPolicy(keep_last=2), {1, 2, 4, 5}),
        (RetentionPolicy(keep_every=1000), {0, 2, 5}),
        (
            RetentionPolicy(keep_best=1),
            {0, 2, 5},
        ),  # their metric may be one of before: of equals, a finite one
    ],
)
def test_what_is_not_finite_displaces_nothing_that_is(policy: RetentionPolicy, kept: set[int]) -> None:
    metrics = (1.0, 2.0, 2.0, 1.0, 1.0, 1.0)
    records = [Record(seq=seq, step=seq, metric=metric, finite=seq < 3) for seq, metric in enumerate(metrics)]
    assert policy.select(records) == kept


def test_where_nothing_is_finite_the_rules_are_the_same() -> None:
    records = [Record(seq=seq, step=seq, metric=float(seq), finite=False) for seq in range(5)]
    assert RetentionPolicy(keep_last=2, keep_best=1).select(records) == {0, 3, 4}


def test_newest_is_by_epoch_then_number() -> None:
    records = [Record(seq=5, step=9, epoch=1), Record(seq=4, step=3, epoch=2)]
    assert RetentionPolicy(keep_last=1).select(records) == {4}


def test_pins_add() -> None:
    assert RetentionPolicy(keep_last=1).select(saves(1, 2, 3), pinned=[0]) == {0, 2}


@pytest.mark.parametrize(
    "changes",
    [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": True}, {"keep_last": 1.5}, {"mode": "best"}],
)
def test_values_that_cannot_work(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        RetentionPolicy(**changes)


record_lists = st.lists(
    st.builds(
        Record,
        seq=st.integers(0, 99),
        step=st.integers(0, 200),
        epoch=st.integers(1, 3),
        metric=st.none() | st.floats(),
        finite=st.booleans(),
    ),
    unique_by=lambda record: record.seq,
)
policies = st.builds(
    RetentionPolicy,
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 50),
    keep_best=st.none() | st.integers(1, 5),
    mode=st.sampled_from(["min", "max"]),
)


@given(record_lists, policies)
def test_laws(records: list[Record], policy: RetentionPolicy) -> None:
    kept = policy.select(records)
    assert kept <= {record.seq for record in records}
    if records:
        assert max(records, key=lambda record: (record.epoch, record.seq)).seq in kept


@given(record_lists, policies)
def test_what_remains_is_kept_by_the_next_selection(records: list[Record], policy: RetentionPolicy) -> None:
    kept = policy.select(records)
    assert policy.select([record for record in records if record.seq in kept]) == kept


@given(record_lists, st.integers(1, 9))
def test_keep_last_counts(records: list[Record], count: int) -> None:
    assert len(keep_last(records, count)) == min(count, len(records))


@given(record_lists, st.integers(1, 50))
def test_keep_every_keeps_one_of_each_window(records: list[Record], steps: int) -> None:
    kept = keep_every(records, steps)
    windows = [record.step // steps for record in records if record.seq in kept]
    assert sorted(windows) == sorted({record.step // steps for record in records})
