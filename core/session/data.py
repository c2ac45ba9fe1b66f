"""What is known of a training's data: a resume says how it differs from the run's."""

import sys
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.group.group import world

__all__ = ["in_use", "other_data", "other_processes", "require_same_workers", "sizes_of"]

_WORKERS = "num_workers"
_OWN_REFERENCES = 3  # of a loader to its iterator, and those of the count itself


def sizes_of(loader: Any, name: str = "") -> dict[str, int]:
    """Return the lengths and sizes of a loader or a sampler, as far as it has them; empty for anything else.

    Args:
        loader: its own length is not asked of a torch loader of a stream, which would count the batches from then on.
        name: put before the names of its sizes, where there are several.
    """
    dataset = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    found = {
        "len(dataset)": _length(dataset),
        "len(loader)": None if isinstance(dataset, IterableDataset) else _length(loader),
        "batch_size": getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None),
        _WORKERS: getattr(loader, _WORKERS, None),
    }
    return {f"{name}{key}": value for key, value in found.items() if type(value) is int}


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # noqa: BLE001 - a stream, or a length that is known later only
        return None


def other_data(there: Mapping[str, int], here: Mapping[str, int]) -> str | None:
    """One line where the `sizes_of` this training's data, ``here``, are not the checkpoint's; else None."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    differ = [
        f"{name} is {here.get(name, 'unknown')} here and was {there.get(name, 'unknown')}" for name in names
    ]
    said = f"resume: the training data is not the run's: {', '.join(differ)}. The batches that follow are others, too"
    return said if there and differ else None


def other_processes(stored: int, *, own: bool = True) -> str | None:
    """One line where the processes that saved a position are not these; else None.

    Args:
        stored: how many have saved it.
        own: whether this process's position is known, and not the first one's alone.
    """
    here = world().size
    if stored == here and own:
        return None
    by, now = f"{stored} processes", f"is continued by {here}"
    if stored == here:
        by, now = f"{by} with shards of the model", "is continued without, or was compacted"
    return f"the checkpoint was saved by {by} and {now}: random numbers and the order of samples will differ"


def require_same_workers(loader: Any, state: Any, name: str) -> None:
    """Refuse to give the position of torchdata's loader to one with another number of workers, which cannot take it.

    Args:
        loader: that is to take it; other loaders are let pass.
        state: what its ``state_dict`` gave.
        name: of the loader, for the message.

    Raises:
        StateMismatchError: with both numbers.
    """
    kinds = {kind.__name__ for kind in type(loader).__mro__ if kind.__module__.startswith("torchdata.")}
    if "StatefulDataLoader" not in kinds or not isinstance(state, Mapping) or not state:
        return
    there = state.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers", 0)
    if there != loader.num_workers:
        raise StateMismatchError(
            f"{name} has num_workers={loader.num_workers} here and had {there} in the checkpoint: the position of a StatefulDataLoader"
            f" is divided among its workers. Give it num_workers={there} again"
        )


def in_use(loader: Any) -> bool:
    """Whether a loop is already in the batches of torchdata's loader: a position that is restored takes effect in the next one only.

    Args:
        loader: one whose iterator nothing but the loader itself holds is in no loop, as after ``next(iter(loader))``.
    """
    inner = getattr(loader, "base_dataloader", loader)
    iterator = getattr(inner, "_iterator", None)
    finished = getattr(iterator, "_finished", True)
    return not finished and sys.getrefcount(iterator) > _OWN_REFERENCES
