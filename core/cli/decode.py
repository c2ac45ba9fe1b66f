"""Reads single container files by ranges, and whole checkpoints of a run or such a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import fsspec

from shrinkpoint.cli.options import addressed
from shrinkpoint.cli.runs import open_run, pick
from shrinkpoint.errors import ConfigError, NoCheckpointError, StoreError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.single import looks_like_file, naming
from shrinkpoint.store.urls import parse_url

if TYPE_CHECKING:
    from shrinkpoint.coding.selective import Decoded
    from shrinkpoint.store.manifest import Manifest

__all__ = ["ContainerFile", "Loaded", "load"]


class ContainerFile:
    """One file, read by ranges.

    Args:
        url: the file.
        options: for the URL's file system.

    Raises:
        ConfigError, MissingDependencyError: the URL cannot work.
        StoreError: the file is absent or cannot be read.
    """

    def __init__(self, url: str, options: StorageOptions) -> None:
        location = parse_url(url)
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"{location.display} is one file: give its storage options as one JSON object")
        self.url = location.display
        try:
            # A cached listing may be older than the file.
            self._files = fsspec.filesystem(
                location.protocol, skip_instance_cache=True, use_listings_cache=False, **(options or {})
            )
            self._path = location.path
            info = self._files.info(self._path)
        except Exception as error:  # each file system has errors of its own
            raise _translate(error, self.url) from error
        if info.get("type") == "directory":
            raise StoreError(f"{self.url} is a folder, not a container file")
        self.size = int(info["size"])

    def read(self, offset: int, length: int) -> bytes:
        """That many bytes from `offset`.

        Raises:
            StoreError: the file cannot be read.
        """
        try:
            return bytes(self._files.cat_file(self._path, start=offset, end=offset + length))
        except Exception as error:
            raise _translate(error, self.url) from error


def _translate(error: Exception, url: str) -> StoreError:
    if isinstance(error, FileNotFoundError):
        return StoreError(f"{url} does not exist")
    return StoreError(f"cannot read {url}: {error or type(error).__name__}")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read, decoded and verified by its digests."""

    shown: str
    """Its location."""
    decoded: "Decoded"
    bytes: int
    """Bytes of its own container."""
    manifest: "Manifest | None"
    """None of a single file."""


def load(url: str, options: StorageOptions, step: int | None = None, seq: int | None = None) -> Loaded:
    """Read the checkpoint that the URL and the options name; by default a run's newest sound one.

    Raises:
        ConfigError: several of these name a checkpoint.
        NoCheckpointError: there is none.
        FormatError, ChainError: it is damaged.
        StoreError: it cannot be read.
    """
    address = addressed(url, step, seq)
    url = address.url
    with waiting_for(f"reading {url}") as waiting:
        from shrinkpoint.coding.selective import decode_chain, decode_checkpoint, in_memory
        from shrinkpoint.config import SaverConfig

        threads = SaverConfig().encoder_threads
        if looks_like_file(url):
            file = ContainerFile(url, options)
            with naming(file.url):
                decoded = decode_chain([in_memory(file.read(0, file.size))], threads=threads)
            return Loaded(file.url, decoded, file.size, None)
        run = open_run(url, options)
        if address.is_newest:
            found = run.store.newest_readable(lambda m: decode_checkpoint(run.store, m, threads=threads))
            if found is None:
                raise NoCheckpointError(
                    f"{run.store.display} is a run without a checkpoint yet: there is nothing to read"
                )
            manifest, decoded = found
        else:
            manifest = pick(run, address)
            waiting.say(f"reading step {manifest.step} of {run.store.display}")
            decoded = decode_checkpoint(run.store, manifest, threads=threads)
        return Loaded(run.store.display, decoded, manifest.chain[-1].total, manifest)
