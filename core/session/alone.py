"""Lets one process of several measure by itself, whatever the others do.

Collective communication could block forever; so it is refused. The model is called
without torch's wrapper for data parallel training, whose hooks on gradients do nothing unless its own forward pass came
before.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.runtime.dispatch import Refusing

__all__ = ["alone", "wrapper_obstacle"]


def alone() -> AbstractContextManager[Any]:
    """Refuse collective communication inside the block; costs nothing in single-process training.

    Raises:
        ConfigError: raised by the refused call.
    """
    return nullcontext() if world().size == 1 else Refusing(_refuse_communication)


def wrapper_obstacle(wrapped: nn.Module | None) -> str | None:
    """Return why gradients cannot be computed without the wrapper for several processes; None where they can.

    Args:
        wrapped: the model as it is trained.
    """
    if world().size == 1:
        return None
    if type(wrapped) is not DistributedDataParallel:
        return "several processes train together, and not by DistributedDataParallel"
    # With these two DDP records in every backward pass which parameters have taken part.
    if wrapped.find_unused_parameters or wrapped.static_graph:
        return "DistributedDataParallel looks for unused parameters, or has a static graph"
    return None


def _refuse_communication(operation: Any) -> None:
    if operation.namespace in ("c10d", "_c10d_functional"):
        raise ConfigError(
            f"the model or its loss communicates with the other processes ({operation.__name__}), but each one measures by itself"
        )
