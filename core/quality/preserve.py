"""Saves and restores everything reachable from models and optimizers, not only their parameters.

A training step may append to a list of the model, count in an attribute, keep a hidden state, draw from a generator of
its own. So everything that can be reached through built-in containers, modules and optimizers is remembered.
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["is_plain_tensor", "own_part", "preserved_state"]

# A longer container (such as a data set kept by a model) is assumed to change in its order only, not in its elements.
_LOOKED_INTO = 100_000
_ATTEMPTS = 3

_TENSORS = (torch.Tensor, nn.Parameter)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_COLLECTIONS = (list, set, deque)

Undo = Callable[[], None]


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory and nothing else: no shard, no sparse one, no wrapper of a library's."""
    return type(tensor) in _TENSORS and tensor.layout == torch.strided and not tensor.is_meta


def own_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this process has of a tensor: all of a plain one, its shard of a DTensor, None of any other."""
    local = tensor if is_plain_tensor(tensor) else getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) and is_plain_tensor(local) else None


@contextmanager
def preserved_state(*roots: object) -> Iterator[None]:
    """Run a block, and then put back everything reachable from the roots bit by bit, after an error too.

    Tensors are copied to the host meanwhile, each piece of memory once, and get their values back in place, so that
    references to them stay valid; of DTensors this process's shards. Gradients are kept by reference, so the block must take its own. An object of any
    other class is not looked into.

    Args:
        roots: modules, optimizers and containers.
    """
    memory = _Memory()
    memory.keep(roots)
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            memory.put_back()


class _Memory:
    def __init__(self) -> None:
        self._undo: list[Undo] = []
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that no other gets their id
        self._storages: set[tuple[torch.device, int]] = set()

    def keep(self, roots: Iterable[object]) -> None:
        """Remember all that can be reached."""
        waiting: list[object] = list(roots)
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting.extend(self._remember(value))

    def put_back(self) -> None:
        """Undo everything, even if one undo fails or is interrupted; the first exception is raised at the end."""
        raised: BaseException | None = None
        for undo in self._undo:
            for _ in range(_ATTEMPTS):  # each can be repeated
                try:
                    undo()
                    break
                except KeyboardInterrupt as error:
                    raised = raised or error
                except Exception as error:  # noqa: BLE001 - raised below
                    raised = raised or error
                    break
        if raised is not None:
            raise raised

    def _remember(self, value: Any) -> Iterable[object]:
        """Remember one object.

        Returns:
            The objects it refers to, to be remembered next.
        """
        if isinstance(value, torch.Tensor):
            self._remember_tensor(value)
        elif isinstance(value, (nn.Module, torch.optim.Optimizer)):
            return (vars(value),)
        elif type(value) in _MAPPINGS:
            return self._remember_mapping(value)
        elif type(value) in _COLLECTIONS:
            return self._remember_collection(value)
        elif isinstance(value, tuple):
            return value
        elif isinstance(value, np.ndarray):
            self._undo.append(_array_undo(value))
        elif (undo := _generator_undo(value)) is not None:
            self._undo.append(undo)
        return ()

    def _remember_tensor(self, tensor: torch.Tensor) -> None:
        own = own_part(tensor)
        if own is None:
            return
        alias = own.detach()
        gradient = tensor.grad if tensor.is_leaf else None

        def undo() -> None:
            if own is tensor and _layout(tensor) != _layout(alias):
                tensor.data = alias
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient

        self._undo.append(undo)
        storage = own.untyped_storage()
        place = (own.device, storage.data_ptr())
        if storage.nbytes() and place not in self._storages:
            self._storages.add(place)
            with torch.inference_mode(False):  # a tensor of that mode could not be written afterwards
                memory = torch.empty(0, dtype=torch.uint8, device=own.device).set_(storage)
            copy = memory.to("cpu", copy=True)
            self._undo.append(lambda: _write(memory, copy))

    def _remember_mapping(self, value: dict[Any, Any]) -> Iterable[object]:
        items = list(value.items())

        def undo() -> None:
            if not _same(
                (part for item in value.items() for part in item), [part for item in items for part in item]
            ):
                value.clear()
                value.update(items)

        self._undo.append(undo)
        return [item for _, item in items] if len(items) <= _LOOKED_INTO else ()

    def _remember_collection(self, value: Any) -> Iterable[object]:
        items = list(value)

        def undo() -> None:
            if not _same(value, items):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(items)

        self._undo.append(undo)
        return items if len(items) <= _LOOKED_INTO else ()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write(memory: torch.Tensor, copy: torch.Tensor) -> None:
    memory.copy_(copy)


def _same(now: Iterable[object], before: list[object]) -> bool:
    """Whether both are the same objects (by identity, not equality) in the same order."""
    present = list(now)
    return len(present) == len(before) and all(
        one is other for one, other in zip(present, before, strict=True)
    )


def _array_undo(array: np.ndarray[Any, Any]) -> Undo:
    copy = array.copy()

    def undo() -> None:
        if array.flags.writeable:
            array[...] = copy

    return undo


def _generator_undo(value: Any) -> Undo | None:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _discard(value.set_state(state))
    if isinstance(value, random.Random):
        words = value.getstate()
        return lambda: value.setstate(words)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        position = bits.state
        return lambda: setattr(bits, "state", position)
    return None


def _discard(value: object) -> None:
    """Drop the return value of a call."""
