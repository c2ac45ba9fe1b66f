"""From a URL to the object store that holds what lies below it."""

import os
from collections.abc import Mapping
from typing import Any

from shrinkpoint.errors import ConfigError
from shrinkpoint.store.generic import GenericObjects
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.s3 import S3Objects
from shrinkpoint.store.urls import Location, parse_url

__all__ = ["open_location", "open_objects"]


def open_objects(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> ObjectStore:
    """The object store below ``url``; nothing is read, written or connected yet.

    Raises:
        ConfigError: The URL or the options cannot work.
        MissingDependencyError: The package for the URL's protocol is not installed.
    """
    return open_location(parse_url(url), storage_options)


def open_location(location: Location, storage_options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The object store below a parsed URL.

    Raises:
        ConfigError: The options are no mapping, or are for a folder, which has none.
    """
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ConfigError(
            f"storage_options must be a dict, not a {type(storage_options).__name__}, such as {{'anon': True}}, or None"
        )
    options = dict(storage_options or {})
    if location.kind == "local":
        if options:
            raise ConfigError(
                f"storage_options {sorted(options)} have no meaning for the folder {location.display}: drop them"
            )
        return LocalObjects(location.path)
    if location.kind == "s3":
        return S3Objects(location, options)
    return GenericObjects(location, options)
