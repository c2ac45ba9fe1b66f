"""Everything that a disk may hold after a power cut, derived from the system calls that a program made.

The model is deliberately harsher than any one file system: what was written is there for sure only after an fsync of
the file; a directory entry that was made or removed is there (or gone) for sure only after an fsync of the directory;
everything else may have happened or not, in any combination, and unsynced data may be there, missing, half there or
zeros (compare Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, section 3).
"""

import itertools
import math
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

__all__ = [
    "Ack",
    "CrashState",
    "Edit",
    "Operation",
    "Recorder",
    "Retire",
    "SyncFile",
    "SyncFolder",
    "Write",
    "acknowledged_early",
    "crash_states",
    "in_place",
    "without_file_syncs",
    "without_folder_syncs",
    "without_parent_syncs",
]

BASE = 0  # the node of the folder that existed before the recording


@dataclass(frozen=True)
class Operation:
    """One thing that happened."""


@dataclass(frozen=True)
class Edit(Operation):
    """Entries of one folder changed atomically: name to node, or to None where it was removed."""

    folder: int
    entries: tuple[tuple[str, int | None], ...]
    makes_folder: bool = False


@dataclass(frozen=True)
class Write(Operation):
    """Bytes were appended to a file."""

    file: int
    data: bytes


@dataclass(frozen=True)
class SyncFile(Operation):
    """fsync of a file."""

    file: int


@dataclass(frozen=True)
class SyncFolder(Operation):
    """fsync of a folder."""

    folder: int


@dataclass(frozen=True)
class Ack(Operation):
    """The program told someone that ``what`` is saved."""

    what: str


@dataclass(frozen=True)
class Retire(Operation):
    """From here on ``what`` may be gone: the program was told to drop it."""

    what: str


def _one_after_the_other(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def locked(self: "Recorder", *arguments: Any) -> Any:
        with self._lock:
            return method(self, *arguments)

    return locked


class Recorder:
    """Stands in for the module ``os`` in the module under test, and notes what happens below ``base``.

    Nodes are numbered in the order in which they were made; folder :data:`BASE` is ``base`` itself. What several threads do,
    each for a store of its own, is done and noted one after the other.
    """

    def __init__(self, base: Path) -> None:
        self.operations: list[Operation] = []
        self._base = base
        self._nodes: dict[Path, int] = {base: BASE}
        self._open: dict[int, tuple[int, bool]] = {}
        self._next = itertools.count(1)
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def ack(self, what: str) -> None:
        """Note that ``what`` was acknowledged."""
        self.operations.append(Ack(what))

    def retire(self, what: str) -> None:
        """Note that ``what`` is about to be dropped on purpose."""
        self.operations.append(Retire(what))

    def _edit(self, *changes: tuple[Path, int | None], makes_folder: bool = False) -> None:
        (folder,) = {path.parent for path, _ in changes}
        entries = tuple((path.name, node) for path, node in changes)
        self.operations.append(Edit(self._nodes[folder], entries, makes_folder))
        for path, node in changes:
            if node is None:
                del self._nodes[path]
            else:
                self._nodes[path] = node

    @_one_after_the_other
    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        """``os.mkdir``."""
        os.mkdir(path, mode)
        self._edit((path, next(self._next)), makes_folder=True)

    @_one_after_the_other
    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        """``os.open``."""
        descriptor = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL, "files are only ever made new: no key is written twice"
            self._edit((path, next(self._next)))
        if path in self._nodes:
            self._open[descriptor] = (self._nodes[path], path.is_dir())
        else:
            self._open.pop(descriptor, None)  # above the base: always durable
        return descriptor

    @_one_after_the_other
    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """``os.write``."""
        count = os.write(descriptor, data)
        self.operations.append(Write(self._open[descriptor][0], bytes(data[:count])))
        return count

    @_one_after_the_other
    def fsync(self, descriptor: int) -> None:
        """``os.fsync``."""
        os.fsync(descriptor)
        if descriptor in self._open:
            node, is_folder = self._open[descriptor]
            self.operations.append(SyncFolder(node) if is_folder else SyncFile(node))

    @_one_after_the_other
    def link(self, source: Path, target: Path) -> None:
        """``os.link``."""
        os.link(source, target)
        self._edit((target, self._nodes[source]))

    @_one_after_the_other
    def replace(self, source: Path, target: Path) -> None:
        """``os.replace``."""
        os.replace(source, target)
        self._edit((target, self._nodes[source]), (source, None))

    @_one_after_the_other
    def unlink(self, path: Path) -> None:
        """``os.unlink``."""
        os.unlink(path)
        self._edit((path, None))


@dataclass(frozen=True)
class CrashState:
    """Files (relative path to bytes) and folders after a cut, and what had been acknowledged before it."""

    acked: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]
    folders: tuple[str, ...]

    def write_to(self, target: Path) -> None:
        """Lay the state out in the new folder ``target``."""
        target.mkdir(parents=True)
        for folder in self.folders:
            (target / folder).mkdir(parents=True, exist_ok=True)
        for name, data in self.files:
            (target / name).write_bytes(data)


def crash_states(operations: Sequence[Operation], *, seed: int = 0, most: int = 48) -> Iterator[CrashState]:
    """Every distinct state of the disk after a cut at any point, with the acknowledgements made before it.

    Where more than ``most`` combinations of unsynced edits are possible at one point, that many are taken: each one
    alone missing, each one alone there, all, none, and random ones. Likewise for combinations of unsynced data.
    """
    rng = random.Random(seed)
    seen: set[CrashState] = set()
    for cut in range(len(operations) + 1):
        past = operations[:cut]
        retired = {operation.what for operation in past if isinstance(operation, Retire)}
        acked = tuple(op.what for op in past if isinstance(op, Ack) and op.what not in retired)
        contents = _contents(past)
        pending = _pending(past)
        for kept in _subsets(pending, rng, most):
            dropped = set(pending) - kept
            edits = [op for at, op in enumerate(past) if isinstance(op, Edit) and at not in dropped]
            folders, names = _walk(edits)
            for choice in _choices([_variants(*contents[node]) for node in names.values()], rng, most):
                files = tuple(zip(names, choice, strict=True))
                state = CrashState(acked=acked, files=files, folders=folders)
                if state not in seen:
                    seen.add(state)
                    yield state


def _pending(past: Sequence[Operation]) -> list[int]:
    """Positions of the edits that no fsync of their folder made durable."""
    synced = {operation.folder: at for at, operation in enumerate(past) if isinstance(operation, SyncFolder)}
    return [at for at, op in enumerate(past) if isinstance(op, Edit) and synced.get(op.folder, -1) < at]


def _contents(past: Sequence[Operation]) -> dict[int, tuple[bytes, int]]:
    """Of each node what was written to it, and how many bytes of that are durable."""
    contents: dict[int, tuple[bytes, int]] = {}
    for operation in past:
        if isinstance(operation, Edit):
            for _, node in operation.entries:
                if node is not None:
                    contents.setdefault(node, (b"", 0))
        elif isinstance(operation, Write):
            data, durable = contents[operation.file]
            contents[operation.file] = (data + operation.data, durable)
        elif isinstance(operation, SyncFile):
            data, _ = contents[operation.file]
            contents[operation.file] = (data, len(data))
    return contents


def _variants(data: bytes, durable: int) -> list[bytes]:
    """What a file may hold of which only the first ``durable`` bytes are certain: the rest whole, gone, half, zeros."""
    rest = len(data) - durable
    if rest == 0:
        return [data]
    return [data, data[:durable], data[: durable + rest // 2], data[:durable] + bytes(rest)]


def _choices(variants: list[list[bytes]], rng: random.Random, most: int) -> Iterator[tuple[bytes, ...]]:
    """One variant of each file: every combination, or ``most`` random ones where there are more."""
    if math.prod(map(len, variants)) <= most:
        yield from itertools.product(*variants)
        return
    for _ in range(most):
        yield tuple(rng.choice(options) for options in variants)


def _subsets(pending: Sequence[int], rng: random.Random, most: int) -> Iterator[frozenset[int]]:
    if 2 ** len(pending) <= most:
        for size in range(len(pending) + 1):
            yield from map(frozenset, itertools.combinations(pending, size))
        return
    whole = frozenset(pending)
    drawn = [whole, frozenset[int]()]
    for one in rng.sample(pending, min(len(pending), most // 3)):
        drawn += [whole - {one}, frozenset({one})]
    while len(drawn) < most:
        drawn.append(frozenset(one for one in pending if rng.random() < 0.5))
    yield from drawn


def _walk(edits: Iterable[Edit]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Carry the edits out; returns the folders and the files (path to node) that can be reached from the base."""
    tree: dict[int, dict[str, int]] = {BASE: {}}
    for edit in edits:
        entries = tree.setdefault(edit.folder, {})
        for name, node in edit.entries:
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node
                if edit.makes_folder:
                    tree.setdefault(node, {})
    folders: list[str] = []
    files: dict[str, int] = {}
    waiting = [("", BASE)]
    while waiting:
        prefix, folder = waiting.pop()
        for name, node in sorted(tree[folder].items()):
            if node in tree:
                folders.append(prefix + name)
                waiting.append((f"{prefix}{name}/", node))
            else:
                files[prefix + name] = node
    return tuple(folders), files


def without_file_syncs(operations: Sequence[Operation]) -> list[Operation]:
    """The same program had it not synced files."""
    return [operation for operation in operations if not isinstance(operation, SyncFile)]


def without_folder_syncs(operations: Sequence[Operation]) -> list[Operation]:
    """The same program had it not synced folders."""
    return [operation for operation in operations if not isinstance(operation, SyncFolder)]


def without_parent_syncs(operations: Sequence[Operation]) -> list[Operation]:
    """The same program had it made folders without syncing the folders that hold them."""
    holders = {
        operation.folder for operation in operations if isinstance(operation, Edit) and operation.makes_folder
    }
    return [op for op in operations if not (isinstance(op, SyncFolder) and op.folder in holders)]


def in_place(operations: Sequence[Operation]) -> list[Operation]:
    """The same program had it written as fsspec's local file system does: under the final name, without a sync."""
    temporary = {
        name for op in operations if isinstance(op, Edit) for name, _ in op.entries if name[:5] == ".tmp-"
    }
    final = {
        node: name
        for op in operations
        if isinstance(op, Edit) and not op.makes_folder
        for name, node in op.entries
        if node is not None and name not in temporary
    }
    result: list[Operation] = []
    made: set[int] = set()
    for operation in operations:
        if isinstance(operation, Edit) and not operation.makes_folder:
            for name, node in operation.entries:
                if node in final and node not in made:
                    made.add(node)
                    result.append(Edit(operation.folder, ((final[node], node),)))
                elif name not in temporary and node is None:
                    result.append(Edit(operation.folder, ((name, None),)))
        elif not isinstance(operation, SyncFile):
            result.append(operation)
    return result


def acknowledged_early(operations: Sequence[Operation], is_commit: Callable[[str], bool]) -> list[Operation]:
    """The same program had it acknowledged each save before publishing its commit record (``is_commit`` of its name).

    Of several stores, before any of them has it.
    """
    result: list[Operation] = []
    for operation in operations:
        if not isinstance(operation, Ack):
            result.append(operation)
            continue
        published = [
            (at, name)
            for at, op in enumerate(result)
            if isinstance(op, Edit)
            for name, node in op.entries
            if node is not None and is_commit(name)
        ]
        last = published[-1][1]
        result.insert(next(at for at, name in published if name == last), operation)
    return result
