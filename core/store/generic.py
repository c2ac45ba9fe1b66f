"""An fsspec file system as an object store, by what all of them have: whole-file writes, reads, listings."""

import errno
import inspect
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import fsspec

from shrinkpoint.errors import ConfigError, CorruptionError, MissingDependencyError, StoreError
from shrinkpoint.store.keys import probe_key
from shrinkpoint.store.objects import CredentialsError, MissingKeyError, ObjectInfo, TransientStoreError
from shrinkpoint.store.urls import Location

# In the names of the errors of clouds' own libraries, as google.auth's RefreshError and azure's ClientAuthenticationError.
_OF_CREDENTIALS = ("Auth", "Credential", "Expired", "Refresh", "Token")
_TIME_FIELDS = ("mtime", "modified", "last_modified", "LastModified", "updated", "created")
_PERMANENT = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
# memory:// checks and creates in two steps; all of its users are threads of this process.
_MEMORY_LOCK = threading.Lock()


class GenericObjects:
    """Objects below a prefix of an fsspec file system.

    Args:
        location: The parsed URL.
        options: ``storage_options`` of that file system.
    """

    def __init__(self, location: Location, options: Mapping[str, Any]) -> None:
        self._location = location
        self._options = dict(options)
        self._filesystems: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Connections and event loops survive neither pickling nor a spawn.
        return {**self.__dict__, "_filesystems": {}}

    @property
    def display(self) -> str:
        """The URL."""
        return self._location.display

    @property
    def create_is_atomic(self) -> bool | None:
        """Known for memory:// alone."""
        return True if self._location.protocol == "memory" else None

    def show(self, key: str) -> str:
        """Return the URL of ``key``."""
        return self._location.show(key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        with self._translated("write", key):
            if self.create_is_atomic:
                with _MEMORY_LOCK:
                    if self._filesystem.exists(self._full(key)):
                        return False
                    self._filesystem.pipe_file(self._full(key), data)
                return True
            if "mode" not in inspect.signature(self._filesystem.pipe_file).parameters:
                # This file system knows no condition: overwrite, as a server that ignores it does; the probe finds out.
                self._put(key, data)
                return True
            try:
                self._put(key, data, mode="create")
            except FileExistsError:
                return False
            return True

    def put(self, key: str, data: bytes) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        with self._translated("write", key):
            self._put(key, data)
            size = self._filesystem.info(self._full(key))["size"]
            if size != len(data):
                raise TransientStoreError(
                    f"cannot write {self.show(key)}: {size} of {len(data)} bytes arrived"
                )

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        first = start or 0
        with self._translated("read", key):
            # One byte more than allowed shows an object that is too large without reading it whole.
            stop = first + max_size + 1 if end is None else end
            data: bytes = self._filesystem.cat_file(self._full(key), start=first, end=stop)
        if len(data) > max_size or (end is not None and len(data) != end - first):
            raise CorruptionError(f"{self.show(key)} does not have the size that its manifest says")
        return data

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        below = self._full("").lstrip("/")
        with self._translated("list", prefix):
            found: list[ObjectInfo] = []
            for entry in self._entries_below(self._full(prefix.rpartition("/")[0])):
                key = str(entry["name"]).lstrip("/").removeprefix(below).lstrip("/")
                if key.startswith(prefix) and key:
                    found.append(ObjectInfo(key=key, size=entry["size"] or 0, modified=_time_of(entry)))
                if len(found) == limit:
                    break
            return found

    def delete(self, keys: Collection[str]) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        with self._translated("delete from", ""):
            for key in keys:
                with suppress(FileNotFoundError):
                    self._filesystem.rm_file(self._full(key))

    def server_time(self) -> float:
        """Return the time stamp of an object written for the purpose; this machine's clock where there is none."""
        key = probe_key()
        self.put(key, b"time")
        try:
            stamps = [info.modified for info in self.list(key)]
        finally:
            self.delete([key])
        return next((stamp for stamp in stamps if stamp is not None), time.time())

    def sweep(self, before: float) -> int:
        """Nothing: these file systems show no leftovers of interrupted writes."""
        return 0

    def _put(self, key: str, data: bytes, **how: str) -> None:
        path = self._full(key)
        with _MEMORY_LOCK if self.create_is_atomic else nullcontext():
            self._filesystem.pipe_file(path, data, **how)

    def _full(self, key: str) -> str:
        path = f"{self._location.path}/{key}".rstrip("/")
        return str(self._filesystem._strip_protocol(f"{self._location.protocol}://{path}"))

    def _entries_below(self, folder: str) -> Iterator[dict[str, Any]]:
        # Not find() or walk(): they leave out what could not be listed, and an unlisted checkpoint looks like none.
        try:
            entries = self._filesystem.ls(folder, detail=True)
        except FileNotFoundError:
            return
        for entry in sorted(entries, key=lambda entry: str(entry["name"])):
            if entry["type"] != "directory":
                yield entry
            elif entry["name"].rstrip("/") != folder.rstrip("/"):
                yield from self._entries_below(entry["name"])

    @property
    def _filesystem(self) -> Any:
        """This process's own instance: one inherited through fork may not work, a shared one brings its caches along."""
        found = self._filesystems.get(os.getpid())
        if found is None:
            _forget_loop_in_children()
            found = self._open({**self._options, "use_listings_cache": False, "skip_instance_cache": True})
            self._filesystems = {os.getpid(): found}
        return found

    def _open(self, options: dict[str, Any]) -> Any:
        """Make the file system of these options."""
        try:
            return fsspec.filesystem(self._location.protocol, **options)
        except ImportError as error:
            raise MissingDependencyError(f"{self.display} needs another package: {error}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"storage_options do not fit {self.display}: {error}") from error

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        what = f"cannot {verb} {self.show(key)}"
        try:
            yield
        except (StoreError, CorruptionError, ConfigError, MissingDependencyError):
            raise
        except FileNotFoundError as error:
            raise MissingKeyError(f"{what}: no such object") from error
        except PermissionError as error:
            raise StoreError(f"{what}: {error}: check the credentials and their rights") from error
        except (OSError, EOFError) as error:
            if getattr(error, "errno", None) in _PERMANENT:
                raise StoreError(f"{what}: {error}: free space, or choose another place") from error
            raise TransientStoreError(f"{what}: {type(error).__name__}: {error}") from error
        except Exception as error:
            named = any(part in each.__name__ for each in type(error).__mro__ for part in _OF_CREDENTIALS)
            kind = CredentialsError if named or getattr(error, "code", None) == 401 else StoreError
            raise kind(f"{what}: {type(error).__name__}: {error}") from error


def _time_of(entry: Mapping[str, Any]) -> float | None:
    for field in _TIME_FIELDS:
        value = entry.get(field)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


@lru_cache(maxsize=1)
def _forget_loop_in_children() -> None:
    """Have forked children start an event loop of their own, as newer fsspec does; older ones wait for ever there."""
    from fsspec import asyn

    if hasattr(os, "register_at_fork") and not hasattr(asyn, "reset_after_fork"):
        os.register_at_fork(after_in_child=asyn.reset_lock)
