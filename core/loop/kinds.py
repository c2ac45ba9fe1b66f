"""The saver of each kind of hand-written training (one process, shards, copies in several processes), and the way back to a state."""

import copy
from collections.abc import Callable

from shrinkpoint.config import SaverConfig
from shrinkpoint.loop.objects import LoopObjects
from shrinkpoint.loop.replicas import ReplicatedObjects, ReplicatedSaver, replicated_saver
from shrinkpoint.loop.sharded import ShardedObjects, sharded_saver
from shrinkpoint.runtime.processes import rank, world_size
from shrinkpoint.saver import Saver
from shrinkpoint.sharded.saver import ShardedSaver
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.urls import RunUrl
from shrinkpoint.warn import warn

__all__ = ["LoopSaver", "saver_for", "warn_of_copies", "way_back"]

LoopSaver = Saver | ShardedSaver | ReplicatedSaver


def saver_for(
    objects: LoopObjects,
    url: RunUrl,
    config: SaverConfig,
    *,
    storage_options: StorageOptions,
    parity: int | None,
    evaluated: bool,
    tried: bool,
) -> LoopSaver:
    """The saver for the objects' kind.

    Args:
        objects: of the loop.
        url: as of `Checkpointer`, like `config`, `storage_options` and `parity`.
        config: see there.
        storage_options: see there.
        parity: see there.
        evaluated: whether a way to measure losses was given.
        tried: whether steps from a restored state can be tried.
    """
    match objects:
        case ShardedObjects():
            return sharded_saver(
                url,
                config,
                objects,
                storage_options=storage_options,
                parity=parity,
                evaluated=evaluated,
            )
        case ReplicatedObjects():
            return replicated_saver(url, config, storage_options=storage_options, parity=parity, tried=tried)
        case _:
            return Saver(url, config, storage_options=storage_options, parity=parity)


def warn_of_copies() -> None:
    """Warn, on every process but the first one, that copies of a model are each saved to one run."""
    if rank() == 0:
        return
    warn(
        f"this is process {rank()} of {world_size()}, and the model is not sharded: processes that save to one run"
        " stop each other. Make the Checkpointer in process 0 alone, and broadcast what it resumes; or use a framework's callback;"
        " or give each process a run of its own"
    )


def way_back(objects: LoopObjects, saver: LoopSaver, manifest: Manifest | None) -> Callable[[], None]:
    """A function that restores the present state: that of a checkpoint, or of a fresh start.

    Both are called on the first process alone, and call nothing that communicates with others.

    Args:
        objects: in that state.
        saver: of their kind.
        manifest: of the checkpoint; None for a fresh start.
    """
    fresh = copy.deepcopy(LoopObjects.state(objects, 0)) if manifest is None else None

    def reload() -> None:
        if manifest is None:  # a copy, since an optimizer may keep and change it
            LoopObjects.load(objects, copy.deepcopy(fresh), saver.url, warns=False)
            return
        if isinstance(saver, ReplicatedSaver):
            again = saver.restore_alone(manifest)
        else:
            again = saver.restore(manifest, adopt=False)
        assert again is not None
        LoopObjects.load(objects, again.state.to_object(), saver.url, warns=False)

    return reload
