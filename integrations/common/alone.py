"""Measuring on one process of several, while the others wait for it at the next batch.

What talks to the others would wait for ever, for they do not measure; so it is refused. The model is called without torch's
wrapper for data parallel training, whose hooks on gradients do nothing unless its own forward pass came before.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.common.ranks import world_size

__all__ = ["alone", "wrapper_obstacle"]


def alone() -> AbstractContextManager[Any]:
    """Refuse whatever would wait for other processes; costs nothing where there are none.

    Raises:
        ConfigError: by what is refused.
    """
    return nullcontext() if world_size() == 1 else _NoCommunication()  # type: ignore[no-untyped-call]


def wrapper_obstacle(wrapped: nn.Module | None) -> str | None:
    """Why gradients cannot be computed beside what wraps the model for several processes; None where they can.

    Args:
        wrapped: the model as it is trained.
    """
    if world_size() == 1:
        return None
    if type(wrapped) is not DistributedDataParallel:
        return "several processes train together, and not by DistributedDataParallel"
    # These two note in every backward pass which parameters have taken part, whoever called it.
    if wrapped.find_unused_parameters or wrapped.static_graph:
        return "DistributedDataParallel looks for unused parameters, or has a static graph"
    return None


class _NoCommunication(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ConfigError(
                f"the model or its loss talks to the other processes ({func.__name__}), and the first one measures alone"
            )
        return func(*args, **(kwargs or {}))
