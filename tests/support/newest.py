"""The newest checkpoint whose every byte is sound."""

from collections.abc import Callable
from typing import TypeVar

from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore

T = TypeVar("T")


def newest_sound(store: RunStore, accept: Callable[[Manifest, list[bytes]], T]) -> tuple[Manifest, T] | None:
    """What `RunStore.newest_readable` finds where a reader takes the containers of the whole chain."""
    return store.newest_readable(lambda manifest: accept(manifest, store.fetch(manifest)))
