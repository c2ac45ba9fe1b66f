"""The folder store: what reaches the disk in which order, and what a failing disk leads to."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.newest import newest_sound

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store import local
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.objects import MissingKeyError, TransientStoreError
from shrinkpoint.store.run import RunStore

KEY = "commits/0000000000.json"


def failing(code: int, times: int = 10**9) -> Callable[..., Any]:
    left = [times]

    def fail(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture(params=[1, 3], ids=["one", "several"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Where a run is, in one folder or in three."""
    return [tmp_path / f"run{number}" for number in range(request.param)]


def temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob(".tmp-*"))


def test_order_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File before link, link before folder, and each new folder in its parent before anything in it counts."""
    events: list[str] = []
    names: dict[int, str] = {}

    def record(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            if name == "open":
                names[result] = os.path.relpath(arguments[0], tmp_path)
            else:
                events.append(f"{name} {describe(*arguments)}")
            return result

        monkeypatch.setattr(os, name, wrapper)

    def short(path: Any) -> str:
        text = names[path] if isinstance(path, int) else os.path.relpath(path, tmp_path)
        return ".tmp" if ".tmp-" in text else text

    record("open", short)
    record("fsync", short)
    record("mkdir", lambda path, *rest: short(path))
    record("link", lambda source, target: short(target))
    record("unlink", short)
    assert LocalObjects(str(tmp_path / "a" / "run")).put_if_absent(KEY, b"data")
    assert events == [
        "mkdir a",
        "mkdir a/run",
        "mkdir a/run/commits",
        "fsync .",
        "fsync a",
        "fsync a/run",
        "fsync .tmp",
        f"link a/run/{KEY}",
        "unlink .tmp",
        "fsync a/run/commits",
    ]


def test_deletion_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LocalObjects(str(tmp_path))
    objects.put(KEY, b"x")
    synced: list[Path] = []
    monkeypatch.setattr(local, "_sync_folder", synced.append)
    objects.delete([KEY])
    assert synced == [tmp_path / "commits"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "I/O error"),
        (errno.EACCES, "permission"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_failing_disk(
    call: str, code: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = LocalObjects(str(tmp_path / "run"))
    objects.put_if_absent("format.json", b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(StoreError, match=advice) as caught:
            objects.put_if_absent(KEY, b"data")
    assert str(tmp_path / "run") in str(caught.value)
    assert not isinstance(caught.value, TransientStoreError)
    assert temporaries(tmp_path) == []
    assert [info.key for info in objects.list("")] == ["format.json"]
    assert objects.put_if_absent(KEY, b"data")


def test_full_disk_leaves_the_run_restorable(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(places)
    writer = store.writer()
    base = writer.commit(b"base", step=1, kind="base", parent=None, state_digest="", meta={})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(errno.ENOSPC))
        with pytest.raises(StoreError, match="free space"):
            writer.commit(b"more", step=2, kind="delta", parent=base, state_digest="", meta={})
    assert newest_sound(store, lambda manifest, blobs: blobs) == (base, [b"base"])
    assert writer.commit(b"more", step=3, kind="delta", parent=base, state_digest="", meta={}).seq == 1
    assert [path for place in places for path in temporaries(place)] == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:7])))
    objects = LocalObjects(str(tmp_path))
    objects.put(KEY, b"0123456789" * 10)
    assert objects.get(KEY, max_size=100) == b"0123456789" * 10


@pytest.mark.parametrize("refused", [["link"], ["link", "rename"]])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links(
    refused: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    if "rename" in refused:
        monkeypatch.setattr(local, "_rename_no_replace", failing(errno.EINVAL))
    objects = LocalObjects(str(tmp_path))
    assert objects.put_if_absent(KEY, b"first")
    assert not objects.put_if_absent(KEY, b"second")
    assert objects.get(KEY, max_size=10) == b"first"
    assert temporaries(tmp_path) == []


def test_last_fallback_takes_back_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LocalObjects(str(tmp_path))
    real, calls = os.fsync, [0]

    def second_fails(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, "full")
        real(descriptor)

    objects.put("commits/0000000009.json", b"")
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(local, "_rename_no_replace", failing(errno.EINVAL))
    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(StoreError, match="full"):
        objects.put_if_absent(KEY, b"first")
    assert objects.list(KEY) == []


def test_last_fallback_says_why_it_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LocalObjects(str(tmp_path))
    real = os.open

    def full(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and ".tmp-" not in str(path):
            raise OSError(errno.ENOSPC, "full")
        return real(path, flags, *mode)

    objects.put("commits/0000000009.json", b"")
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(local, "_rename_no_replace", failing(errno.EINVAL))
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(StoreError, match="free space") as caught:
        objects.put_if_absent(KEY, b"first")
    assert not isinstance(caught.value, TransientStoreError)
    assert temporaries(tmp_path) == []


def test_folder_below_a_file(tmp_path: Path, places: list[Path]) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = RunStore([*places[1:], tmp_path / "file" / "run"])
    for attempt in (store.writer, store.exists, store.manifests):
        with pytest.raises(StoreError, match="not a folder") as caught:
            attempt()
        assert str(tmp_path / "file") in str(caught.value)


def test_unlistable_folder_is_an_error_and_no_empty_run(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(places)
    with store.writer() as writer:
        writer.commit(b"base", step=1, kind="base", parent=None, state_digest="", meta={})
    monkeypatch.setattr(os, "scandir", failing(errno.EACCES))
    with pytest.raises(StoreError, match="permission"):
        newest_sound(store, lambda manifest, blobs: blobs)


def test_folder_removed_under_a_writer(tmp_path: Path) -> None:
    objects = LocalObjects(str(tmp_path / "run"))
    objects.put(KEY, b"x")
    for path in (tmp_path / "run" / KEY, tmp_path / "run" / "commits", tmp_path / "run"):
        path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(TransientStoreError, match="vanished"):
        objects.put(KEY, b"y")
    objects.put(KEY, b"y")
    assert objects.get(KEY, max_size=1) == b"y"


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    os.mkfifo(tmp_path / KEY)
    with pytest.raises(CorruptionError, match="regular file"):
        LocalObjects(str(tmp_path)).get(KEY, max_size=10)


def test_sweep_takes_only_old_files_of_ours(tmp_path: Path) -> None:
    objects = LocalObjects(str(tmp_path))
    objects.put(KEY, b"x")
    old, young, foreign = (
        tmp_path / "commits" / name
        for name in (".tmp-0123456789abcdef", ".tmp-fedcba9876543210", ".tmp-of-another-program")
    )
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign):
        os.utime(path, (1000, 1000))
    assert objects.sweep(2000.0) == 1
    assert not old.exists()
    assert young.exists()
    assert foreign.exists()
    assert (tmp_path / KEY).exists()


def test_temporary_files_are_never_listed(tmp_path: Path) -> None:
    objects = LocalObjects(str(tmp_path))
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / ".tmp-0123456789abcdef").write_bytes(b"half")
    assert objects.list("") == []
    assert newest_sound(RunStore(tmp_path), lambda manifest, blobs: blobs) is None


def test_absent_object(tmp_path: Path) -> None:
    with pytest.raises(MissingKeyError, match=str(tmp_path)):
        LocalObjects(str(tmp_path)).get(KEY, max_size=1)
