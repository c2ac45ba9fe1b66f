"""From a URL, or several, to the object store that holds what lies below; and single files at a path or URL."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from shrinkpoint.errors import ChainError, ConfigError, FormatError, StoreError
from shrinkpoint.store.generic import GenericObjects
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.objects import (
    CredentialsError,
    MissingKeyError,
    ObjectsBelow,
    ObjectStore,
    TransientStoreError,
)
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.s3 import S3Objects
from shrinkpoint.store.urls import Location, RunUrl, Stores, parse_url, split_urls

T = TypeVar("T")

_MAX_FILE_BYTES = 2**40

Options: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""Options of fsspec's file system, or what returns them, and is called again when credentials are refused."""

StorageOptions: TypeAlias = Options | Sequence[Options | None] | None
"""Of one store; for several URLs one for all but folders, or a list of as many."""

# One of several stores: where another one can serve, it is not worth minutes.
_PATIENCE = RetryPolicy(attempts=3, max_delay_s=5.0, deadline_s=20.0)


_reads_anyway: ContextVar[bool] = ContextVar("_reads_anyway", default=False)


@contextmanager
def reading_anyway(wanted: bool) -> Iterator[None]:
    """Let runs in several stores that are opened in this block be read from however few answer, if `wanted`."""
    token = _reads_anyway.set(wanted)
    try:
        yield
    finally:
        _reads_anyway.reset(token)


def open_objects(url: RunUrl, storage_options: StorageOptions = None) -> ObjectStore:
    """Return the object store below ``url``; nothing is read, written or connected yet.

    Args:
        url: One URL, or those of several stores that are to hold one run together.
        storage_options: For the file systems.

    Raises:
        ConfigError: The URLs or the options cannot work.
        MissingDependencyError: The package for a URL's protocol is not installed.
    """
    urls = split_urls(url)
    if len(urls) == 1:
        if isinstance(storage_options, list | tuple) and len(storage_options) == 1:
            storage_options = storage_options[0]
        return open_location(parse_url(urls[0]), storage_options)  # type: ignore[arg-type]
    locations = [parse_url(one) for one in urls]
    options = _options_of_each(locations, storage_options)
    _check_apart(locations, options)
    stores = [
        RetryingObjects(open_location(location, each, remakes=False), _PATIENCE)
        for location, each in zip(locations, options, strict=True)
    ]
    from shrinkpoint.store.striped.objects import StripedObjects  # most runs have one store

    return StripedObjects(stores, parity=Stores.of(url).parity, read_anyway=_reads_anyway.get())


def _options_of_each(locations: Sequence[Location], options: StorageOptions) -> list[Options | None]:
    if isinstance(options, list | tuple):
        if len(options) != len(locations):
            raise ConfigError(
                f"storage_options has {len(options)} entries for {len(locations)} URLs: give one for each, or one dict for all"
            )
        return list(options)
    given = cast("Options | None", options)
    remote = any(location.kind != "local" for location in locations)
    return [given if location.kind != "local" or not remote else None for location in locations]


def _check_apart(locations: Sequence[Location], options: Sequence[Options | None]) -> None:
    places = [_place(*each) for each in zip(locations, options, strict=True)]
    for (i, first), (j, second) in itertools.permutations(enumerate(places), 2):
        if first == second:
            raise ConfigError(
                f"{locations[i].display} and {locations[j].display} are the same place: what is lost there is lost twice; give"
                " different ones"
            )
        if second[:-1] == first[:-1] and second[-1].startswith(first[-1].rstrip("/") + "/"):
            raise ConfigError(
                f"{locations[j].display} lies in {locations[i].display}: give places that do not contain each other"
            )


def check_outside(url: RunUrl, near: Location) -> None:
    """Refuse a folder of copies that is a store of the run itself, or lies in one, or around one.

    Raises:
        ConfigError: With the two.
    """
    mine = os.path.realpath(near.path)
    for location in map(parse_url, split_urls(url)):
        if location.kind == "local":
            theirs = os.path.realpath(location.path)
            if os.path.commonpath([mine, theirs]) in (mine, theirs):
                raise ConfigError(
                    f"near={near.display} and the run's {location.display} contain each other: copies are made somewhere else,"
                    " in a folder of their own"
                )


def _place(location: Location, options: Options | None) -> tuple[str, str, str]:
    """Kind, server and path: two servers may have a bucket of one name."""
    if location.kind == "local":
        return "local", "", os.path.realpath(location.path)
    kind = location.kind if location.kind == "s3" else location.protocol
    options = options() if callable(options) else options
    given = options if isinstance(options, Mapping) else {}
    inner = given.get("client_kwargs")
    server = given.get("endpoint_url") or (inner.get("endpoint_url") if isinstance(inner, Mapping) else None)
    return kind, str(server or given.get("host") or ""), location.path


def shared_fate(url: RunUrl, storage_options: StorageOptions = None) -> str | None:
    """Return which of several stores are lost together, as far as can be seen: folders on one device, prefixes in one bucket."""
    locations = [parse_url(one) for one in split_urls(url)]
    groups: dict[tuple[object, ...], list[str]] = {}
    for location, options in zip(locations, _options_of_each(locations, storage_options), strict=True):
        kind, server, path = _place(location, options)
        fate: object = _device(path) if kind == "local" else path.partition("/")[0]
        groups.setdefault((kind, server, fate), []).append(location.display)
    shared = [", ".join(group) for group in groups.values() if len(group) > 1]
    return "; ".join(shared) or None


def _device(path: str) -> int:
    """Of a folder, or of the one that it would be made in."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.stat(folder).st_dev


class RenewingObjects(ObjectsBelow):
    """An :class:`ObjectStore` that is opened again, with what a function gives then, where credentials are refused.

    Args:
        location: The parsed URL.
        ask: Gives the options.
    """

    def __init__(self, location: Location, ask: Callable[[], Mapping[str, Any]]) -> None:
        self._location, self._ask = location, ask
        super().__init__(self._opened())

    def _opened(self) -> ObjectStore:
        try:
            options = self._ask()
        except Exception as error:
            raise CredentialsError(
                f"storage_options, called for {self._location.display}, failed: {type(error).__name__}: {error}"
            ) from error
        return open_location(self._location, options)

    def _do(self, work: Callable[[ObjectStore], T]) -> T:
        inner = self.inner
        try:
            return work(inner)
        except (MissingKeyError, TransientStoreError):
            raise
        except StoreError:  # not every server says so where a token has expired
            if self.inner is inner:  # else another thread has renewed it
                self.inner = self._opened()
        return work(self.inner)


def open_location(
    location: Location, storage_options: Options | None = None, *, remakes: bool = True
) -> ObjectStore:
    """Return the object store below a parsed URL.

    Args:
        location: The parsed URL.
        storage_options: For its file system.
        remakes: Whether a folder that vanishes is made again; one of several stores is to be healed instead.

    Raises:
        ConfigError: The options are no mapping, or are for a folder, which has none.
    """
    if callable(storage_options):
        return RenewingObjects(location, storage_options)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ConfigError(
            f"storage_options must be a dict, not a {type(storage_options).__name__}, such as {{'anon': True}}, a function that returns one, or None"
        )
    options = dict(storage_options or {})
    if location.kind == "local":
        if options:
            raise ConfigError(
                f"storage_options {sorted(options)} have no meaning for the folder {location.display}: drop them"
            )
        return LocalObjects(location.path, remakes=remakes)
    if location.kind == "s3":
        return S3Objects(location, options)
    return GenericObjects(location, options)


# ---- one file without a run


def looks_like_file(url: str) -> bool:
    """Return whether ``url`` means one container rather than a run."""
    if len(split_urls(url)) > 1:
        return False
    if url.rstrip("/").endswith(".shrink"):
        return True
    return "://" not in url and os.path.isfile(os.path.expanduser(url))


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Put the file's name before what is wrong with its contents: a container does not know where it lies."""
    try:
        yield
    except (FormatError, ChainError) as error:
        raise type(error)(f"{file}: {error}") from error


def write_file(url: str | os.PathLike[str], data: bytes, storage_options: Options | None = None) -> None:
    """Write ``data`` durably; an existing file is replaced in one step, and stays whole when this fails.

    Raises:
        ConfigError: The URL or the options cannot work.
        MissingDependencyError: The package for the URL's protocol is not installed.
        StoreError: The file cannot be written.
    """
    objects, name = _open(url, storage_options)
    objects.put(name, data)


def read_file(url: str | os.PathLike[str], storage_options: Options | None = None) -> bytes:
    """Return the whole file; its checksums are the caller's business.

    Raises:
        ConfigError: The URL or the options cannot work.
        MissingDependencyError: The package for the URL's protocol is not installed.
        StoreError: The file is absent or cannot be read.
    """
    objects, name = _open(url, storage_options)
    return objects.get(name, max_size=_MAX_FILE_BYTES)


def _open(url: str | os.PathLike[str], storage_options: Options | None) -> tuple[ObjectStore, str]:
    location = parse_url(url)
    folder, _, name = location.path.rpartition("/")
    if not name or (location.kind == "s3" and not folder):
        raise ConfigError(f"{location.display} names no file: add one, as in {location.display}/model.shrink")
    display = location.display[: -len(name)].rstrip("/")
    inside = replace(location, path=folder or ("/" if location.kind == "local" else ""), display=display)
    return RetryingObjects(open_location(inside, storage_options), RetryPolicy()), name
