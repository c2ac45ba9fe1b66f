"""The commit point and the fence, step by step on a store whose every operation can be seen and failed."""

import itertools
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from support.fake_objects import FakeObjects
from support.stores import FakeSet, forget

from shrinkpoint.errors import ChainError, ConfigError, FencedError, NoCheckpointError, StoreError
from shrinkpoint.store.catalog import Catalog
from shrinkpoint.store.keys import commit_key
from shrinkpoint.store.manifest import Manifest, seal, unseal
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import COMMIT_LIMIT_S, RunWriter


@pytest.fixture(params=[FakeObjects, FakeSet], ids=["one", "several"])
def fake(request: pytest.FixtureRequest) -> FakeObjects | FakeSet:
    return request.param()


@pytest.fixture
def store(fake: FakeObjects | FakeSet) -> RunStore:
    return store_on(fake)


def store_on(fake: ObjectStore) -> RunStore:
    return RunStore("ignored", objects=fake, retry=RetryPolicy(attempts=3, first_delay_s=0))


def base(writer: RunWriter, step: int = 1, data: bytes = b"base") -> Manifest:
    return writer.commit(data, step=step, kind="base", parent=None, state_digest="d", meta={})


def delta(writer: RunWriter, parent: Manifest, step: int = 2, data: bytes = b"delta") -> Manifest:
    return writer.commit(data, step=step, kind="delta", parent=parent, state_digest="d", meta={})


def two_writers(store: RunStore) -> tuple[RunWriter, RunWriter]:
    """Opened at once, hence of one epoch; the one with the smaller nonce first."""
    first, second = store.writer(), store.writer()
    assert first.epoch == second.epoch
    return (first, second) if first.session < second.session else (second, first)


def test_blob_before_manifest_and_nothing_else(store: RunStore, fake: FakeObjects | FakeSet) -> None:
    writer = store.writer()
    fake.calls.clear()
    first = base(writer)
    writes = [call for call in fake.calls if call[0].startswith("put")]
    assert writes == [
        ("put", first.chain[0].key),
        ("put_if_absent", "commits/0000000000.json"),
        ("put_if_absent", "committed.json"),
    ]
    assert ("list", "commits/") in fake.calls  # before the first save alone
    fake.calls.clear()
    second = delta(writer, first)
    assert fake.calls == [
        ("list", "data/"),
        ("put", second.chain[1].key),
        ("put_if_absent", "commits/0000000001.json"),
    ]
    assert second.parent_digest == first.digest
    assert second.chain == (*first.chain, second.chain[1])
    assert writer.last == second


def test_failure_at_every_operation_of_a_commit(store: RunStore, fake: FakeObjects | FakeSet) -> None:
    """Either the commit is acknowledged, or the run is as before; and the writer can go on."""
    writer = store.writer()
    first = base(writer)
    for call in itertools.count():
        fake.fail_at(call)
        try:
            committed = delta(writer, first)
        except StoreError:
            fake.heal()
            found = store.manifests()
            assert found[-1] == first
            assert all(store.fetch(manifest) for manifest in found)
            # One store has it or not; of several, some may hold what was not acknowledged.
            assert found == [first] or isinstance(fake, FakeSet)
            continue
        fake.heal()
        break
    assert call == 3 or (isinstance(fake, FakeSet) and call > 3)
    found = store.manifests()
    assert found[0] == committed
    assert found[-1] == first


def test_lost_response_of_the_manifest(store: RunStore, fake: FakeObjects | FakeSet) -> None:
    writer = store.writer()
    fake.lose_response_of = "commits/"
    manifest = base(writer)
    assert manifest.seq == 0
    assert store.manifests() == [manifest]


def test_lost_response_and_no_further_attempt(fake: FakeObjects | FakeSet) -> None:
    """The caller is told of a failure although the commit happened; the next one finds its number taken by itself."""
    store = RunStore("ignored", objects=fake, retry=RetryPolicy(attempts=1))
    writer = store.writer()
    fake.lose_response_of = "commits/"
    with pytest.raises(StoreError, match="lost"):
        base(writer, step=1)
    second = base(writer, step=2)
    assert [(m.seq, m.step) for m in store.manifests()] == [(1, 2), (0, 1)]
    assert store.fetch(second) == [b"base"]


def test_a_restarted_writer_fences_the_old_one(store: RunStore) -> None:
    old = store.writer()
    first = base(old)
    new = store.writer()
    assert (old.epoch, new.epoch) == (1, 2)
    second = delta(new, first)
    with pytest.raises(FencedError, match=r"epoch 2.*step 2"):
        delta(old, first)
    assert store.manifests() == [second, first]
    for attempt in (lambda: base(old), lambda: old.collect([]), lambda: old.pin("x", first)):
        with pytest.raises(FencedError):  # and stays fenced
            attempt()


def test_save_of_the_old_writer_before_the_first_of_the_new(store: RunStore) -> None:
    """It is acknowledged and kept, the new writer takes the next number, and the newest is the new writer's."""
    old = store.writer()
    first = base(old)
    new = store.writer()
    straggler = delta(old, first, step=5)
    taken_over = delta(new, first, step=2)
    assert (straggler.seq, taken_over.seq) == (1, 2)
    assert store.manifests() == [taken_over, straggler, first]
    with pytest.raises(FencedError):
        delta(old, straggler, step=6)


def test_higher_number_of_a_lower_epoch_is_not_newest(store: RunStore, fake: FakeObjects | FakeSet) -> None:
    old = store.writer()
    first = base(old)
    new = store.writer()
    newest = delta(new, first)
    stale = unseal(newest.to_bytes(), "m")
    stale.update(seq=9, epoch=1)
    fake.put("commits/0000000009.json", seal(stale))
    assert [m.seq for m in store.manifests()] == [1, 9, 0]
    assert store.writer()._next_seq == 10


@pytest.mark.parametrize("first", [0, 1])
def test_of_one_epoch_whoever_commits_first_wins(store: RunStore, first: int) -> None:
    """As where a process stood still before its first save, was given up, and wakes when the next one has saved."""
    writers = two_writers(store)
    winner, loser = writers[first], writers[1 - first]
    kept = [base(winner, step=step) for step in (1, 2)]
    for attempt in (lambda: base(loser, step=3), lambda: loser.collect([])):
        with pytest.raises(FencedError):
            attempt()
    kept.append(base(winner, step=4))
    assert store.manifests() == kept[::-1]


def test_of_one_epoch_and_both_at_once_the_smaller_nonce_wins(
    store: RunStore, fake: FakeObjects | FakeSet
) -> None:
    """Where the store hides the other's first manifest until both are there."""
    winner, loser = two_writers(store)
    for writer in (winner, loser):
        writer._has_committed = True
    base(loser, step=1)
    kept = base(winner, step=2)
    assert kept.seq == 1
    with pytest.raises(FencedError):
        base(loser, step=3)
    assert store.manifests()[0] == kept


@pytest.mark.parametrize("kind", [FakeObjects, FakeSet], ids=["one", "several"])
@pytest.mark.parametrize("schedule", sorted(set(itertools.permutations("AABBB"))))
def test_every_interleaving_of_two_writers(
    schedule: tuple[str, ...], kind: type[FakeObjects | FakeSet]
) -> None:
    """What was acknowledged stays restorable, and the newest is never older than the winner's last acknowledgement."""
    store = store_on(kind())
    first = base(store.writer(), step=0)
    writers = {"A": store.writer(), "B": store.writer()}
    acknowledged: list[Manifest] = [first]
    fenced: set[str] = set()
    for step, name in enumerate(schedule, start=1):
        try:
            acknowledged.append(delta(writers[name], first, step=step))
        except FencedError:
            fenced.add(name)
    assert len(fenced) <= 1
    assert set(store.manifests()) == set(acknowledged)
    assert all(store.fetch(manifest) for manifest in acknowledged)
    survivors = [m for m in acknowledged if m.session not in {writers[name].session for name in fenced}]
    if fenced:
        assert store.manifests()[0] == survivors[-1]


def test_unreadable_manifest_keeps_its_number(store: RunStore, fake: FakeObjects | FakeSet) -> None:
    writer = store.writer()
    base(writer)
    fake.put("commits/0000000001.json", b"half a manif")
    assert base(writer).seq == 2
    reopened = store.writer()
    assert reopened.epoch == 3  # the unreadable one may have been of epoch 2
    assert base(reopened).seq == 3


def test_newer_version_in_the_slot_is_a_fence(store: RunStore, fake: FakeObjects | FakeSet) -> None:
    writer = store.writer()
    record = unseal(base(writer).to_bytes(), "m")
    fake.put("commits/0000000001.json", seal({**record, "seq": 1, "format": 99}))
    with pytest.raises(FencedError, match="newer shrinkpoint"):
        base(writer)


def test_far_behind_writer_catches_up_by_listing(store: RunStore, fake: FakeObjects | FakeSet) -> None:
    old = store.writer()
    base(old)
    new = store.writer()
    for step in range(40):
        base(old, step=step)
    fake.calls.clear()
    assert base(new, step=99).seq == 41
    assert sum(operation == "put_if_absent" for operation, _ in fake.calls) < 15


def test_parent_that_was_removed(store: RunStore) -> None:
    """A delta whose base may be collected any moment would be a checkpoint that cannot be restored."""
    old = store.writer()
    first = base(old)
    newest = base(old, step=2)
    new = store.writer()
    old.collect([newest.seq])
    with pytest.raises(ChainError, match="save a base"):
        delta(new, first)
    assert delta(new, newest, step=3).chain[0] == newest.chain[0]


def test_parent_is_asked_for_once_an_hour(fake: FakeObjects | FakeSet, store: RunStore) -> None:
    first = base(store.writer())
    now = [0.0]
    writer = RunWriter(fake, Catalog(fake), mode="conditional", clock=lambda: now[0])
    parent = delta(writer, first)
    fake.calls.clear()
    delta(writer, parent, step=3)
    assert [operation for operation, _ in fake.calls] == ["list", "put", "put_if_absent"]
    now[0] += COMMIT_LIMIT_S + 1
    fake.calls.clear()
    delta(writer, parent, step=4)
    assert fake.calls[:2] == [("list", "data/"), ("get", commit_key(parent.seq))]


def test_upload_that_took_too_long_is_not_committed(fake: FakeObjects | FakeSet, store: RunStore) -> None:
    store.writer()
    now = [0.0]
    writer = RunWriter(fake, Catalog(fake), mode="conditional", clock=lambda: now[0])

    def suspend(operation: str, key: str) -> None:
        if operation == "put":
            now[0] += COMMIT_LIMIT_S + 1

    fake.before = suspend
    with pytest.raises(StoreError, match="save again"):
        base(writer)
    assert store.manifests() == []


def test_commit_that_was_held_up_is_acknowledged_only_whole(
    fake: FakeObjects | FakeSet, store: RunStore
) -> None:
    store.writer()
    now = [0.0]
    writer = RunWriter(fake, Catalog(fake), mode="conditional", clock=lambda: now[0])

    def suspend(operation: str, key: str) -> None:
        if operation == "put_if_absent":
            now[0] += COMMIT_LIMIT_S + 1

    fake.before = suspend
    assert store.fetch(base(writer)) == [b"base"]

    def suspend_while_collected(operation: str, key: str) -> None:
        if operation == "put_if_absent":
            suspend(operation, key)
            forget(fake, "data/")

    fake.before = suspend_while_collected
    with pytest.raises(StoreError, match="delayed"):
        base(writer, step=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step=-1"),
        ({"step": 10**12}, "step="),
        ({"step": 1.0}, "step=1.0"),
        ({"kind": "full"}, "kind='full'"),
        ({"kind": "delta"}, "a delta has a parent"),
        ({"meta": {"loss": float("nan")}}, "meta"),
        ({"meta": {"x": object()}}, "meta"),
        ({"state_digest": None}, "state_digest"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(
    changes: dict[str, Any], message: str, store: RunStore, fake: FakeObjects
) -> None:
    writer = store.writer()
    before = set(fake.blobs)
    values: dict[str, Any] = {"step": 1, "kind": "base", "parent": None, "state_digest": "", "meta": {}}
    with pytest.raises(ConfigError, match=message):
        writer.commit(b"x", **{**values, **changes})
    assert set(fake.blobs) == before


def test_closed_writer(store: RunStore) -> None:
    with store.writer() as writer:
        base(writer)
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        base(writer)


def test_pins(store: RunStore) -> None:
    writer = store.writer()
    first, second = base(writer), base(writer, step=2)
    writer.pin("best", first)
    writer.pin("best", first)
    with pytest.raises(ConfigError, match="unpin it first"):
        writer.pin("best", second)
    assert store.pins() == {"best": 0}
    writer.unpin("best")
    writer.unpin("best")
    writer.collect([])
    with pytest.raises(NoCheckpointError, match="step 1"):
        writer.pin("late", first)
    assert store.pins() == {}


@pytest.mark.parametrize("same", [True, False])
def test_a_pin_that_another_process_removes_meanwhile_is_set(store: RunStore, same: bool) -> None:
    """By an `unpin` between the attempt to write it, for it was there, and the look at what it holds."""
    writer = store.writer()
    first = base(writer)
    wanted = first if same else base(writer, step=2)
    writer.pin("best", first)

    objects, other = writer._objects, [store.writer()]

    def get(key: str, *, max_size: int | None = None) -> bytes:
        if other and key.startswith("pins/"):  # several stores do not ask where they hold it already
            other.pop().unpin("best")
        return read(key, max_size=max_size)

    read = objects.get
    with mock.patch.object(objects, "get", get):
        writer.pin("best", wanted)
    assert store.pins() == {"best": wanted.seq}


def test_a_pin_that_is_neither_there_nor_absent_is_told() -> None:
    fake = FakeObjects()
    writer = store_on(fake).writer()
    first = base(writer)
    writer.pin("best", first)

    def before(operation: str, key: str) -> None:
        if operation == "get" and key.startswith("pins/"):
            raise MissingKeyError(f"no {key}")

    fake.before = before
    with pytest.raises(
        StoreError, match=r"pins/best\.json could not be written.*or choose another name"
    ) as caught:
        writer.pin("best", first)
    assert type(caught.value) is StoreError


def test_number_of_a_removed_manifest_is_reused_by_a_straggler(
    store: RunStore, fake: FakeObjects | FakeSet
) -> None:
    """The straggler's save fills the hole, sorts below the newer epoch, and is read anew under the old key."""
    old = store.writer()
    first = base(old)
    new = store.writer()
    removed = delta(new, first, step=2)
    newest = delta(new, removed, step=3)
    reader = store_on(fake)
    assert removed in reader.manifests()
    new.collect([first.seq])
    fake.now += 1
    filled = delta(old, first, step=4)
    assert filled.seq == removed.seq
    assert reader.manifests() == [newest, filled, first]
    with pytest.raises(FencedError):
        delta(old, filled, step=5)


def test_a_new_writer_fills_no_hole_that_the_old_one_has_left_since(store: RunStore) -> None:
    """Below the old writer's next number it would not be met, and the old one would go on acknowledging."""
    old = store.writer()
    first = base(old)
    new = store.writer()
    removed, newest = delta(old, first, step=2), base(old, step=3)
    old.collect([newest.seq])
    assert removed not in store.manifests()
    taken_over = base(new, step=4)
    assert taken_over.seq == newest.seq + 1
    with pytest.raises(FencedError, match=r"epoch 2.*step 4"):
        base(old, step=5)
    assert store.manifests()[0] == taken_over


@pytest.mark.parametrize("moment", ["while its container is uploaded", "right before its manifest"])
def test_an_old_writer_that_goes_on_during_the_first_save_of_the_new_one_is_met(moment: str) -> None:
    fake = FakeObjects()
    store = store_on(fake)
    old = store.writer()
    base(old)
    new = store_on(fake).writer()
    first = ("put", f"-{new.session}-") if moment.startswith("while") else ("put_if_absent", "commits/")
    last: list[Manifest] = []

    def before(operation: str, key: str) -> None:
        if operation == first[0] and first[1] in key:
            fake.heal()
            last.append(base(old, step=1))
            last.append(base(old, step=2))
            with store_on(fake).writer() as pruning:
                pruning.collect([last[-1].seq])

    with mock.patch.object(
        fake, "_lock", nullcontext()
    ):  # or the threads that read manifests would wait for it
        fake.before = before
        taken_over = base(new, step=3)
    fake.heal()
    assert taken_over.seq == last[-1].seq + 1
    with pytest.raises(FencedError, match=r"epoch 2.*step 3"):
        base(old, step=4)
    newest = store.manifests()[0]
    assert (newest, store.fetch(newest)) == (taken_over, [b"base"])


def test_newer_version_that_has_committed_since_the_opening_is_a_fence(
    store: RunStore, fake: FakeObjects | FakeSet
) -> None:
    """Its manifest lies where the first save looks before it takes a number."""
    old = store.writer()
    first = base(old)
    late = store.writer()
    record = unseal(base(store.writer(), step=2).to_bytes(), "m")
    fake.put("commits/0000000001.json", seal({**record, "format": 99, "epoch": 3}))
    with pytest.raises(FencedError, match="newer shrinkpoint"):
        late.collect([])
    with pytest.raises(FencedError, match="newer shrinkpoint"):
        base(late, step=3)
    assert store.manifests() == [first]


class TestSingleWriter:
    @pytest.fixture(params=[FakeObjects, FakeSet], ids=["one", "several"])
    def fake(self, request: pytest.FixtureRequest) -> FakeObjects | FakeSet:
        return request.param(honours_condition=False, known_atomic=None)

    def open(self, store: RunStore) -> RunWriter:
        with pytest.warns(UserWarning, match="put-if-absent"):
            writer = store.writer()
        assert writer.mode == "single-writer"
        return writer

    def test_names_cannot_collide(self, store: RunStore, fake: FakeObjects | FakeSet) -> None:
        writer = self.open(store)
        first = base(writer)
        second = delta(writer, first)
        assert store.manifests() == [second, first]
        assert commit_key(0, first.chain[0].key) in fake.blobs
        assert not any(key.startswith("probe/") for key in fake.blobs)

    def test_old_writer_is_fenced(self, store: RunStore) -> None:
        old = self.open(store)
        first = base(old)
        new = self.open(store)
        second = delta(new, first)
        with pytest.raises(FencedError):
            delta(old, first)
        assert store.manifests() == [second, first]

    def test_on_request_without_a_warning(self, store: RunStore) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.writer(mode="single-writer").mode == "single-writer"
        with pytest.raises(ConfigError, match="mode="):
            store.writer(mode="many")  # type: ignore[arg-type]
