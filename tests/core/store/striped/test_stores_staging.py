"""Manifests that folders take before the container is there: never seen before they count, and never in the wrong place."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.errors import StoreError
from shrinkpoint.store.local import LocalObjects, StagedFile
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore, RunWriter
from shrinkpoint.store.striped import StripedObjects

KEY = "commits/0000000000.json"


def save(writer: RunWriter, step: int = 1) -> Manifest:
    return writer.commit(b"x" * 100, step=step, kind="base", parent=None, state_digest="", meta={})


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


def temporaries(folders: list[Path], seconds: float = 5.0) -> list[Path]:
    """What is left of what was staged, once those in the background are done with it."""
    end = time.monotonic() + seconds
    while left := [path for folder in folders for path in folder.rglob(".tmp-*")]:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return left


def test_all_folders_have_it_before_the_container_counts(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six files are staged at once; the manifest has its name in the first store, then in the others."""
    writer = RunStore(folders).writer()
    save(writer)
    events: list[tuple[str, str]] = []
    at_once = threading.Barrier(6, timeout=10)
    stage, publish = LocalObjects.stage, StagedFile.publish

    def staged(self: LocalObjects, key: str, parts: Any) -> StagedFile:
        at_once.wait()
        return stage(self, key, parts)

    def published(self: StagedFile, *, exclusive: bool) -> bool:
        result = publish(self, exclusive=exclusive)
        events.append((self._final.parent.name, self._final.parents[1].name))
        return result

    monkeypatch.setattr(LocalObjects, "stage", staged)
    monkeypatch.setattr(StagedFile, "publish", published)
    save(writer, 2)
    assert sorted(events[:3]) == [("data", name) for name in "abc"]
    assert events[3] == ("commits", "a")
    assert sorted(events[4:]) == [("commits", "b"), ("commits", "c")]


def test_who_loses_leaves_nothing_behind(folders: list[Path]) -> None:
    first, second = (StripedObjects([LocalObjects(str(folder)) for folder in folders]) for _ in range(2))
    assert first.put_if_absent(KEY, b"first")
    second.make_ready(KEY, b"second")
    assert not second.put_if_absent(KEY, b"second")
    assert first.get(KEY, max_size=10) == b"first"
    assert temporaries(folders) == []


def test_what_was_made_ready_for_another_record_is_dropped(folders: list[Path]) -> None:
    objects = StripedObjects([LocalObjects(str(folder)) for folder in folders])
    objects.put("probe/x", b"")
    objects.make_ready(KEY, b"manifest")
    objects.make_ready(KEY, b"another")
    assert objects.put_if_absent(KEY, b"a third")
    assert objects.get(KEY, max_size=10) == b"a third"
    assert temporaries(folders) == []


def test_a_container_that_fails_takes_the_manifest_with_it(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunStore(folders).writer()
    with monkeypatch.context() as patch:
        stage = LocalObjects.stage

        def full(self: LocalObjects, key: str, parts: Any) -> StagedFile:
            if key.startswith("data/"):
                raise StoreError("the disk is full")
            return stage(self, key, parts)

        patch.setattr(LocalObjects, "stage", full)
        with pytest.raises(StoreError, match="full"):
            save(writer)
    assert temporaries(folders) == []
    assert RunStore(folders).manifests() == []


@pytest.mark.parametrize("exchanged", [0, 2])
def test_a_disk_that_is_unmounted_in_between_takes_nothing(
    folders: list[Path], exchanged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was staged lies on the disk that has gone; the empty folder in its place is none of the set."""
    store = RunStore(folders)
    writer = store.writer()
    save(writer)
    mount, away = folders[exchanged], folders[exchanged].with_suffix(".away")
    assert store.stores is not None
    put = store.stores._blobs.put

    def unmount(key: str, data: bytes) -> None:
        put(key, data)
        ready = store.stores._records._ready[2]  # type: ignore[union-attr]
        assert sorted(ready) == [0, 1, 2]
        assert all(future.result() for future in ready.values())
        mount.rename(away)
        mount.mkdir()

    monkeypatch.setattr(store.stores._blobs, "put", unmount)
    second = save(writer, 2)
    assert list(mount.rglob("*.json")) == []
    assert next(m.digest for m in RunStore(folders).manifests()) == second.digest
    assert store.redundancy == 0
