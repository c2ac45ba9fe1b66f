"""What is listed and cannot be read, or read and not listed: damage to be told of, never an absent or empty run."""

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from support.fake_objects import FakeObjects
from support.newest import newest_sound
from support.s3 import S3Server, moto_server, new_bucket, storage_options
from support.stores import FakeSet, forget

from shrinkpoint.errors import ChainError, FormatError, ShrinkpointWarning, StoreError
from shrinkpoint.store import catalog
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo, TransientStoreError
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter

DAY = 86400.0


def save(writer: RunWriter, step: int, parent: Manifest | None = None) -> Manifest:
    kind = "delta" if parent else "base"
    return writer.commit(b"%d" % step, step=step, kind=kind, parent=parent, state_digest="", meta={})


def step_of(manifest: Manifest, blobs: list[bytes]) -> int:
    return manifest.step


def opened(fake: FakeObjects | FakeSet) -> RunStore:
    return RunStore("ignored", objects=fake, retry=RetryPolicy(attempts=1))


@pytest.fixture(params=[FakeObjects, FakeSet], ids=["one", "several"])
def fake(request: pytest.FixtureRequest) -> FakeObjects | FakeSet:
    """A run of three bases: steps 1 to 3."""
    objects: FakeObjects | FakeSet = request.param()
    with opened(objects).writer() as writer:
        for step in (1, 2, 3):
            save(writer, step)
    return objects


@pytest.fixture(params=[1, 3], ids=["one", "several"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """The same on a disk, or on three."""
    folders = [tmp_path / f"run{number}" for number in range(request.param)]
    with RunStore(folders).writer() as writer:
        for step in (1, 2, 3):
            save(writer, step)
    return folders


def answer_404(fake: FakeObjects | FakeSet, *keys: str) -> None:
    """The listing shows them, and nobody can read them."""

    def before(operation: str, key: str) -> None:
        if operation == "get" and key.startswith(keys):
            raise MissingKeyError(f"no {key}")

    fake.before = before


# ---- manifests, pins and trash that are listed


def test_all_manifests_listed_but_404(fake: FakeObjects | FakeSet) -> None:
    answer_404(fake, "commits/")
    store = opened(fake)
    with pytest.warns(ShrinkpointWarning, match="listed, but cannot be read"), pytest.raises(ChainError):
        newest_sound(store, step_of)
    assert len(store.damaged) == 3
    fake.heal()
    assert newest_sound(opened(fake), step_of) is not None


def test_newest_manifest_listed_but_404(fake: FakeObjects | FakeSet) -> None:
    answer_404(fake, "commits/0000000002")
    with pytest.warns(ShrinkpointWarning, match=r"commits/0000000002\.json is listed, but cannot be read"):
        found = newest_sound(opened(fake), step_of)
    assert found is not None
    assert found[1] == 2


def test_nothing_is_collected_while_a_listed_manifest_is_404(fake: FakeObjects | FakeSet) -> None:
    answer_404(fake, "commits/0000000002")
    fake.now += 10 * DAY
    before = set(fake.blobs)
    writer = opened(fake).writer()
    last = save(writer, 4)
    with pytest.raises(StoreError, match=r"0000000002\.json is listed.*Nothing is removed"):
        writer.collect([last.seq], grace_s=0)
    assert before <= set(fake.blobs)


def test_collected_between_listing_and_reading_is_no_damage(fake: FakeObjects | FakeSet) -> None:
    def before(operation: str, key: str) -> None:
        if operation == "get" and key == "commits/0000000000.json":
            forget(fake, key)

    fake.before = before
    store = opened(fake)
    assert [manifest.step for manifest in store.manifests()] == [3, 2]
    assert store.damaged == ()


def test_older_one_when_container_and_manifest_are_404(fake: FakeObjects | FakeSet) -> None:
    """Both are listed, so that the checkpoint was not collected: an older one is tried instead of listing for ever."""
    store = opened(fake)
    newest = store.manifests()[0]
    answer_404(fake, "commits/0000000002", newest.chain[0].key)
    with pytest.warns(ShrinkpointWarning, match="passed over"):
        found = newest_sound(store, step_of)
    assert found is not None
    assert found[1] == 2


def test_pin_listed_but_404(fake: FakeObjects | FakeSet) -> None:
    store = opened(fake)
    writer = store.writer()
    writer.pin("release", store.manifests()[-1])
    answer_404(fake, "pins/")
    with pytest.raises(FormatError, match=r"pins/release\.json is listed"):
        store.pins()
    with pytest.raises(FormatError, match=r"pins/release\.json is listed"):
        writer.collect([], grace_s=0)
    fake.heal()
    assert len(store.manifests()) == 3


def test_trash_listed_but_404_keeps_its_containers(fake: FakeObjects | FakeSet) -> None:
    fake.now += 2 * DAY
    writer = opened(fake).writer()
    last = save(writer, 4)
    assert len(writer.collect([last.seq]).removed) == 3
    answer_404(fake, "trash/")
    assert writer.collect([last.seq]).blobs_removed == ()


def test_run_nested_in_the_trash_keeps_its_manifests(fake: FakeObjects | FakeSet) -> None:
    nested = "trash/other-run/commits/0000000000.json"
    fake.put(nested, b"another run's")
    fake.now += 10 * DAY
    writer = opened(fake).writer()
    writer.collect([2], grace_s=0)
    assert nested in fake.blobs


# ---- listings that show nothing


def test_empty_listing_is_not_believed(fake: FakeObjects | FakeSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        return []

    monkeypatch.setattr(fake, "list", nothing)
    store = opened(fake)
    for use in (store.manifests, lambda: newest_sound(store, step_of), store.writer):
        with pytest.raises(StoreError, match=r"lists no checkpoint, although .*committed\.json"):
            use()


def test_listings_that_are_all_empty_are_not_believed_without_the_note(
    fake: FakeObjects | FakeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`committed.json` could not be written, but the run's own file can be read and is not listed."""
    forget(fake, "committed.json")
    with monkeypatch.context() as patch:
        patch.setattr(fake, "list", lambda prefix, *, limit=None: [])
        store = opened(fake)
        for use in (store.manifests, lambda: newest_sound(store, step_of), store.writer):
            with pytest.raises(StoreError, match=r"format\.json can be read and is not listed either"):
                use()
    assert [manifest.step for manifest in store.manifests()] == [3, 2, 1]


@pytest.mark.parametrize("kind", [FakeObjects, FakeSet], ids=["one", "several"])
def test_run_that_was_begun_and_never_saved_is_told_and_not_refused(
    kind: type[FakeObjects | FakeSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = kind()
    store = opened(fake)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.writer()
        assert newest_sound(store, step_of) is None
        again = opened(fake)
        again.writer()
        assert newest_sound(again, step_of) is None
    monkeypatch.setattr(catalog, "_begun_here", set())  # as in another process
    again = opened(fake)
    writer = again.writer()
    with pytest.warns(ShrinkpointWarning, match=r"was begun before .*holds no checkpoint.*stop it now"):
        assert newest_sound(again, step_of) is None
    save(writer, 1)
    third = opened(fake)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third.writer()
        assert newest_sound(third, step_of) is not None


def test_folder_without_its_commits_and_data_is_told_without_the_note(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_begun_here", set())  # as in another process
    for folder in folders:
        (folder / "committed.json").unlink()
        for name in ("commits", "data"):
            (folder / name).rename(folder / f"away-{name}")
            (folder / name).mkdir()
    store = RunStore(folders)
    store.writer()
    with pytest.warns(ShrinkpointWarning, match="not mounted.*stop it now if checkpoints should be here"):
        assert newest_sound(store, step_of) is None


@pytest.mark.parametrize("kind", [FakeObjects, FakeSet], ids=["one", "several"])
def test_listing_that_came_just_before_the_first_commit(
    kind: type[FakeObjects | FakeSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = kind()
    writer, real = opened(fake).writer(), fake.list
    reader = opened(fake)

    def late(prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        monkeypatch.undo()
        infos = real(prefix, limit=limit)
        save(writer, 1)
        return infos

    monkeypatch.setattr(fake, "list", late)
    assert [manifest.step for manifest in reader.manifests()] == [1]


@pytest.mark.parametrize("how", ["removed", "unmounted", "link"])
def test_folder_without_its_commits(folders: list[Path], how: str) -> None:
    for folder in folders:
        (folder / "commits").rename(folder.with_suffix(".away"))
        if how == "unmounted":
            (folder / "commits").mkdir()
        if how == "link":
            (folder / "commits").symlink_to(folder.parent / "nowhere")
    with pytest.raises(StoreError, match="not mounted"):
        newest_sound(RunStore(folders), step_of)
    with pytest.raises(StoreError, match="not mounted"):
        RunStore(folders).writer()
    for folder in folders:
        if how != "removed":
            (folder / "commits").unlink() if how == "link" else (folder / "commits").rmdir()
        folder.with_suffix(".away").rename(folder / "commits")
    assert [manifest.step for manifest in RunStore(folders).manifests()] == [3, 2, 1]


@pytest.mark.parametrize("folders", [3], indirect=True)
@pytest.mark.parametrize("which", [0, 2])
def test_one_of_several_without_its_commits(folders: list[Path], which: int) -> None:
    """Its listing counts, and shows less than the others: theirs are enough."""
    shutil.rmtree(folders[which] / "commits")
    store = RunStore(folders)
    assert [manifest.step for manifest in store.manifests()] == [3, 2, 1]
    save(store.writer(), 4)
    assert [manifest.step for manifest in RunStore(folders).manifests()] == [4, 3, 2, 1]


def _no_manifest(operation: str, key: str) -> None:
    if operation == "put_if_absent" and key.startswith("commits/"):
        raise TransientStoreError("interrupted")


@pytest.mark.parametrize("kind", [FakeObjects, FakeSet], ids=["one", "several"])
def test_first_save_that_was_interrupted_is_no_obstacle(kind: type[FakeObjects | FakeSet]) -> None:
    fake = kind()
    writer = opened(fake).writer()
    fake.before = _no_manifest
    with pytest.raises(StoreError):
        save(writer, 1)
    fake.heal()
    store = opened(fake)
    with pytest.warns(ShrinkpointWarning, match="containers but no checkpoint"):
        again = store.writer()
    assert newest_sound(store, step_of) is None
    save(again, 1)
    assert [manifest.step for manifest in store.manifests()] == [1]


# ---- names on a disk that lead nowhere


def test_dangling_link_is_a_damaged_checkpoint(folders: list[Path]) -> None:
    for folder in folders:
        newest = folder / "commits" / "0000000002.json"
        newest.unlink()
        newest.symlink_to(folder.parent / "nowhere")
    store = RunStore(folders)
    with pytest.warns(ShrinkpointWarning, match=r"0000000002\.json is listed"):
        assert [manifest.step for manifest in store.manifests()] == [2, 1]
    assert [damaged.key for damaged in store.damaged] == ["commits/0000000002.json"]


def test_folder_in_a_manifests_place_is_a_damaged_checkpoint(folders: list[Path]) -> None:
    kept = []
    for folder in folders:
        newest = folder / "commits" / "0000000002.json"
        newest.unlink()
        newest.mkdir()
        kept += sorted((folder / "data").iterdir())
    store = RunStore(folders)
    with pytest.warns(ShrinkpointWarning, match="is a folder|or no file"):
        assert [manifest.step for manifest in store.manifests()] == [2, 1]
    with store.writer() as writer:
        last = save(writer, 4)
        for path in kept:
            os.utime(path.parent, (0, 0))
            os.utime(path, (0, 0))
        writer.collect([last.seq], grace_s=0)
    assert all(path.exists() for path in kept)


def test_other_folders_are_not_listed(folders: list[Path]) -> None:
    for folder in folders:
        (folder / "commits" / "notes.json").mkdir()
        assert len(LocalObjects(str(folder)).list("commits/")) == 3
    assert len(RunStore(folders).manifests()) == 3


@pytest.mark.parametrize("others", [[], ["a", "b"]], ids=["one", "several"])
def test_run_whose_folder_is_a_link_that_leads_nowhere(tmp_path: Path, others: list[str]) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"is a link to .*nowhere, which does not exist"):
        RunStore([*(tmp_path / name for name in others), tmp_path / "run"]).writer()


# ---- a chain that is gone while a run goes on


def test_delta_needs_every_container_of_its_chain(fake: FakeObjects | FakeSet) -> None:
    store = opened(fake)
    writer = store.writer()
    first = save(writer, 4)
    second = save(writer, 5, first)
    blob = fake.blobs.pop(first.chain[0].key)
    before = set(fake.blobs)
    with pytest.raises(ChainError, match=r"is missing or of another size.*save a base"):
        save(writer, 6, second)
    assert set(fake.blobs) == before
    fake.blobs[first.chain[0].key] = (blob[0] + b"x", blob[1])
    with pytest.raises(ChainError, match="of another size"):
        save(writer, 6, second)
    fake.blobs[first.chain[0].key] = blob
    assert len(save(writer, 6, second).chain) == 3


def test_removed_and_retargeted_folders(tmp_path: Path) -> None:
    link = tmp_path / "run"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    link.symlink_to(tmp_path / "a")
    store = RunStore(link)
    writer = store.writer()
    first = save(writer, 1)
    link.unlink()
    link.symlink_to(tmp_path / "b")
    with pytest.raises(ChainError, match="save a base"):
        save(writer, 2, first)
    second = save(writer, 3)
    assert newest_sound(RunStore(tmp_path / "b"), step_of) == (second, 3)
    shutil.rmtree(tmp_path / "b" / "data")
    with pytest.raises(ChainError, match="save a base"):
        save(writer, 4, second)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").mkdir()
    third = save(writer, 5)
    assert newest_sound(RunStore(tmp_path / "b"), step_of) == (third, 5)
    assert (tmp_path / "b" / "committed.json").exists()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.mark.parametrize("stores", [1, 3])
def test_objects_that_were_deleted_from_a_bucket(server: S3Server, stores: int) -> None:
    url, options = [f"s3://{new_bucket(server)}/run" for _ in range(stores)], storage_options(server)
    store = RunStore(url, storage_options=options)
    writer = store.writer()
    first = save(writer, 1)
    second = save(writer, 2, first)
    objects = store.objects
    objects.delete([first.chain[0].key])
    with pytest.raises(ChainError, match="save a base"):
        save(writer, 3, second)
    third = save(writer, 3)
    assert newest_sound(RunStore(url, storage_options=options), step_of) == (third, 3)
    objects.delete([info.key for info in objects.list("commits/")])
    with pytest.raises(StoreError, match="lists no checkpoint"):
        newest_sound(RunStore(url, storage_options=options), step_of)


# ---- junk


@pytest.mark.parametrize("mode", ["auto", "single-writer"])
@pytest.mark.parametrize("junk", ["9999999999", "9999999998", "0005000000"])
def test_junk_with_a_high_number_bricks_nothing(
    fake: FakeObjects | FakeSet, junk: str, mode: Literal["auto"]
) -> None:
    fake.put(f"commits/{junk}.json", b"")
    store = opened(fake)
    writer = store.writer(mode=mode)
    for step in (4, 5):
        save(writer, step)
    with pytest.warns(ShrinkpointWarning, match=junk):
        assert [(m.step, m.seq) for m in store.manifests()] == [(5, 4), (4, 3), (3, 2), (2, 1), (1, 0)]


def test_junk_beside_the_newest_keeps_its_number(fake: FakeObjects | FakeSet) -> None:
    fake.put("commits/0000000005.json", b"")
    assert save(opened(fake).writer(), 4).seq == 6
