"""Reading: the newest sound checkpoint, and never a wrong one or none without saying so."""

import itertools
import warnings
from collections.abc import Callable

import pytest
from support.fake_objects import FakeObjects
from support.newest import newest_sound
from support.stores import FakeSet, forget

from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    CorruptionError,
    FormatError,
    RunMismatchError,
    ShrinkpointWarning,
    StoreError,
    UnsupportedFormatError,
)
from shrinkpoint.store.catalog import Catalog
from shrinkpoint.store.manifest import Manifest, seal, unseal
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore


def take(manifest: Manifest, blobs: list[bytes]) -> list[bytes]:
    return blobs


class Run:
    """A base and two deltas, then a second base: steps 1 to 4, seqs 0 to 3."""

    def __init__(self, fake: FakeObjects | FakeSet | None = None) -> None:
        self.fake = fake or FakeObjects()
        self.store = self.reopen()
        writer = self.store.writer()
        self.manifests: list[Manifest] = []
        for step in (1, 2, 3):
            parent = self.manifests[-1] if self.manifests else None
            kind = "delta" if parent else "base"
            data = b"container %d" % step
            self.manifests.append(
                writer.commit(data, step=step, kind=kind, parent=parent, state_digest="", meta={})
            )
        data = b"container 4"
        self.manifests.append(writer.commit(data, step=4, kind="base", parent=None, state_digest="", meta={}))

    def reopen(self) -> RunStore:
        return RunStore("ignored", objects=self.fake, retry=RetryPolicy(attempts=2, first_delay_s=0))

    def damage(self, key: str, change: Callable[[bytes], bytes]) -> None:
        data, modified = self.fake.blobs[key]
        self.fake.blobs[key] = (change(data), modified)


@pytest.fixture(params=[FakeObjects, FakeSet], ids=["one", "several"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param())


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "bit flip": flip,
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "foreign": lambda data: b"\0" * len(data),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_manifest_is_passed_over(run: Run, damage: str) -> None:
    run.damage("commits/0000000003.json", DAMAGES[damage])
    store = run.reopen()
    with pytest.warns(ShrinkpointWarning, match=r"commits/0000000003\.json"):
        found = newest_sound(store, take)
    assert found == (run.manifests[2], [b"container 1", b"container 2", b"container 3"])
    assert [damaged.key for damaged in store.damaged] == ["commits/0000000003.json"]


@pytest.mark.parametrize("damage", [*sorted(DAMAGES), "gone"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_damage_in_a_chain_costs_that_chain_alone(run: Run, damage: str, position: int) -> None:
    """Damage at position i of a chain loses i and later; what came before and other chains stay."""
    del run.fake.blobs["commits/0000000003.json"]
    key = run.manifests[position].chain[-1].key
    if damage == "gone":
        del run.fake.blobs[key]
    else:
        run.damage(key, DAMAGES[damage])
    store = run.reopen()
    if position == 0:
        with pytest.warns(ShrinkpointWarning), pytest.raises(ChainError, match="none of them") as caught:
            newest_sound(store, take)
        assert key in str(caught.value)
        return
    with pytest.warns(ShrinkpointWarning, match=key):
        found = newest_sound(store, take)
    assert found is not None
    assert found[0] == run.manifests[position - 1]


def test_errors_of_fetch(run: Run) -> None:
    manifest = run.manifests[2]
    first, second = manifest.chain[0].key, manifest.chain[1].key
    run.damage(second, flip)
    with pytest.raises(CorruptionError, match=second):
        run.store.fetch(manifest)
    del run.fake.blobs[first], run.fake.blobs[second]
    with pytest.raises(ChainError, match=first):
        run.store.fetch(manifest)
    with pytest.raises(ChainError, match=first):
        run.store.fetch_range(manifest.chain[0], 0, 1)
    with pytest.raises(ConfigError, match="not within"):
        run.store.fetch_range(manifest.chain[0], 0, 10**6)


@pytest.mark.parametrize("times", [1, 2])
def test_damage_on_the_way_is_read_again(run: Run, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, left = run.reopen(), run.fake.get, {}

    def get(key: str, *arguments: int | None, max_size: int) -> bytes:
        data = real(key, *arguments, max_size=max_size)
        left[key] = left.get(key, times) - 1
        return flip(data) if left[key] >= 0 else data

    monkeypatch.setattr(run.fake, "get", get)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_sound(store, take) == (run.manifests[3], [b"container 4"])


@pytest.mark.parametrize("error", [FormatError, ChainError, CorruptionError])
def test_what_accept_refuses_is_passed_over(run: Run, error: type[Exception]) -> None:
    def accept(manifest: Manifest, blobs: list[bytes]) -> int:
        if manifest.step > 2:
            raise error(f"wrong reference in step {manifest.step}")
        return manifest.step

    with (
        pytest.warns(ShrinkpointWarning, match="wrong reference in step 4"),
        pytest.warns(ShrinkpointWarning, match="wrong reference in step 3"),
    ):
        assert newest_sound(run.store, accept) == (run.manifests[1], 2)


def test_other_errors_of_accept_come_through(run: Run) -> None:
    def accept(manifest: Manifest, blobs: list[bytes]) -> None:
        raise MemoryError("not a matter of this checkpoint")

    with pytest.raises(MemoryError):
        newest_sound(run.store, accept)


def test_never_a_silent_start_from_nothing(run: Run) -> None:
    for key in [key for key in run.fake.blobs if key.startswith("data/")]:
        del run.fake.blobs[key]
    with pytest.warns(ShrinkpointWarning), pytest.raises(ChainError, match="Nothing was changed"):
        newest_sound(run.store, take)
    for key in [key for key in run.fake.blobs if key.startswith("commits/")]:
        run.damage(key, flip)
    with pytest.warns(ShrinkpointWarning), pytest.raises(ChainError, match=r"0000000002\.json"):
        newest_sound(run.reopen(), take)


def test_every_failing_operation_of_a_resume_is_an_error(run: Run) -> None:
    for call in itertools.count():
        run.fake.fail_at(call)
        try:
            found = newest_sound(run.reopen(), take)
        except StoreError:
            continue
        assert found is not None
        assert found[0] == run.manifests[3]
        break
    assert call > 5


def test_newer_versions_stop_instead_of_going_back(run: Run) -> None:
    record = unseal(run.manifests[3].to_bytes(), "m")
    run.fake.put("commits/0000000004.json", seal({**record, "seq": 4, "format": 2}))
    with (
        pytest.warns(ShrinkpointWarning),
        pytest.raises(UnsupportedFormatError, match=r"0000000004\.json.*upgrade"),
    ):
        newest_sound(run.reopen(), take)


def test_number_inside_must_be_the_number_outside(run: Run) -> None:
    run.fake.blobs["commits/0000000007.json"] = run.fake.blobs["commits/0000000000.json"]
    with pytest.warns(ShrinkpointWarning, match="says that it is number 0"):
        assert [m.seq for m in run.reopen().manifests()] == [3, 2, 1, 0]


def test_checkpoint_collected_during_a_restore(run: Run) -> None:
    """Its manifest and blob vanish under the reader's hands: it looks again, and warns of nothing."""
    newest = run.manifests[3]

    def vanish(operation: str, key: str) -> None:
        if operation == "get" and key.startswith(newest.chain[0].key):
            forget(run.fake, newest.chain[0].key, "commits/0000000003")

    store = run.reopen()
    run.fake.before = vanish
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = newest_sound(store, take)
    assert found is not None
    assert found[0] == run.manifests[2]


def test_manifests_are_read_once(run: Run) -> None:
    store = run.reopen()
    store.manifests()
    run.fake.calls.clear()
    store.manifests()
    assert run.fake.calls == [("list", "commits/")]


def test_a_scan_of_another_thread_takes_nothing_out_of_a_listing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(run.fake)
    note = catalog.note

    def interrupted(key: str, manifest: Manifest) -> None:
        note(key, manifest)
        with monkeypatch.context() as patch:  # one that listed before there was anything to list
            patch.setattr(catalog, "_list", list)
            assert catalog.scan().manifests == ()

    monkeypatch.setattr(catalog, "note", interrupted)
    assert [manifest.seq for manifest in catalog.scan().manifests] == [3, 2, 1, 0]


def test_warned_once(run: Run) -> None:
    run.damage("commits/0000000001.json", flip)
    store = run.reopen()
    with pytest.warns(ShrinkpointWarning):
        store.manifests()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.manifests()


@pytest.mark.parametrize("where", ["one", "first of several", "last of several"])
def test_foreign_prefix(where: str) -> None:
    fake = FakeObjects() if where == "one" else FakeSet()
    holder = fake if isinstance(fake, FakeObjects) else fake.each[0 if "first" in where else 2]
    holder.put("photos/cat.jpg", b"meow")
    store = RunStore("ignored", objects=fake)
    assert not store.exists()
    with pytest.raises(RunMismatchError, match=r"photos/cat\.jpg.*empty"):
        store.writer()
    assert list(holder.blobs) == ["photos/cat.jpg"]
    assert isinstance(fake, FakeObjects) or not any(each.blobs for each in fake.each if each is not holder)


@pytest.mark.parametrize("kind", [FakeObjects, FakeSet], ids=["one", "several"])
@pytest.mark.parametrize("content", [b"", b"{}", seal({"type": "something else"})])
def test_foreign_or_damaged_format_file(content: bytes, kind: type[FakeObjects | FakeSet]) -> None:
    fake = kind()
    fake.put("format.json", content)
    for attempt in (RunStore("x", objects=fake).exists, RunStore("x", objects=fake).writer):
        with pytest.raises(RunMismatchError, match="another URL"):
            attempt()


def test_run_of_a_newer_version(run: Run) -> None:
    record = unseal(run.fake.blobs["format.json"][0], "f")
    run.fake.put("format.json", seal({**record, "format": 2}))
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        run.reopen().writer()


def test_a_format_file_with_fields_of_other_types(run: Run) -> None:
    record = unseal(run.fake.blobs["format.json"][0], "f")
    run.fake.put("format.json", seal({**record, "reader_features": [["parts"]]}))
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        run.reopen().writer()
    run.fake.put("format.json", seal({**record, "run": [1]}))
    run.reopen().writer()
    with pytest.raises(RunMismatchError, match="does not name its run"):
        run.reopen().run_id()


def test_lost_format_file_loses_nothing(run: Run) -> None:
    del run.fake.blobs["format.json"]
    store = run.reopen()
    assert newest_sound(store, take) == (run.manifests[3], [b"container 4"])
    assert store.writer().epoch == 2
    assert store.exists()


@pytest.mark.parametrize("kind", [FakeObjects, FakeSet], ids=["one", "several"])
def test_two_creators_agree(kind: type[FakeObjects | FakeSet]) -> None:
    fake = kind()
    stores = [RunStore("x", objects=fake) for _ in range(2)]
    writers = [store.writer() for store in stores]
    assert [writer.epoch for writer in writers] == [1, 1]
    assert sum(key == ("put_if_absent", "format.json") for key in fake.calls) == 1
