"""Saves and restores everything reachable from models and optimizers, not only their parameters.

A validation step may append to a list of the model, count in an attribute, keep a hidden state, draw from a generator of
its own. So everything that can be reached through attributes and containers is remembered, and put back in place: who
else refers to a list sees it as before. What cannot be put back, such as a file's position, is watched.
"""

import array
import ctypes
import gc
import io
import itertools
import operator
import socket
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.state.dtypes import is_flat
from shrinkpoint.state.rng import capture_rng, generator_state, is_generator, restore_rng, set_generator
from shrinkpoint.warn import brief

_LOOKED_INTO = 100_000
"""So many elements of containers are looked into, the nearest first; of others, such as a data set's, only their order is put back."""
_SMALL_BYTES, _MOST_BYTES = 2**20, 2**26
"""A tensor or an array up to the first size is always copied, larger ones as long as their sum is within the second."""
_ATTEMPTS = 3

_TENSORS = (torch.Tensor, nn.Parameter)
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, tuple, frozenset)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, slice, ModuleType})
_LEFT_ALONE = (
    "shrinkpoint torch torchdata lightning pytorch_lightning lightning_fabric composer streaming transformers accelerate datasets"
    " logging threading _thread weakref multiprocessing concurrent asyncio subprocess queue wandb mlflow tensorboard tqdm rich"
)
"""Packages whose objects belong to the training, or to other threads; modules, tensors and generators of any package do not."""
_SHARED = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_MISSING = object()

Undo = Callable[[], object]


class TraceError(ShrinkpointError):
    """A block has changed what cannot be put back; everything else was."""


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided memory and nothing else: no shard, no sparse one, no wrapper of a library's."""
    return (
        type(tensor) in _TENSORS
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_nested)
    )


def own_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what this process has of a tensor: all of a plain one, its shard of a DTensor, None of any other."""
    local = tensor if is_plain_tensor(tensor) else getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) and is_plain_tensor(local) else None


@contextmanager
def preserved_state(
    *roots: object, around: Sequence[object] = (), restored: Iterable[torch.Tensor] = ()
) -> Iterator[None]:
    """Run a block, and then put back everything reachable from the roots bit by bit, after an error too.

    Tensors are copied meanwhile, each piece of memory once, and get their values back in place, so that
    references to them stay valid; of DTensors this process's shards. Gradients are kept by reference, so the block must take its own. Numbers,
    containers, arrays, generators, other objects' and their classes' attributes are kept, and what functions close over.
    Of what is global, only torch's, numpy's and Python's generators are.
    Of optimizers that are no roots, the groups alone.

    Args:
        roots: modules, optimizers and containers, whose tensors are copied to the host, however large.
        around: other objects that the block may change. Of their tensors and arrays, large ones are copied up to a limit, and others watched.
        restored: tensors whose values the block itself puts back.

    Raises:
        TraceError: the block has changed something that cannot be put back.
    """
    memory, rng = _Memory(restored), capture_rng()
    memory.keep(roots, whole=True)
    memory.keep(around, whole=False)
    try:
        yield
    finally:
        try:
            with torch.inference_mode(False), torch.no_grad():
                memory.put_back()
        finally:
            restore_rng(rng)
    if memory.changed:
        names = " and ".join(dict.fromkeys(map(memory.name, memory.changed)))
        raise TraceError(
            f"measuring changes {names}, which cannot be put back. Use it outside of what is measured: in a hook such as"
            " on_validation_batch_end, or where the model is training and gradients are enabled"
        )


@dataclass(slots=True)
class _Kind:
    """What is to be done with the objects of a class: slots are put back, and what has a position is watched.

    Its `base` is the container that it is or is made of, if any.
    """

    base: Any
    left_alone: bool
    has_dict: bool
    members: list[Any]
    position: Callable[[Any], object] | None


_kinds: weakref.WeakKeyDictionary[type, _Kind] = weakref.WeakKeyDictionary()


class _Memory:
    def __init__(self, restored: Iterable[torch.Tensor]) -> None:
        self._empty: list[Any] = []
        empty = (
            self._empty
        )  # not through `self`: a cycle would keep the copies in memory until garbage is searched for
        self._undo: list[Undo] = [lambda: [value.clear() for value in empty if value]]
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that no other gets their id
        self._kinds: dict[type, _Kind] = {}
        self._watched: list[tuple[object, Callable[[Any], object], object]] = []
        self.changed: list[object] = []
        self._large: list[tuple[int, Undo, Undo]] = []
        self._room = _LOOKED_INTO
        self._restored = {id(tensor) for tensor in restored}
        parts = [own_part(tensor) for tensor in restored]
        self._storages = {_place(part) for part in parts if part is not None}

    def keep(self, roots: Sequence[object], *, whole: bool) -> None:
        """Remember all that can be reached; the nearest first, since a data set may be reached, too."""
        self._whole = whole
        waiting = deque(roots)
        for root in roots:
            waiting.extend(root.modules() if isinstance(root, nn.Module) else ())
        named = {id(value) for value in waiting}
        while waiting:
            value = waiting.popleft()
            kind = type(value)
            if kind in _ATOMS or id(value) in self._seen:
                continue
            with suppress(Exception):  # of an object whose own methods raise
                plan = self._kinds.get(kind)
                if plan is None:
                    plan = self._kinds[kind] = _kind_of(kind)
                    waiting.extend(self._remember_class(kind) if not plan.left_alone else ())
                is_ours = not plan.left_alone or id(value) in named
                if is_ours or plan.position is not None:  # others may still be named
                    self._seen[id(value)] = value
                if plan.position is not None:
                    self._watch(value, plan.position)
                if is_ours:
                    waiting.extend(self._remember(value, kind, plan))
                elif isinstance(value, torch.optim.Optimizer):
                    waiting.append(value.param_groups)
        self._remember_large()

    def put_back(self) -> None:
        """Undo everything, even if one undo fails or is interrupted; the first exception is raised at the end."""
        raised: BaseException | None = None
        self.changed = [value for value, look, before in self._watched if _looked(look, value) != before]
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

    def _watch(self, value: object, look: Callable[[Any], object]) -> None:
        self._watched.append((value, look, _looked(look, value)))

    def _remember(self, value: Any, kind: type, plan: _Kind) -> list[object]:
        """Remember one object.

        Returns:
            The objects it refers to, to be remembered next.
        """
        found: list[object] = []
        base = plan.base
        if base is not None and kind is base and not value:  # most are: modules have many for hooks
            self._empty.append(value)
        elif issubclass(kind, torch.Tensor):
            self._remember_tensor(value)
        elif issubclass(kind, np.ndarray):
            found = self._remember_array(value, value.view(np.ndarray))
        elif base in (OrderedDict, dict):
            found = self._remember_mapping(value, base)
            found = self._nearest([*found, *base.keys(value)])
        elif base is not None:
            items = [*base.__iter__(value)]
            if base not in (tuple, frozenset):
                self._undo.append(_collection_undo(value, base, items))
            found = self._nearest(items)
        elif kind is FunctionType:
            found = [*(value.__closure__ or ())] if not _is_left_alone(value) else []
        elif kind is CellType:
            found = self._remember_slots(value, [CellType.cell_contents])
        elif (undo := _state_undo(value, kind)) is not None:
            self._undo.append(undo)
        elif not (plan.has_dict or plan.members) or kind is partial:  # of C, such as an iterator
            found = [part for part in gc.get_referents(value) if not isinstance(part, type)]
        if plan.has_dict:
            own = object.__getattribute__(value, "__dict__")
            if type(own) is dict and id(own) not in self._seen:
                self._seen[id(own)] = own
                found += self._remember_mapping(own, dict)
                if issubclass(kind, nn.Module):  # FSDP2 adds hooks in the first forward pass, and never again
                    hooks = {id(item): item for key, item in own.items() if "_hooks" in key}
                    found = [item for item in found if id(item) not in hooks]
                    found += [hook for item in hooks.values() for hook in getattr(item, "values", tuple)()]
        if plan.members:
            found += self._remember_slots(value, plan.members)
        return found

    def _nearest(self, items: Iterable[object]) -> list[object]:
        """Return those of a container's elements that are looked into: all, as long as there is room."""
        found = [item for item in items if type(item) not in _ATOMS]
        self._room -= len(found)
        return found if self._room >= 0 else []

    def _remember_tensor(self, tensor: torch.Tensor) -> None:
        own = own_part(tensor)
        if own is None:
            if tensor.layout == torch.strided and not is_flat(tensor):
                data = tensor.data  # of one that a library has packed for itself
                self._undo.append(lambda: _give(tensor, data))
            if id(tensor) not in self._restored:
                self._watch(tensor, lambda value: value._version)
            return
        alias = own.detach()
        gradient, requires = tensor.grad if tensor.is_leaf else None, tensor.requires_grad

        def undo() -> None:
            if own is tensor:
                _give(tensor, alias)
            if tensor.requires_grad is not requires:
                tensor.requires_grad_(requires)
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient

        self._undo.append(undo)
        storage = own.untyped_storage()
        if not storage.nbytes() or _place(own) in self._storages:
            return
        self._storages.add(_place(own))
        with torch.inference_mode(False):  # a tensor of that mode could not be written afterwards
            memory = torch.empty(0, dtype=torch.uint8, device=own.device).set_(storage)
        whole = self._whole

        def copy() -> None:
            values = memory.to("cpu", copy=True) if whole else memory.clone()
            self._undo.append(lambda: _write(memory, values))

        def watch() -> None:
            self._watch(own, lambda value: (value._version, _digest(memory)))

        self._large.append((0 if whole else storage.nbytes(), copy, watch))

    def _remember_array(self, array: Any, plain: np.ndarray[Any, Any]) -> list[object]:
        def copy() -> None:
            values = plain.copy()
            if plain.flags.writeable:
                self._undo.append(lambda: np.copyto(plain, values))

        def watch() -> None:
            if plain.flags.writeable and plain.flags.c_contiguous:
                self._watch(array, lambda _: _digest(torch.from_numpy(plain.reshape(-1).view(np.uint8))))

        self._large.append((0 if self._whole else plain.nbytes, copy, watch))
        return self._nearest(plain.ravel().tolist()) if plain.dtype.hasobject else []

    def _remember_large(self) -> None:
        total = 0
        for nbytes, copy, watch in sorted(self._large, key=operator.itemgetter(0)):
            total += nbytes
            (copy if nbytes <= _SMALL_BYTES or total <= _MOST_BYTES else watch)()
        self._large.clear()

    def _remember_mapping(self, value: Any, base: Any) -> list[object]:
        keys, values = [*base.keys(value)], [*base.values(value)]

        def undo() -> None:
            if _same(base.keys(value), keys) and _same(base.values(value), values):
                return
            if not _same(base.keys(value), keys):
                base.clear(value)
            for key, item in zip(keys, values, strict=True):
                base.__setitem__(value, key, item)

        self._undo.append(undo)
        return [item for item in values if type(item) not in _ATOMS]

    def _remember_class(self, kind: type) -> list[object]:
        """Remember what a class and its bases have for all their objects."""
        found: list[object] = []
        for base in kind.__mro__:
            if id(base) in self._seen or _is_left_alone(base):
                continue
            self._seen[id(base)] = base
            names = [name for name in vars(base) if not name.startswith(("__", "_abc_"))]
            before = {name: vars(base)[name] for name in names if not hasattr(vars(base)[name], "__get__")}
            self._undo.append(partial(_set_attributes, base, before))
            found += [item for item in before.values() if type(item) not in _ATOMS]
        return found

    def _remember_slots(self, value: object, members: list[Any]) -> list[object]:
        before = [_slot(value, member) for member in members]

        def undo() -> None:
            for member, item in zip(members, before, strict=True):
                if _slot(value, member) is not item:
                    member.__delete__(value) if item is _MISSING else member.__set__(value, item)

        self._undo.append(undo)
        return [item for item in before if type(item) not in _ATOMS]

    def name(self, value: object, depth: int = 5) -> str:
        """Return an object by its class, and the attribute that refers to it."""
        name = brief(value)
        for owner in list(self._seen.values()) if depth else ():
            if not _kind_of(type(owner)).has_dict:
                inside = any(part is value for part in gc.get_referents(owner))
                outer = self.name(owner, depth - 1).partition(", ")[2] if inside else ""
                name = f"{name}, {outer}" if outer else name
                continue
            for key, item in object.__getattribute__(owner, "__dict__").items():
                if item is value:
                    return f"{name}, {key!r} of {type(owner).__name__}"
        return name


def _kind_of(kind: type) -> _Kind:
    if kind not in _kinds:
        own = (nn.Module, torch.Tensor, torch.Generator, LRScheduler)
        ours = issubclass(kind, own) or hasattr(kind, "get_obj")  # shared
        foreign = issubclass(kind, (type, torch.optim.Optimizer, torch.utils.data.Dataset))
        left_alone = not ours and (foreign or _is_left_alone(kind))
        # Members of C are made anew when read, and FSDP2 gives a DTensor other memory in the first forward pass.
        slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        slots = slotted if not issubclass(kind, torch.Tensor) else []
        members = [item for part in slots for item in part.values() if type(item) is MemberDescriptorType]
        base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        has_dict = bool(kind.__dictoffset__) and kind is not base
        is_opaque = left_alone or not (has_dict or members)
        position = None if ours else _position_of(kind, is_opaque)
        _kinds[kind] = _Kind(base, left_alone, has_dict, members, position)
    return _kinds[kind]


def _position_of(kind: type, is_opaque: bool) -> Callable[[Any], object] | None:
    if issubclass(kind, (io.BytesIO, io.StringIO)):
        return None
    if issubclass(kind, io.IOBase):
        return lambda file: None if file in (sys.stdout, sys.stderr) else file.tell()
    if hasattr(kind, "qsize"):
        return operator.methodcaller("qsize")
    if hasattr(kind, "fileno"):
        return _traffic
    if hasattr(kind, "__next__") and is_opaque:
        return _progress
    return None


def _progress(iterator: Any) -> object:
    """Return what changes as an iterator advances: numbers that it keeps, what it refers to, and what is left."""
    attributes = getattr(iterator, "__dict__", None)
    parts = gc.get_referents(iterator) if attributes is None else attributes.values()
    frame = getattr(iterator, "gi_frame", None)
    return (
        [repr(part) if type(part) in _ATOMS else id(part) for part in parts],
        operator.length_hint(iterator, -1),
        frame.f_lasti if frame is not None else None,
        repr(iterator),  # a count of itertools shows its number
        operator.length_hint(iterator.__reduce__()[1][0]) if type(iterator) is itertools.cycle else None,
    )


def _traffic(connection: Any) -> object:
    """Return what changes as a socket or a pipe is read or written: bytes that wait, and of TCP (on Linux) segments with data."""
    import fcntl
    import termios

    waiting = [
        fcntl.ioctl(connection.fileno(), number, bytes(4)) for number in (termios.FIONREAD, termios.TIOCOUTQ)
    ]
    with suppress(AttributeError, OSError):
        waiting.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)[152:])
    return waiting


def _looked(look: Callable[[Any], object], value: object) -> object:
    try:
        return look(value)
    except Exception as error:  # noqa: BLE001 - of a file that is closed
        return type(error)


def _is_left_alone(defined: Any) -> bool:
    """Return whether a class or a function is of one of these packages."""
    return str(defined.__module__).partition(".")[0] in _LEFT_ALONE.split()


def _set_attributes(owner: type, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if vars(owner).get(name, _MISSING) is not value:
            setattr(owner, name, value)


def _slot(value: object, member: Any) -> object:
    try:
        return member.__get__(value)
    except (AttributeError, ValueError):  # of an empty cell
        return _MISSING


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _give(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give a tensor its memory back, if it has another."""
    now, before = ((each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (tensor, data))
    if now != before:
        tensor.data = data


def _write(memory: torch.Tensor, copy: torch.Tensor) -> None:
    memory.copy_(copy)


def _digest(memory: torch.Tensor) -> int:
    """Return the sum of the bytes as 64-bit integers: of gigabytes on a device quickly."""
    whole = memory[: memory.numel() // 8 * 8].view(torch.int64) if memory.data_ptr() % 8 == 0 else memory
    return int(whole.sum())


def _same(now: Iterable[object], before: list[object]) -> bool:
    """Return whether both are the same objects (by identity, not equality) in the same order."""
    present = [*now]
    return len(present) == len(before) and all(map(operator.is_, present, before))


def _collection_undo(value: Any, base: Any, items: list[object]) -> Undo:
    def undo() -> None:
        if not _same(base.__iter__(value), items):
            base.clear(value)
            (base.update if base is set else base.extend)(value, items)

    return undo


def _state_undo(value: Any, kind: type) -> Undo | None:
    """Return how to put back an object that gives its state and takes it; None of others."""
    if is_generator(value):
        state = generator_state(value)
        return lambda: set_generator(value, state)
    if issubclass(kind, np.random.BitGenerator):
        position = value.state
        return lambda: setattr(value, "state", position)
    if issubclass(kind, (io.BytesIO, io.StringIO)) and not value.closed:
        written: Any = value.__getstate__()
        return lambda: value.__setstate__(written)
    if issubclass(kind, _SHARED):
        octets = bytes(value)
        return lambda: ctypes.memmove(ctypes.addressof(value), octets, len(octets))
    if issubclass(kind, (bytearray, array.array)):
        elements = value[:]
        return lambda: operator.setitem(value, slice(None), elements)
    return None
