"""Whether the batches before a position can be left unread."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shrinkpoint.integrations.common.worker_reads import reads_alike

__all__ = ["can_skip"]


def can_skip(loader: DataLoader[Any], *, count: int, exact: bool) -> bool:
    """Whether skipping comes to the same as reading and dropping, where the generators are set afterwards.

    Where this process reads, all that reading leaves behind is in generators whose states are known. Workers have theirs
    for themselves: only where they draw no numbers can anything be skipped.

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
