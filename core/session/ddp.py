"""What a DistributedDataParallel has besides its model: the order in which it sums gradients, and the states of communication hooks.

DDP starts with buckets in the order of the parameters, and after the first backward pass rebuilds them in the order in
which gradients became ready. A sum of three or more numbers depends on its order, and the order on the place in a
bucket. So the buckets are part of a checkpoint, and a resumed process makes one backward pass of zeros: DDP gets a
zero gradient for each parameter, in the stored order. No model is called, and no random number is drawn.

Hooks keep errors of compressed gradients that are fed back, counters and generators. Each process has its own, which
follow neither from the weights nor from the gradients that all processes share, and may be as large as the model. So
they are part of exact checkpoints, and of an exact step log. torch's own hooks keep them in an object that is given to
``register_comm_hook``; what a hook keeps elsewhere cannot be found.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.optimizers.objects import moved
from shrinkpoint.quality.preserve import preserved_state
from shrinkpoint.session.attributes import put_back_one
from shrinkpoint.state.rng import generator_state, is_generator
from shrinkpoint.state.stateful import has_state
from shrinkpoint.state.tree import refusal
from shrinkpoint.warn import warn

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
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_ITEMS = "items"
_LEFT = (ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)
"""Settings that a program makes again, and no state."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def bucket_order(model: Any) -> Buckets:
    """Return the buckets that DDP has made, or would make at the next step; called on every rank, between two batches."""
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
                zeros = torch.zeros_like(parameters[number], memory_format=torch.preserve_format)
                parameters[number].backward(zeros.to_sparse(1) if sparse[number] else zeros)
            model.reducer._rebuild_buckets()
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the user's hooks meanwhile: those of an optimizer would make a step."""
    taken: list[tuple[OrderedDict[int, Any], list[Any]]] = []
    for parameter in parameters:
        for name in _GRADIENT_HOOKS:
            hooks = getattr(parameter, name, None)
            if hooks:
                taken.append((hooks, list(hooks.items())))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, items in taken:
            hooks.update(items)


# ---- states of hooks


class HookStates:
    """Captures the states of a model's hooks for checkpoints and logs, if they are `wanted`."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self.nbytes = 0
        """Of the tensors captured last, of all processes; on the first rank."""

    def left_out(self, model: object, *, exact_log: bool) -> str | None:
        """Return a warning that the states are not stored: each process's own, and as large as the model; None where they
        are.

        Raises:
            ConfigError: they cannot be stored, and a step log is to continue the training exactly.
        """
        hidden, name = hidden_state(model), stateful_hook(model)
        if hidden is not None and exact_log:
            raise ConfigError(
                f"step_log='exact' cannot continue this training exactly: {hidden}. Give register_comm_hook a state that is a dict or an"
                " object, with tensors, numbers and generators in it, or with state_dict and load_state_dict; or leave step_log out"
            )
        afresh = "a continued run starts with a fresh one, and is not bit-identical"
        if hidden is not None:
            return f"checkpoints leave out the state of the DDP communication hook: {hidden}; {afresh}"
        if name is not None and not self._wanted:
            return (
                f"checkpoints leave out the state of the DDP communication hook, a {name}: {afresh}. With scheme='lossless' it is"
                " stored, of each process"
            )
        return None

    def capture(self, model: Any) -> list[Any]:
        """Return the states of all processes, in the order of their ranks; on the first rank, and called on every one."""
        states = _states(model)
        if not self._wanted or not states or hidden_state(model) is not None:
            return []
        found = world().gather_first([_captured(state) for state in states])
        tensors = (leaf for leaf in tree_leaves(found) if isinstance(leaf, (torch.Tensor, np.ndarray)))
        self.nbytes = sum(int(tensor.nbytes) for tensor in tensors)
        return found


def restore_hook_states(model: Any, stored: Sequence[Any]) -> None:
    """Restore this process's states; called on every rank, before the first step and after the buckets are restored."""
    live = _states(model)
    if not stored or len(stored) != world().size:
        return  # of another number of processes: there is a warning where the rest is restored
    mine = stored[world().rank]
    names = [type(state).__qualname__ for state in live]
    before = [one["type"] for one in mine]
    if names != before:
        if world().is_first:
            warn(
                f"the checkpoint has the states of the DDP communication hooks {before or 'none'}, and this training has {names or 'none'}:"
                " they start afresh, and the run is not bit-identical"
            )
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for state, values in zip(live, mine, strict=True):
        _load(state, values, device)


def stateful_hook(model: object) -> str | None:
    """Return the class of the state of a model's communication hook; None where it has none."""
    return next((type(state).__qualname__ for state in _states(model)), None)


def hidden_state(model: object) -> str | None:
    """Return why the states of a model's hooks cannot be stored; None where they can."""
    for hook, state in _hooks(model):
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        found = _hidden_in(hook, state)
        if found is not None:
            return f"the DDP communication hook {name} keeps a state of its own ({found}) besides the one it was registered with"
        if state is None or isinstance(state, dist.ProcessGroup) or has_state(state):
            continue
        if (problem := refusal(_captured(state)["values"])) is not None:
            return (
                f"of the state of the DDP communication hook {name}, a {type(state).__qualname__}, {problem}"
            )
    return None


def _hooks(model: object) -> list[tuple[Any, Any]]:
    if not _is_ddp(model) or getattr(model, "mixed_precision", None) is not None:  # a hook of DDP's own
        return []
    return list(getattr(model, "_comm_hooks", []))


def _states(model: object) -> list[Any]:
    return [
        state for _, state in _hooks(model) if state is not None and not isinstance(state, dist.ProcessGroup)
    ]


def _is_left(value: object) -> bool:
    return isinstance(value, (*_LEFT, dist.ProcessGroup))


def _values(state: Any) -> dict[Any, Any]:
    if isinstance(state, Mapping):
        return dict(state)
    if isinstance(state, list):
        return {_ITEMS: state}
    slots = [
        name
        for kind in type(state).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(state, name)
    ]
    return {name: getattr(state, name) for name in slots} | dict(getattr(state, "__dict__", {}))


def _captured(state: Any) -> dict[str, Any]:
    kind = type(state).__qualname__
    if has_state(state):
        return {"type": kind, "state": state.state_dict()}
    kept = {
        name: generator_state(value) if is_generator(value) else value
        for name, value in _values(state).items()
        if not _is_left(value)
    }
    return {"type": kind, "values": kept}


def _load(state: Any, stored: Mapping[str, Any], device: torch.device) -> None:
    if "state" in stored:
        state.load_state_dict(stored["state"])
        return
    values = stored["values"]
    if isinstance(state, MutableMapping):
        kept = {name: value for name, value in state.items() if _is_left(value)}
        state.clear()
        state.update(kept | moved(values, device))
    elif isinstance(state, list):
        state[:] = moved(values[_ITEMS], device)
    else:
        for name, value in values.items():
            put_back_one(state, name, value, device)


def _hidden_in(hook: Any, state: object, depth: int = 8) -> str | None:
    """Return what a hook's closure or object keeps that may change."""
    inner = getattr(hook, "func", None)  # a partial function
    if inner is not None and not isinstance(hook, FunctionType):
        given = (*getattr(hook, "args", ()), *getattr(hook, "keywords", {}).values())
        kept = [("function", inner), *(("argument", one) for one in given)]
    elif not isinstance(hook, _LEFT):
        return None if hook is state else f"its object, a {type(hook).__qualname__}"
    else:
        owner = getattr(hook, "__self__", None)
        if owner is not None and owner is not state and not _is_left(owner):
            return f"its object, a {type(owner).__qualname__}"
        names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
        cells = zip(names, getattr(hook, "__closure__", None) or (), strict=False)
        kept = [
            (name, cell.cell_contents) for name, cell in cells if cell != CellType()
        ]  # one that is filled
    for name, value in kept:
        if value is state or isinstance(value, (dist.ProcessGroup, ModuleType, type, *_PLAIN)):
            continue
        if isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value):
            continue
        if callable(value) and not isinstance(value, nn.Module) and depth:
            found = _hidden_in(value, state, depth - 1)
            if found is None and isinstance(value, _LEFT):
                continue
            if found is not None:
                return found
        return f"{name!r}, a {type(value).__qualname__}"
    return None
