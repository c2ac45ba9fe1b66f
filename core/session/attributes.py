"""Attributes of optimizers that are neither in their ``state`` nor in ``param_groups``: counters, tensors, generators, lists."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shrinkpoint.optimizers.objects import moved
from shrinkpoint.state.rng import generator_state, is_generator, set_generator
from shrinkpoint.state.stateful import has_state, optimizers_in
from shrinkpoint.warn import LIBRARIES

_MOST_ELEMENTS, _MOST_ITEMS, _DEPTH = 1 << 20, 10_000, 5  # larger and deeper ones are not saved
_OWN, _NOT_PLAIN = {"param_groups", "state", "defaults"}, object()
_OTHERS = (type, ModuleType, torch.nn.Module, torch.optim.Optimizer)
_SHARED = {"GlobalOptimManager"}  # bitsandbytes' register of all parameters
# As optimizers were first seen: their own numbers, and those in objects of theirs that have no state.
_FIRST: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_OBJECTS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def changed_attributes(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return numbers, tensors, generators, containers and states of objects that are attributes, without numbers that
    are as first seen.

    Flags and words are left out: they may say what a process has set up. So are views of parameters and of their
    state. There is a dict for each optimizer, without wrappers, and each inside it, as `put_back` takes them.
    """
    found = []
    for optimizer in _inner(optimizers):
        own = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
        plain = {name: _plain(value) for name, value in own.items()}
        trained = [[group["params"] for group in optimizer.param_groups], [*optimizer.state.values()]]
        elsewhere = _storages(trained) if any(map(_has_tensors, plain.values())) else set()
        kept = {
            name: value
            for name, value in plain.items()
            if value is not _NOT_PLAIN and elsewhere.isdisjoint(_storages(value))
        }
        numbers = {name: value for name, value in kept.items() if not _has_tensors([own[name], value])}
        first = _FIRST.setdefault(optimizer, numbers)
        _OBJECTS.setdefault(optimizer, {name: _numbers_of(own[name]) for name in own.keys() - kept.keys()})
        same = {name for name, value in numbers.items() if value == first.get(name, _NOT_PLAIN)}
        found.append({name: value for name, value in kept.items() if name not in same})
    return found


def put_back(optimizers: Sequence[Any], stored: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """Give optimizers the attributes from `changed_attributes`; lists, dicts and generators stay the objects that they are."""
    changed_attributes(optimizers)
    for optimizer, values in zip(_inner(optimizers), stored, strict=False):
        for name, value in values.items():
            put_back_one(optimizer, name, value, device)


def _plain(value: Any, depth: int = 0) -> Any:
    """Return what a checkpoint holds of an attribute, without references to lists and dicts of it; else `_NOT_PLAIN`."""
    kind = type(value)
    if kind in (int, float) or (depth and kind in (bool, str, type(None))):
        return value
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    if kind is torch.Tensor and value.layout is torch.strided and value.numel() <= _MOST_ELEMENTS:
        return value.detach()
    if is_generator(value):  # a container that is filled anew would have states in their place
        return _NOT_PLAIN if depth else generator_state(value)
    if _has_state(value) and not depth:
        return _plain(value.state_dict(), 1)
    if kind is np.ndarray and not value.dtype.hasobject and value.size <= _MOST_ELEMENTS:
        return value
    if kind not in (list, tuple, deque, dict, set) or len(value) > _MOST_ITEMS or depth > _DEPTH:
        return _NOT_PLAIN
    items = [_plain(item, depth + 1) for item in (value.values() if kind is dict else value)]
    keys = list(value) if kind is dict else []
    if any(item is _NOT_PLAIN for item in items) or not {type(key) for key in keys} <= {str, int}:
        return _NOT_PLAIN
    return (
        dict(zip(keys, items, strict=True))
        if kind is dict
        else kind(items)
        if kind in (tuple, set)
        else items
    )


def put_back_one(owner: Any, name: str, value: Any, device: torch.device) -> None:
    """Give an object an attribute; lists, dicts and generators stay the objects that they are."""
    here: Any = getattr(owner, name, None)
    if is_generator(here):
        set_generator(here, value)
    elif _has_state(here):
        here.load_state_dict(moved(value, device))
    elif isinstance(here, (list, deque)) and isinstance(value, list):
        here.clear()
        here.extend(moved(value, device))
    elif isinstance(here, dict) and isinstance(value, dict):
        here.clear()
        here.update(moved(value, device))
    else:
        setattr(owner, name, moved(value, here.device if torch.is_tensor(here) else device))


def left_out(optimizers: Sequence[Any], state: object) -> list[str]:
    """Name the attributes that are not stored: too large tensors that no state has, generators in containers, objects that have changed."""
    large = {
        f"{type(optimizer).__name__}.{name}": tensors
        for optimizer in _inner(optimizers)
        for name, value in vars(optimizer).items()
        if name not in _OWN and (tensors := [t for t in tree_leaves(value) if _is_large(t)])
    }
    places = places_of(state) if large else set()
    changed = [
        f"{type(optimizer).__name__}.{name}"
        for optimizer in _inner(optimizers)
        for name, seen in _OBJECTS.get(optimizer, {}).items()
        if name in vars(optimizer) and _numbers_of(vars(optimizer)[name]) != seen
    ]
    inside = [
        f"{type(optimizer).__name__}.{name}"
        for optimizer in _inner(optimizers)
        for name, value in vars(optimizer).items()
        if name not in _OWN and any(is_generator(t) and t is not value for t in tree_leaves(value))
    ]
    return [*changed, *inside] + [
        name
        for name, tensors in large.items()
        if not all(places.issuperset(parts_of(tensor)) for tensor in tensors)
    ]


def places_of(state: object) -> set[object]:
    """Return where the elements of all tensors in a state are, by `parts_of`."""
    if isinstance(state, torch.Tensor):
        return set(parts_of(state))
    nodes = (
        state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    )
    return set().union(*map(places_of, nodes))


def parts_of(tensor: Any) -> Iterator[object]:
    """Yield where a tensor's elements are: that of ties and views of all of it is the same."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif tensor.numel():
        yield tensor.device, tensor.data_ptr(), tensor.numel()


def _is_large(value: object) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and value.numel() > _MOST_ELEMENTS


def _has_state(value: object) -> bool:
    return has_state(value) and not isinstance(value, _OTHERS)


def _numbers_of(value: object) -> dict[str, Any]:
    """Return the numbers in an object that nobody else stores or shares."""
    is_own = hasattr(value, "__dict__") and not isinstance(value, _OTHERS)
    own = vars(value) if is_own and type(value).__name__ not in _SHARED else {}
    plain = {name: _plain(part) for name, part in own.items()}
    return {name: part for name, part in plain.items() if part is not _NOT_PLAIN and not _has_tensors(part)}


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object of a class of the user's, or what a function of the user's has bound; none of modules, optimizers,
    and objects of installed packages."""
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, **value.keywords}
    if isinstance(value, (MethodType, BuiltinMethodType)):
        return {} if isinstance(value.__self__, _OTHERS) else {"self": value.__self__}
    owner = value if isinstance(value, FunctionType) else type(value)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
    if isinstance(value, _OTHERS) or file.startswith(LIBRARIES) or owner.__module__ == "builtins":
        return {}
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        bound = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        return {name: one for name, one in bound.items() if not isinstance(one, _OTHERS)}
    slots = chain.from_iterable(vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**named, **getattr(value, "__dict__", {})}


def _has_tensors(value: object) -> bool:
    """Return whether there is something in a value that is not compared, and so always stored: tensors, arrays, generators."""
    return any(
        isinstance(leaf, (torch.Tensor, np.ndarray)) or is_generator(leaf) for leaf in tree_leaves(value)
    )


def _storages(value: object) -> set[int]:
    """Return the addresses of the memory that the tensors in a value have."""
    found: set[int] = set()
    for leaf in tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            found |= _storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            found.add(leaf.untyped_storage().data_ptr())
    return found


def _inner(optimizers: Sequence[Any]) -> list[Any]:
    return [one for optimizer in optimizers for one in optimizers_in(optimizer)]
