"""Single container files at any URL, without a run around them."""

from collections.abc import Mapping

import fsspec

from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.urls import parse_url

__all__ = ["ContainerFile"]


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
