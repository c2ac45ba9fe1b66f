"""Determines whether the batches before a position can be skipped without reading them."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shrinkpoint.integrations.common.worker_reads import reads_alike

__all__ = ["can_skip"]


def can_skip(loader: DataLoader[Any], *, count: int, exact: bool) -> bool:
    """Whether skipping is equivalent to reading and dropping, if the generators are set afterwards.

    If this process reads, reading only changes generators whose states are known. Workers have their own generators:
    only if they draw no random numbers can batches be skipped.

    Args:
        loader: as yet without an iterator.
        count: batches to skip.
        exact: whether the states of the generators are known.
    """
    if isinstance(loader.dataset, IterableDataset):
        return False
    if not loader.num_workers or not exact:
        return True
    return not loader.persistent_workers and count > 2 and reads_alike(loader)
