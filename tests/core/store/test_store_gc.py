"""Collection never takes what anybody may still need; a state machine looks for an order in which it does."""

import itertools
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_objects import FakeObjects
from support.newest import newest_sound
from support.stores import FakeSet

from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    FencedError,
    FormatError,
    ShrinkpointWarning,
    StoreError,
)
from shrinkpoint.store.keys import commit_key
from shrinkpoint.store.manifest import Manifest, seal, unseal
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter

DAY = 86400.0


class Run:
    def __init__(self, fake: FakeObjects | FakeSet | None = None) -> None:
        self.fake = fake or FakeObjects()
        self.store = self.reopen()
        self.writer = self.store.writer()

    def reopen(self) -> RunStore:
        return RunStore("ignored", objects=self.fake, retry=RetryPolicy(attempts=1))

    def base(self, step: int = 1) -> Manifest:
        return save(self.writer, step, None)

    def delta(self, parent: Manifest, step: int = 2) -> Manifest:
        return save(self.writer, step, parent)

    def keys(self, folder: str) -> list[str]:
        return sorted(key for key in self.fake.blobs if key.startswith(folder))

    def sound(self) -> list[int]:
        return [m.step for m in self.store.manifests() if self.store.fetch(m)]


def save(writer: RunWriter, step: int, parent: Manifest | None) -> Manifest:
    kind = "delta" if parent else "base"
    return writer.commit(b"%d" % step, step=step, kind=kind, parent=parent, state_digest="", meta={})


@pytest.fixture(params=[FakeObjects, FakeSet], ids=["one", "several"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param())


def test_what_was_committed_after_the_choice_stays(run: Run) -> None:
    first, second = run.base(1), run.base(2)
    other = run.store.writer()
    seen = run.store.manifests()
    late = save(run.writer, 3, None)  # by the older of two writers, before it learns of the other one
    save(other, 4, None)
    assert other.collect([second.seq], seen=seen).removed == (first.seq,)
    assert {m.digest for m in run.store.manifests()} > {second.digest, late.digest}
    assert late.seq in other.collect([second.seq]).removed


def test_two_phases(run: Run) -> None:
    first = run.base(1)
    second = run.base(2)
    run.fake.now += 10 * DAY  # the blob is old, but was needed until now
    report = run.writer.collect([second.seq])
    assert (report.kept, report.removed, report.blobs_removed, report.waiting) == ((1,), (0,), (), 1)
    assert run.store.manifests() == [second]
    assert run.store.fetch(first) == [b"1"]
    run.fake.now += DAY - 1
    assert run.writer.collect([second.seq]).blobs_removed == ()
    run.fake.now += 2
    report = run.writer.collect([second.seq])
    assert report.blobs_removed == (first.chain[0].key,)
    assert report.bytes_freed == 1
    assert run.keys("trash/") == []
    assert run.sound() == [2]


def test_kept_delta_keeps_its_chain(run: Run) -> None:
    first = run.base(1)
    second = run.delta(first, 2)
    third = run.delta(second, 3)
    other = run.base(4)
    run.writer.collect([third.seq, other.seq])
    run.fake.now += 2 * DAY
    report = run.writer.collect([third.seq, other.seq])
    assert report.blobs_removed == ()
    assert run.sound() == [4, 3]
    assert len(run.keys("trash/")) == 0  # the copies are gone, the blobs in use are not


def test_newest_stays_whatever_is_asked(run: Run) -> None:
    run.base(1)
    run.base(2)
    report = run.writer.collect([], grace_s=0)
    assert report.kept == (1,)


def test_newest_whose_blob_is_lost_does_not_count_as_newest(run: Run) -> None:
    run.base(1)
    broken = run.base(2)
    store = run.reopen()
    del run.fake.blobs[broken.chain[0].key]
    writer = store.writer()
    assert writer.collect([broken.seq], grace_s=0).removed == ()
    with pytest.warns(ShrinkpointWarning):
        found = newest_sound(store, lambda manifest, blobs: manifest.step)
    assert found is not None
    assert found[1] == 1


def test_resumed_checkpoint_stays_until_the_first_commit(run: Run) -> None:
    first = run.base(1)
    second = run.base(2)
    _, modified = run.fake.blobs[second.chain[0].key]
    run.fake.blobs[second.chain[0].key] = (b"x", modified)  # damaged, of the right size
    store = run.reopen()
    with pytest.warns(ShrinkpointWarning):
        newest_sound(store, lambda manifest, blobs: None)
    writer = store.writer()
    assert writer.collect([second.seq]).removed == ()
    save(writer, 3, first)
    assert writer.collect([]).removed == (0, 1)
    assert store.fetch(store.manifests()[0]) == [b"1", b"3"]


def test_pinned_stays(run: Run) -> None:
    first = run.base(1)
    run.base(2)
    run.writer.pin("best", first)
    assert run.writer.collect([], grace_s=0).removed == ()
    run.writer.unpin("best")
    assert run.writer.collect([], grace_s=0).removed == (0,)


def test_orphans_of_a_killed_save_go_after_the_grace(run: Run) -> None:
    run.base(1)
    # The blob arrives, the manifest does not; in each of several stores it is asked first which store it is.
    run.fake.fail_at(2 if isinstance(run.fake, FakeSet) else 1)
    with pytest.raises(StoreError):
        run.base(2)
    run.fake.heal()
    assert len(run.keys("data/")) == 2
    assert run.writer.collect([0]).waiting == 1
    run.fake.now += DAY + 1
    assert len(run.writer.collect([0]).blobs_removed) == 1
    assert run.sound() == [1]


def test_only_the_newest_writer_collects(run: Run) -> None:
    run.base(1)
    last = run.base(2)
    newer = run.store.writer()
    save(newer, 3, last)
    before = dict(run.fake.blobs)
    with pytest.raises(FencedError):
        run.writer.collect([])
    assert run.fake.blobs == before


def use_again(run: Run, removed: Manifest) -> Manifest:
    """A manifest of a newer writer under the number of a removed one: of the same size and, by a fake store's clock, time stamp."""
    record = {**unseal(removed.to_bytes(), "m"), "epoch": 2}
    data = seal(record)
    assert len(data) == len(removed.to_bytes())
    run.fake.put(commit_key(removed.seq), data)
    return Manifest.from_bytes(data, "m")


def test_a_number_that_was_used_again_within_a_tick_of_the_clock_is_read_again(run: Run) -> None:
    """The new manifest looks like the removed one, which the collecting writer has read before."""
    removed, _ = run.base(1), run.base(2)
    run.writer.collect([])
    assert [m.step for m in run.reopen().manifests()] == [2]
    use_again(run, removed)
    with pytest.raises(FencedError, match=r"epoch 2.*step 1"):
        run.writer.collect([])
    assert [m.step for m in run.reopen().manifests()] == [1, 2]


def test_it_is_read_again_after_a_removal_whose_answer_was_lost(run: Run) -> None:
    removed, _ = run.base(1), run.base(2)
    delete = type(run.fake).delete

    def lost(fake: FakeObjects | FakeSet, keys: list[str]) -> None:
        delete(fake, keys)
        if any(key.startswith("commits/") for key in keys):
            raise StoreError("lost")

    with mock.patch.object(type(run.fake), "delete", lost), pytest.raises(StoreError, match="lost"):
        run.writer.collect([])
    use_again(run, removed)
    with pytest.raises(FencedError):
        run.writer.collect([])


def test_it_is_read_again_after_a_removal_in_the_middle_of_a_listing() -> None:
    run = Run()
    removed, kept = run.base(1), run.base(2)
    run.store.manifests()
    unread = run.base(3)
    reached, goes_on = threading.Event(), threading.Event()

    def wait(operation: str, key: str) -> None:
        if (operation, key) == ("get", commit_key(unread.seq)) and not reached.is_set():
            reached.set()
            assert goes_on.wait(10)

    with mock.patch.object(run.fake, "_lock", nullcontext()):  # or the collection would wait for the listing
        run.fake.before = wait
        listing = threading.Thread(target=run.store.manifests)
        listing.start()
        assert reached.wait(10)
        run.writer.collect([kept.seq])
        goes_on.set()
        listing.join()
    run.fake.heal()
    use_again(run, removed)
    with pytest.raises(FencedError):
        run.writer.collect([])


def test_copies_of_a_number_that_was_used_again_in_several_stores_are_read_again() -> None:
    """One store's new copy looks like the removed one, the others' do not."""
    run = Run(FakeSet())
    removed, kept = run.base(1), run.base(2)
    run.store.manifests()
    run.writer.collect([kept.seq])
    for each in run.fake.each[1:]:
        each.now += 1
    replaced = use_again(run, removed)
    listing = run.writer._catalog.scan()
    assert (listing.manifests, listing.damaged) == ((replaced, kept), ())


def test_what_another_process_has_removed_and_replaced_is_not_removed_again(run: Run) -> None:
    """This process believes in the manifest that it has read, and looks once more before it removes it."""
    first, newest = run.base(1), run.base(2)
    assert run.store.manifests() == [newest, first]
    run.fake.delete([commit_key(first.seq)])
    replaced = use_again(run, first)
    run.writer.collect([])
    assert run.reopen().manifests() == [replaced, newest]
    with pytest.raises(FencedError):
        run.writer.collect([])


def test_what_a_damaged_manifest_may_name_stays(run: Run) -> None:
    """Nothing is known about it but its age: blobs that are older stay, younger ones can be collected."""
    first = run.base(1)
    run.fake.now += 10
    run.fake.blobs["commits/0000000000.json"] = (b"damaged", run.fake.now)
    run.fake.now += DAY
    second = run.base(2)
    third = run.base(3)
    run.writer.collect([third.seq])
    run.fake.now += 2 * DAY
    report = run.writer.collect([third.seq])
    assert report.damaged == ("commits/0000000000.json",)
    assert report.blobs_removed == (second.chain[0].key,)
    assert first.chain[0].key in run.fake.blobs
    assert "commits/0000000000.json" in run.fake.blobs


def test_damaged_trash_entry_keeps_what_is_older(run: Run) -> None:
    run.base(1)
    run.base(2)
    run.fake.now += 2 * DAY
    run.writer.collect([])
    entry = run.keys("trash/")[0]
    run.fake.blobs[entry] = (b"damaged", run.fake.now)
    assert run.writer.collect([]).blobs_removed == ()
    run.fake.now += DAY + 1
    assert len(run.writer.collect([]).blobs_removed) == 1


def test_damaged_pin_stops_collection(run: Run) -> None:
    run.base(1)
    run.base(2)
    run.fake.put("pins/best.json", b"damaged")
    with pytest.raises(FormatError, match="best"):
        run.writer.collect([], grace_s=0)
    assert run.sound() == [2, 1]


def test_stray_probes_go_after_the_grace(run: Run) -> None:
    run.base(1)
    run.fake.put("probe/0123456789abcdef", b"")
    run.writer.collect([])
    assert run.keys("probe/")
    run.fake.now += DAY + 1
    run.writer.collect([])
    assert not run.keys("probe/")


def test_unknown_age_is_never_old(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.base(1)
    run.base(2)
    real = run.fake.list
    monkeypatch.setattr(
        run.fake,
        "list",
        lambda prefix, limit=None: [
            type(info)(key=info.key, size=info.size, modified=None) for info in real(prefix, limit=limit)
        ],
    )
    run.writer.collect([])
    run.fake.now += 100 * DAY
    assert run.writer.collect([]).blobs_removed == ()


@pytest.mark.parametrize("call", range(12))
def test_without_grace_nothing_is_written_and_no_container_goes_before_its_manifest(
    run: Run, call: int
) -> None:
    first, second = run.base(1), run.base(2)
    run.fake.now += 1
    run.fake.fail_at(call)
    try:
        report = run.writer.collect([], grace_s=0)
    except StoreError:
        report = None
    run.fake.heal()
    assert run.keys("trash/") == []
    assert set(run.store.manifests()) - {first} == {second}
    for manifest in run.store.manifests():
        run.store.fetch(manifest)
    if report is None:
        report = run.writer.collect([], grace_s=0)
    assert run.keys("data/") == run.keys(second.chain[0].key)
    assert report.waiting == 0


def test_what_is_expired_goes_although_no_copy_can_be_written(run: Run) -> None:
    """On a full disk the one makes room for the other."""
    first, second, third = run.base(1), run.base(2), run.base(3)
    run.writer.collect([second.seq, third.seq])
    run.fake.now += 2 * DAY

    def before(operation: str, key: str) -> None:
        if operation == "put" and key.startswith("trash/") and first.chain[0].key in run.fake.blobs:
            raise StoreError("full")

    run.fake.before = before
    assert run.writer.collect([third.seq]).removed == (second.seq,)
    assert first.chain[0].key not in run.fake.blobs


def test_failing_listing_deletes_nothing(run: Run) -> None:
    for step in range(3):
        run.base(step)
    run.writer.collect([2])
    run.fake.now += 2 * DAY
    blobs = run.keys("data/")

    def before(operation: str, key: str) -> None:
        if operation == "list" and key == "trash/":
            raise StoreError("listing failed")

    run.fake.before = before
    with pytest.raises(StoreError, match="listing failed"):
        run.writer.collect([2])
    assert run.keys("data/") == blobs


def test_negative_grace(run: Run) -> None:
    with pytest.raises(ConfigError, match="grace_s=-1"):
        run.writer.collect([], grace_s=-1)


def test_interrupted_anywhere_and_completed_by_the_next() -> None:
    for call in itertools.count():
        run = Run()
        first = run.base(1)
        kept = run.delta(first, 2)
        run.base(3)
        run.base(4)
        run.writer.collect([1, 2])
        run.fake.now += DAY + 1
        run.fake.fail_at(call)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ShrinkpointWarning)  # the sweep may be what fails
                run.writer.collect([1])
            interrupted = False
        except StoreError:
            interrupted = True
        run.fake.heal()
        assert run.store.fetch(kept) == [b"1", b"2"]
        assert set(run.sound()) >= {2, 4}
        run.writer.collect([1])
        run.fake.now += DAY + 1
        run.writer.collect([1])
        assert run.sound() == [4, 2]
        assert len(run.keys("data/")) == 3
        assert run.keys("trash/") == []
        if not interrupted:
            break
    assert call > 10


WRITERS = st.integers(0, 2)
SELDOM = st.sampled_from([None] * 8)


class Collections(RuleBasedStateMachine):
    """Writers come, go, pause and are fenced; clocks run; collections are interrupted: acknowledged saves stay sound."""

    make: ClassVar[Callable[[], FakeObjects | FakeSet]] = FakeObjects

    def __init__(self) -> None:
        super().__init__()
        # The same nonces each time, so that a failing sequence can be repeated and shortened.
        self.source = random.Random()
        self.nonces = mock.patch("secrets.token_hex", lambda size: self.source.randbytes(size).hex())
        self.nonces.start()
        self.fake = self.make()
        self.step = 0
        self.writers: list[tuple[RunWriter, Manifest | None]] = []
        self.acknowledged: dict[str, Manifest] = {}
        self.unpublished: set[str] = set()
        self.may_be_back: set[str] = set()

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.source.seed(seed)
        self.open_writer()

    def teardown(self) -> None:
        self.nonces.stop()

    def store(self) -> RunStore:
        return RunStore("ignored", objects=self.fake, retry=RetryPolicy(attempts=1))

    @rule()
    def open_writer(self) -> None:
        """Resume: restore the newest, then become the writer; earlier writers live on without knowing."""
        store = self.store()
        found = newest_sound(store, lambda manifest, blobs: None)
        writer = store.writer()
        writer._clock = lambda: self.fake.now
        self.writers = [*self.writers[-2:], (writer, found[0] if found else None)]

    @rule(which=WRITERS, full=st.sampled_from([False, False, True]), fails=SELDOM | st.integers(0, 4))
    def commit(self, which: int, full: bool, fails: int | None) -> None:
        which %= len(self.writers)
        writer, parent = self.writers[which]
        parent = None if full else parent
        self.step += 1
        if fails is not None:
            self.fake.fail_at(fails)
        try:
            manifest = save(writer, self.step, parent)
        except (FencedError, ChainError, StoreError) as error:
            if isinstance(error, ChainError):
                self.writers[which] = (writer, None)
        else:
            self.acknowledged[manifest.digest] = manifest
            self.writers[which] = (writer, manifest)
        finally:
            self.fake.heal()

    @rule(
        which=WRITERS,
        keep=st.sets(st.integers(0, 12), max_size=2),
        fails=SELDOM | st.integers(0, 20),
    )
    def collect(self, which: int, keep: set[int], fails: int | None) -> None:
        writer, _ = self.writers[which % len(self.writers)]
        before = {m.digest: m for m in self.store().manifests()}
        if fails is not None:
            self.fake.fail_at(fails)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ShrinkpointWarning)  # the sweep may be what fails
                writer.collect(keep)
        except (FencedError, StoreError):
            pass
        finally:
            self.fake.heal()
        gone = set(before) - {m.digest for m in self.store().manifests()}
        assert not {before[digest].seq for digest in gone} & keep
        newest = max(before.values(), key=lambda m: (m.epoch, m.seq), default=None)
        assert newest is None or newest.digest not in gone
        self.unpublished |= gone

    @rule(which=WRITERS, hours=st.sampled_from([0.0, 25.0]))
    def move_on(self, which: int, hours: float) -> None:
        """What is hard on a second writer: a new base, everything else removed, and perhaps its blobs a day later."""
        self.commit(which, True, None)
        self.collect(which, set(), None)
        if hours:
            self.wait(hours)
            self.collect(which, set(), None)

    @rule(hours=st.sampled_from([0.0, 25.0]), fails=st.sampled_from([None, 1, 2]))
    def take_over(self, hours: float, fails: int | None) -> None:
        """The old writer moves on between the new one's restore and its first save, which builds on what was restored."""
        self.open_writer()
        if fails is not None:
            self.commit(len(self.writers) - 1, False, fails)
        self.move_on(max(0, len(self.writers) - 2), hours)
        self.commit(len(self.writers) - 1, False, None)

    @precondition(lambda self: self.acknowledged)
    @rule(hours=st.sampled_from([0.4, 23.5, 25.0]))
    def wait(self, hours: float) -> None:
        self.fake.now += hours * 3600

    @invariant()
    def acknowledged_saves_are_there_and_sound(self) -> None:
        store = self.store()
        published = {m.digest: m for m in store.manifests()}
        assert set(self.acknowledged) - self.unpublished <= set(published)
        for digest, manifest in published.items():
            if digest not in self.may_be_back:
                assert store.fetch(manifest)[-1] == b"%d" % manifest.step

    @invariant()
    def nothing_newer_than_the_restored_one_was_acknowledged(self) -> None:
        found = newest_sound(self.store(), lambda manifest, blobs: None)
        order = [(m.epoch, m.seq) for m in self.acknowledged.values()]
        assert not order or (found is not None and (found[0].epoch, found[0].seq) >= max(order))


Collections.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCollections = Collections.TestCase


class CollectionsOfSeveral(Collections):
    """The same over three stores, one of which goes away and comes back as it went, with what was removed meanwhile."""

    make = FakeSet
    fake: FakeSet

    @initialize(victim=st.integers(0, 2))
    def choose(self, victim: int) -> None:
        self.victim = victim

    @rule()
    def go_away(self) -> None:
        self.fake.lose(self.victim)

    @rule()
    def come_back(self) -> None:
        self.fake.come_back(self.victim)
        self.may_be_back |= self.unpublished


# Not shortened where it fails: threads make a sequence take minutes, and it would be another one.
CollectionsOfSeveral.TestCase.settings = settings(
    Collections.TestCase.settings, max_examples=50, phases=[Phase.generate]
)
TestCollectionsOfSeveral = CollectionsOfSeveral.TestCase


class ManyCollectionsOfSeveral(CollectionsOfSeveral):
    """More of these."""


ManyCollectionsOfSeveral.TestCase.settings = settings(
    CollectionsOfSeveral.TestCase.settings, max_examples=400
)
TestManyCollectionsOfSeveral = pytest.mark.long(pytest.mark.slow(ManyCollectionsOfSeveral.TestCase))
