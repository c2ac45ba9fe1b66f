"""A folder as an object store that survives power loss: nothing is visible before it is whole and on the disk."""

import ctypes
import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store.keys import is_own_key, new_nonce
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo, TransientStoreError

_SUFFIXES = {".json", ".shrink"}
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_REFUSED = {
    errno.EPERM,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EMLINK,
    errno.EXDEV,
}
# A file system that cannot sync a directory says so with one of these; it has nothing more to give.
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNRESET,
    errno.EINTR,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_ADVICE = {
    errno.ENOSPC: "the disk is full: free space or keep fewer checkpoints",
    errno.EDQUOT: "the disk quota is used up: free space or keep fewer checkpoints",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "no permission: check the owner and mode of the folder",
    errno.EPERM: "not permitted: check the owner, mode and flags of the folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another folder",
    errno.EIO: "the disk reports an I/O error: check the device, and do not trust it",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}


class LocalObjects:
    """Objects are files below ``root``; each write is a temporary file, fsync, link, fsync of the folder.

    Args:
        root: The run's folder, absolute; made when first written to.
        remakes: Whether it is made again where it vanishes.
    """

    create_is_atomic = True

    def __init__(self, root: str, *, remakes: bool = True) -> None:
        self._root, self._remakes = Path(root), remakes
        self._synced: set[Path] = set()
        self._seen = False

    @property
    def display(self) -> str:
        """The folder."""
        return str(self._root)

    def show(self, key: str) -> str:
        """Return the file of ``key``."""
        return str(self._root / key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        return self._put(key, data, exclusive=True)

    def put(self, key: str, data: bytes) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        self._put(key, data, exclusive=False)

    def _put(self, key: str, data: bytes, *, exclusive: bool) -> bool:
        """Have the bytes on the disk under a temporary name, then give the object its own; returns whether it has it now."""
        final, created = self._root / key, True
        # Every attempt has its own file: after a failed fsync, the kernel may have dropped the pages of the old one.
        temporary = final.parent / f".tmp-{new_nonce()}"
        with self._translated("write", key):
            try:
                self._prepare(final.parent)
                _write_synced(temporary, data)
                try:
                    if exclusive:
                        created = _publish_exclusive(temporary, final, data)
                    else:
                        os.replace(temporary, final)
                finally:
                    _remove(temporary)
                # Also when it existed: it may be ours, from an attempt whose own sync of the folder failed.
                _sync_folder(final.parent)
            except FileNotFoundError:
                self._synced.clear()  # the folder was removed under us; the next attempt makes it again, if it may
                raise TransientStoreError(f"cannot write {final}: its folder vanished") from None
        return created

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        path = self._root / key
        with self._translated("read", key):
            # A FIFO or device put here by someone else would block or never end.
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise CorruptionError(
                    f"{path} is a folder, not a file; of a run's folder, `shrinkpoint export` makes a file"
                )
            if not stat.S_ISREG(mode):
                raise CorruptionError(f"{path} is not a regular file")
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size
                first, last = start or 0, size if end is None else end
                if last > size or last - first > max_size:
                    raise CorruptionError(f"{path} has {size} bytes, which is not what its manifest says")
                return _read(descriptor, first, last)
            finally:
                os.close(descriptor)

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        with self._translated("list", prefix):
            found: list[ObjectInfo] = []
            for path in _files_below(self._root / prefix.rpartition("/")[0]):
                key = path.relative_to(self._root).as_posix()
                if _TEMPORARY.fullmatch(path.name) or not key.startswith(prefix):
                    continue
                with suppress(FileNotFoundError):  # removed since the folder was read
                    found += _info(key, path)
                if len(found) == limit:
                    break
            return found

    def delete(self, keys: Collection[str]) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        paths = [self._root / key for key in keys]
        with self._translated("delete from", ""):
            for path in paths:
                _remove(path)
            # In this order on the disk too: what names a blob must not come back after a crash when the blob is gone.
            for folder in {path.parent for path in paths}:
                with suppress(FileNotFoundError):
                    _sync_folder(folder)

    def server_time(self) -> float:
        """Return the time stamp that a new file gets: on a network file system, the server's clock."""
        with self._translated("write", ""):
            self._prepare(self._root)
            path = self._root / f".tmp-{new_nonce()}"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                os.utime(self._root)  # takes no space, and collections are for full disks
                return os.stat(self._root).st_mtime
            try:
                return os.fstat(descriptor).st_mtime
            finally:
                os.close(descriptor)
                os.unlink(path)

    def sweep(self, before: float) -> int:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        removed = 0
        with self._translated("clean", ""):
            for path in _files_below(self._root):
                if _TEMPORARY.fullmatch(path.name):
                    with suppress(FileNotFoundError):
                        if path.stat().st_mtime < before:
                            os.unlink(path)
                            removed += 1
        return removed

    def _prepare(self, folder: Path) -> None:
        """Make ``folder`` and its parents, each one durable in its own parent."""
        if folder in self._synced:
            return
        made: list[Path] = []
        missing = folder
        if self._seen and not (self._remakes or self._root.exists()):
            raise StoreError(
                f"{self._root} is gone, and is not made again: it may be a disk that was unmounted, or have been removed"
            )
        while not missing.exists():
            if missing.is_symlink():
                raise StoreError(
                    f"{missing} is a link to {os.readlink(missing)}, which does not exist: mount or make that, or remove the link"
                )
            made.append(missing)
            missing = missing.parent
        for path in reversed(made):
            with suppress(FileExistsError):
                os.mkdir(path)
        # Folders of the run itself are synced once even if they exist: who made them may have died before the sync.
        inside = {
            path for path in (folder, *folder.parents) if path == self._root or self._root in path.parents
        }
        for path in sorted(inside | set(made), key=lambda path: len(path.parts)):
            try:
                _sync_folder(path.parent)
            except PermissionError:
                if path in made:
                    raise
        self._synced.add(folder)
        self._seen = True

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _translate(error, f"cannot {verb} {self._root / key}") from error


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _translate(error: OSError, what: str) -> StoreError:
    reason = f"{what}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return MissingKeyError(reason)
    if error.errno in _TRANSIENT:
        return TransientStoreError(reason)
    advice = _ADVICE.get(error.errno or 0)
    return StoreError(f"{reason}; {advice}" if advice else reason)


def _read(descriptor: int, first: int, last: int) -> bytes:
    """Return these bytes; fewer where the file has become shorter."""
    data = os.pread(descriptor, last - first, first)
    while len(data) < last - first and (
        more := os.pread(descriptor, last - first - len(data), first + len(data))
    ):
        data += more
    return data


def _write_synced(path: Path, data: bytes) -> None:
    """Write a new file; where that fails, nothing is left of it: half a format.json would block the run."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except BaseException:
        _remove(path)
        raise
    finally:
        os.close(descriptor)


def _publish_exclusive(temporary: Path, final: Path, data: bytes) -> bool:
    """Give ``temporary`` its final name unless that is taken; link, else renameat2, else an exclusive create."""
    for publish in (os.link, _rename_no_replace):
        try:
            publish(temporary, final)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
    try:
        # Exclusive, but visible before it is whole: a crash leaves a manifest that its checksum gives away.
        _write_synced(final, data)
    except FileExistsError:
        return False
    return True


def _rename_no_replace(source: Path, target: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _info(key: str, path: Path) -> list[ObjectInfo]:
    """Return a listing's entry; what is there by name alone (a link that leads nowhere, a folder) has no size and no age."""
    try:
        status = path.stat()
    except FileNotFoundError:
        path.lstat()  # raises again where the name is gone, too
    else:
        if not stat.S_ISDIR(status.st_mode):
            return [ObjectInfo(key=key, size=status.st_size, modified=status.st_mtime)]
        if not is_own_key(key):
            return []
    return [ObjectInfo(key=key, size=0, modified=None)]


def _files_below(folder: Path) -> Iterator[Path]:
    """Files, links and folders in a file's place, at any depth, in name order; an unreadable folder raises, an absent one is
    empty.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, files in os.walk(folder, onerror=failed):
        folders.sort()
        for name in sorted(files + [name for name in folders if Path(name).suffix in _SUFFIXES]):
            yield Path(parent, name)
