"""Saves and restores the buckets in which DistributedDataParallel sums gradients, since the order affects rounding.

DDP starts with buckets in the order of the parameters, and after the first backward pass rebuilds them in the order in
which gradients became ready. A sum of three or more numbers depends on its order, and the order on the place in a
bucket. So the buckets are part of a checkpoint, and a resumed process makes one backward pass of zeros: DDP gets a
zero gradient for each parameter, in the stored order. No model is called, and no random number is drawn.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shrinkpoint.group.group import world
from shrinkpoint.quality.preserve import preserved_state
from shrinkpoint.warn import warn

__all__ = ["Buckets", "bucket_order", "restore_buckets", "stateful_hook"]

Buckets = list[list[int]]
"""The indices of the parameters in each bucket; empty where DDP has not rebuilt them."""

_REBUILT = "rebuilt_per_bucket_param_indices"
_PRIVATE = (
    "_build_params_for_reducer",
    "_comm_hooks",
    "_delay_all_reduce_params",
    "_get_ddp_logging_data",
    "logger",
    "reducer",
)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def bucket_order(model: Any) -> Buckets:
    """The buckets that DDP has made, or would make at the next step; called on every rank, between two batches.

    Args:
        model: as it is trained. Only a ``DistributedDataParallel`` has buckets.
    """
    if not _has_buckets(model):
        return []
    found = _rebuilt(model)
    if not found and not (model.find_unused_parameters or model.static_graph):
        model.reducer._rebuild_buckets()  # after one step; DDP itself would do it in the next forward pass
        found = _rebuilt(model)
    return found


def restore_buckets(model: Any, buckets: Buckets) -> None:
    """Make DDP rebuild the buckets of a checkpoint; called on every rank, before the first step.

    Gradients, weights, generators and the states of communication hooks are as before afterwards, and hooks on
    parameters are not called.

    Args:
        model: as it is to be trained.
        buckets: from `bucket_order`.
    """
    if not buckets or not _has_buckets(model):
        return
    if world().size == 2 and not model._comm_hooks:  # a + b = b + a
        return
    reason = _obstacle(model, buckets)
    if reason is None:
        with preserved_state(*[state for _, state in model._comm_hooks]):
            _backward_of_zeros(model, [number for bucket in buckets for number in bucket])
        # The order of the buckets does not affect the sums, and depends on a hash table where there are several dtypes.
        if sorted(_rebuilt(model)) != sorted(buckets):
            reason = "DDP has made other buckets of them, as another bucket_cap_mb or another version of torch does"
    if reason is not None and world().is_first:
        warn(
            f"the gradients of the processes are summed in another order than before: {reason}. Training continues, but not"
            " bit by bit"
        )


def stateful_hook(model: object) -> str | None:
    """The name of a communication hook's state that checkpoints do not contain; None where there is none."""
    ours = (
        _is_ddp(model) and getattr(model, "mixed_precision", None) is None
    )  # that one is a hook of DDP's own
    for _, state in getattr(model, "_comm_hooks", []) if ours else []:
        if state is not None and not isinstance(state, dist.ProcessGroup):
            return type(state).__qualname__
    return None


def _is_ddp(model: object) -> bool:
    return dist.is_available() and isinstance(model, nn.parallel.DistributedDataParallel)


def _has_buckets(model: Any) -> bool:
    return _is_ddp(model) and world().size > 1 and all(hasattr(model, name) for name in _PRIVATE)


def _rebuilt(model: Any) -> Buckets:
    model.logger.set_runtime_stats_and_log()
    text = str(model._get_ddp_logging_data().get(_REBUILT, ""))
    return [[int(number) for number in bucket.split()] for bucket in text.split(",") if bucket.strip()]


def _obstacle(model: Any, buckets: Buckets) -> str | None:
    count = model._get_ddp_logging_data().get("num_parameter_tensors")
    if model.static_graph or model.mixed_precision is not None or model._delay_all_reduce_params:
        return "static_graph, mixed_precision and delay_all_reduce_named_params of DDP leave no way to set it"
    if sorted(number for bucket in buckets for number in bucket) != list(range(count or 0)):
        return "the checkpoint's parameters that need a gradient are others"
    if len(model._build_params_for_reducer()[0]) != count:
        return "requires_grad of some parameters was changed after DDP had been built"
    return None


def _backward_of_zeros(model: Any, order: Sequence[int]) -> None:
    parameters, sparse = model._build_params_for_reducer()
    before = [parameter.grad for parameter in parameters]
    with _without_hooks(parameters):
        try:
            for parameter in parameters:
                parameter.grad = None
            model.reducer.prepare_for_forward()
            model.reducer.prepare_for_backward([])
            for number in order:
                parameters[number].backward(_zeros(parameters[number], sparse=sparse[number]))
            model.reducer._rebuild_buckets()
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def _zeros(parameter: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return zeros.to_sparse(1) if sparse else zeros


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the user's hooks meanwhile: those of an optimizer would make a step."""
    taken: list[tuple[OrderedDict[int, Any], list[Any]]] = []
    for parameter in parameters:
        for name in _HOOKS:
            hooks = getattr(parameter, name, None)
            if hooks:
                taken.append((hooks, list(hooks.items())))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, items in taken:
            hooks.update(items)
