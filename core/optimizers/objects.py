"""Objects that an optimizer keeps for its parameters, such as GaLore's projectors: stored by their own ``state_dict``.

At a resume a new optimizer has none of them yet. It makes them at its first step, so a copy of it makes one, with other tensors, and the
objects that come of it take the stored states.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.optimizers.updates import OptimizerKind, copied_group
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import has_state, parameters_of, unwrapped

_MARK = "state_dict of"


def with_object_states(state: Any) -> Any:
    """Return an optimizer's ``state_dict()``, which is not changed, with the states of objects in their places."""
    entries = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(entries, Mapping):
        return state
    made = {
        key: {name: _stored(value) for name, value in entry.items()}
        for key, entry in entries.items()
        if type(entry) is dict and any(map(_is_object, entry.values()))
    }
    return {**state, "state": {**entries, **made}} if made else state


def _stored(value: Any) -> Any:
    return {_MARK: type(value).__qualname__, "state": value.state_dict()} if _is_object(value) else value


def _is_object(value: Any) -> bool:
    return has_state(value) and not isinstance(value, torch.Tensor)


def put_back_objects(optimizer: Any, state: Any) -> None:
    """Give an optimizer that has loaded a state of `with_object_states` its objects.

    Raises:
        StateMismatchError: it has no such objects.
    """
    inner = unwrapped(optimizer)
    entries = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(entries, Mapping) or not any(_objects(entry) for entry in entries.values()):
        return
    names = [name for group in state["param_groups"] for name in group["params"]]
    for name, parameter in zip(names, parameters_of(inner), strict=True):
        stored = _objects(entries.get(name))
        fresh = _first_state(inner, parameter) if stored else {}
        for key, (kind, value) in stored.items():
            made: Any = fresh.get(key)
            if type(made).__qualname__ != kind:
                raise StateMismatchError(
                    f"the checkpoint's {type(inner).__name__} keeps a {kind} as {key!r} for a parameter, and this one a"
                    f" {type(made).__qualname__}: build the optimizer that the run was made with"
                )
            made.load_state_dict(moved(value, parameter.device))
            inner.state[parameter][key] = made


def _objects(entry: Any) -> dict[str, tuple[str, Any]]:
    """Classes and states of the objects in the place of which an entry has their states."""
    values = entry.items() if type(entry) is dict else ()
    return {key: (v[_MARK], v["state"]) for key, v in values if type(v) is dict and _MARK in v}


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors, in containers too, on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _first_state(optimizer: Any, parameter: torch.Tensor) -> Mapping[str, Any]:
    """Return what an optimizer keeps for a parameter after its first step."""
    kind = OptimizerKind.of(optimizer)
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    copy = torch.nn.Parameter(torch.zeros_like(parameter))
    copy.grad = torch.zeros_like(copy)
    made = kind.with_state([copied_group({**group, "params": [0]}, {0: copy})], {})
    rng = capture_rng()
    try:
        kind.kind.step(made)
    except Exception as error:
        raise StateMismatchError(
            f"{kind.kind.__name__} keeps objects for its parameters, and a copy of it could not make them: {error!r}"
        ) from error
    finally:
        restore_rng(rng)
    return dict(made.state[copy])
