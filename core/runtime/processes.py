"""Which of the processes that train together this one is; where ``torch.distributed`` is not initialized, it is alone."""

import torch.distributed as dist

__all__ = ["is_first", "rank", "world_size"]


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if _connected() else 0


def world_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if _connected() else 1


def is_first() -> bool:
    """Whether this is the process that decides, and that saves for all."""
    return rank() == 0


def _connected() -> bool:
    return dist.is_available() and dist.is_initialized()
