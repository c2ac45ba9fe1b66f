"""Skips the batches before a position without reading them, where that gives the same result.

Composer fetches and drops every batch before the position at which it resumes. Where the data depends only on the
sampler's indices, advancing the sampler is equivalent and takes no time.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shrinkpoint.integrations.common.loaders import generators
from shrinkpoint.integrations.common.worker_reads import reads_alike

__all__ = ["SkippingSampler", "can_skip"]

# Samplers whose order is fixed by the generators' states at their start.
_KNOWN = {
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class SkippingSampler:
    """A loader's index sampler from its n-th item on; the items before are drawn and dropped at the first request.

    Args:
        inner: the loader's own.
        count: how many to drop.
        stop: number of items to return; None returns all that are left.
        on_ready: called when they have been dropped.
    """

    def __init__(
        self, inner: Iterable[Any], *, count: int, stop: int | None, on_ready: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._count = count
        self._stop = stop
        self._on_ready = on_ready

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # A generator: samplers draw their seed when the first index is asked for, after the loader has drawn its own.
        indices = iter(self._inner)
        for _ in range(self._count):
            next(indices, None)
        self._on_ready()
        # Composer leaves a sampler before its end, where some draw from their generator once more.
        yield from indices if self._stop is None else itertools.islice(indices, self._stop)


def can_skip(loader: Any, *, count: int, length: int | None) -> bool:
    """Whether skipping gives the same batches, and leaves the same generators, as reading and dropping.

    Args:
        loader: the training data, as yet without an iterator.
        count: batches to skip.
        length: batches of an epoch; None where that is not known.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or length is None:
        return False
    if count > length:  # the data has become shorter: Composer finds the epoch's end
        return False
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = (
        loader.batch_sampler.sampler
    )  # with the user's own batch sampler, loader.sampler is a different one
    if type(sampler) not in _KNOWN:
        return False
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples > len(sampler.data_source)
    ):
        return False  # draws piece by piece
    if _holds_generator(loader.dataset):
        return False
    if not loader.num_workers:
        return True
    # Workers read ahead, so their sampler is beyond the position; the draws since the epoch's start from the user's own
    # generator cannot be separated.
    if generators([loader]) or loader.persistent_workers or length != len(loader):
        return False
    return count > 2 and reads_alike(loader)


def _holds_generator(dataset: Any, depth: int = 3) -> bool:
    """Whether an object, or one of its parts, has its own generator, whose position is not stored."""
    if isinstance(dataset, _GENERATORS):
        return True
    if depth == 0 or isinstance(dataset, (str, bytes, torch.Tensor, np.ndarray)):
        return False
    parts: Iterable[Any] = vars(dataset).values() if hasattr(dataset, "__dict__") else ()
    if isinstance(dataset, (list, tuple)):
        parts = dataset[:100]  # transforms, not samples
    return any(_holds_generator(part, depth - 1) for part in parts)
