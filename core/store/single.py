"""One file without a run: written whole or not at all, read whole, at a path or URL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from shrinkpoint.errors import ChainError, ConfigError, FormatError
from shrinkpoint.store.connect import Options, open_location
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.urls import parse_url, split_urls

__all__ = ["looks_like_file", "naming", "read_file", "write_file"]

_MAX_FILE_BYTES = 2**40


def looks_like_file(url: str) -> bool:
    """Whether ``url`` means one container rather than a run."""
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
    """The whole file; its checksums are the caller's business.

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
