"""What a save does not need in memory at the moment, in files on a local disk.

A file has no name, so that nothing of it is left when the process ends, however it ends. What is written is read back by ordinary calls, into
memory that is allocated for it: of a file that is mapped, a disk that is full or fails would end the process with a signal.

A `DiskTensor` has its dtype and shape at hand. Every operation of torch on it, and every view of it as an array, reads the file, and works on
what was read; nothing is kept. So all that reads a snapshot works on one whose moments are on the disk. What is in a file is not
written to.
"""

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils._pytree import tree_map_only

from shrinkpoint.arrays import UInt8s
from shrinkpoint.errors import ConfigError, ScratchError
from shrinkpoint.state.dtypes import empty_tensor, tensor_to_bytes
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.training import Role, TensorSpec, TrainingState
from shrinkpoint.warn import brief, warn

_LEAST = 1 << 16
"""Bytes from which on a tensor or an array is written; smaller ones stay in memory."""
_MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES, Role.STATE)
_AT_ONCE = 1 << 25
"""Bytes of one call: a file system may limit them, and a checksum finds them in the processor's cache."""
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_HINT = "give a folder on a local disk, or leave scratch_folder out"


def check_scratch(folder: object) -> None:
    """Refuse what is no folder to write to: a ConfigError where it is not there, is no folder, or cannot be written to."""
    if folder is None:
        return
    if not (isinstance(folder, str | os.PathLike) and str(folder)):
        raise ConfigError(f"scratch_folder must be a folder on a local disk, or None, not {brief(folder)}")
    path = _path(folder)
    if not os.path.isdir(path):
        raise ConfigError(
            f"scratch_folder={str(folder)!r} is no folder on this machine: make it first, {_HINT}"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"scratch_folder={str(folder)!r} cannot be written to by this process: {_HINT}")


class Scratch:
    """Puts parts of one save after another into a folder, each into a file of its own, which is gone when the part
    is.

    What cannot be written stays in memory, after one warning.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = _path(folder)
        """Its absolute path."""
        self._warned = False

    def check(self) -> None:
        """Warn where the folder is in memory itself."""
        kind = _file_system(self.folder)
        if kind in _MEMORY:
            warn(
                f"scratch_folder={self.folder!r} is in memory itself ({kind}), so that a save takes no less of it: {_HINT}"
            )

    def file(self) -> "ScratchFile":
        """Return a new file. It is gone, and its room on the disk free, as soon as nothing refers to it or to a `Place` in it."""
        return ScratchFile(self)

    def weights(
        self, state: TrainingState, wanted: Callable[[TensorSpec], bool], *, lasting: bool
    ) -> TrainingState:
        """Return those tensors of a snapshot that the next one is compared with; it stays as it is.

        Where it is `lasting`, nobody will write to it any more, and what stays in memory is not copied.
        """
        file = self.file()
        specs = {name: spec for name, spec in state.specs.items() if wanted(spec)}
        tensors = {}
        for name in specs:
            tensor = state.tensors[name].detach()
            kept = put_tensor(file, tensor)
            tensors[name] = kept if kept is not tensor or lasting else tensor.to("cpu", copy=True)
        return TrainingState(None, tensors, specs)

    def moments(self, snapshot: Snapshot, state: TrainingState) -> TrainingState:
        """Return a snapshot without its moments in memory: each is read where it is used. The roles are those that
        are known by now."""
        file = self.file()
        tensors = dict(state.tensors)
        for name, spec in state.specs.items():
            if spec.tag.role in _MOMENTS:
                tensors[name] = put_tensor(file, tensors[name])
                snapshot.hold(name, tensors[name])
        return TrainingState(state.tree, tensors, state.specs)

    def trouble(self, error: OSError) -> None:
        """Warn, the first time, that something stays in memory, and why."""
        if not self._warned:
            self._warned = True
            warn(
                f"nothing more could be written to scratch_folder={self.folder!r} ({error.strerror or error}): saves go on, and take"
                " memory for it instead. Is there room for three times the training's state? This warning comes once"
            )


class ScratchFile:
    """Appends to a file without a name, until that fails once."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        """Whose it is."""
        self._lock = threading.Lock()
        self._end = 0
        self._fails = False
        self._file: Any = None
        try:
            self._file = tempfile.TemporaryFile(dir=scratch.folder, buffering=0)  # noqa: SIM115 - closed by `finalize`
        except OSError as error:
            scratch.trouble(error)
            return
        weakref.finalize(self, _free, self._file, os.getpid()).atexit = False  # the system closes it then

    def put(self, data: UInt8s) -> "Place | None":
        """Write some contiguous bytes, from any thread; None, after a warning, where that was not possible."""
        with self._lock:
            if self._file is None or self._fails:
                return None
            checksum = xxhash.xxh3_128()
            try:
                for start in range(0, data.size, _AT_ONCE):
                    part = data[start : start + _AT_ONCE]
                    checksum.update(part.data)
                    self._write(part.data, self._end + start)
            except OSError as error:
                self._fails = True
                self.scratch.trouble(error)
                with suppress(OSError):  # others may need the room; a disk that fails does not give it back
                    os.ftruncate(self._file.fileno(), self._end)
                return None
            place = Place(self, self._end, data.size, checksum.digest())
            self._end += data.size
            return place

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill memory from an offset on, or raise an OSError where the disk has failed, or the file is shorter."""
        while memory:
            count = os.preadv(self._file.fileno(), [memory], offset)
            if not count:
                raise OSError("the file is shorter than what was written")
            memory, offset = memory[count:], offset + count


@dataclass(frozen=True)
class Place:
    """Some bytes in a file."""

    file: ScratchFile
    offset: int
    size: int
    checksum: bytes
    """xxh3-128."""

    def read(self, memory: UInt8s) -> None:
        """Read them back into contiguous memory of `size` bytes; from any thread.

        Raises:
            ScratchError: they cannot be read, or are others than were written.
        """
        checksum = xxhash.xxh3_128()
        try:
            for start in range(0, self.size, _AT_ONCE):
                part = memory[start : start + _AT_ONCE].data
                self.file.read(part, self.offset + start)
                checksum.update(part)
        except OSError as error:
            raise ScratchError(
                f"scratch_folder={self.file.scratch.folder!r} cannot be read ({error.strerror or error}): is its disk failing? Give another"
                " one, or leave scratch_folder out"
            ) from error
        if checksum.digest() != self.checksum:
            raise ScratchError(
                f"scratch_folder={self.file.scratch.folder!r} gives back other bytes than were written there: its disk is failing, or"
                " something else writes to it. Give another one, or leave scratch_folder out"
            )


def _free(file: Any, process: int) -> None:
    """Close a file, and free its room also where a process that was forked meanwhile still has it open."""
    with file:
        if os.getpid() == process:
            with suppress(OSError):  # of a disk that fails
                os.ftruncate(file.fileno(), 0)


def _path(folder: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(folder)))


def _file_system(folder: str) -> str | None:
    """Return the kind of file system that a folder is on, as Linux names it; None where that is not known."""
    try:
        device = os.stat(folder).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                place, kind = line.split(" - ")
                if place.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                    return kind.split()[0]
    except (OSError, ValueError):  # no Linux, or a sandbox: then no warning either
        pass
    return None


_ATTRIBUTES = "shape dtype device layout requires_grad ndim nbytes itemsize is_cpu is_cuda is_meta"
_METHODS = "numel dim size stride element_size is_complex is_contiguous is_floating_point"
_KNOWN: frozenset[Any] = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    )
)
"""What is known of a tensor without its values."""
_CHANGES: frozenset[Any] = frozenset(
    (torch.Tensor.data.__set__, torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_)  # type: ignore[attr-defined]
)
"""What would change a tensor, and leaves its version as it is."""


class PlanesLostError(ScratchError):
    """Arrays cannot be read back: what was built on them is built on nothing now."""


class DiskTensor(torch.Tensor):
    """A tensor whose values are in a file, in C order, with the dtype and shape of another one."""

    _place: Place

    @staticmethod
    def __new__(cls, place: Place, like: torch.Tensor) -> "DiskTensor":
        """Return the tensor, without values."""
        make: Callable[..., DiskTensor] = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(cls, like.shape, dtype=like.dtype, device="cpu")
        made._place = place
        return made

    def read(self) -> torch.Tensor:
        """Return an ordinary tensor, read anew, or raise a ScratchError."""
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(mode=False):
            made = empty_tensor(self.shape, self.dtype)
        self._place.read(tensor_to_bytes(made))
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is known, and read for all else."""
        if function in _CHANGES:
            raise TypeError(f"{function} would change a tensor that is on the disk, which is not written to")
        if function in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return _on_values(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the same for what comes from within torch."""
        return _on_values(function, args, kwargs)


def _on_values(function: Any, args: Any, kwargs: Mapping[str, Any] | None) -> Any:
    values: list[torch.Tensor] = []

    def read(tensor: DiskTensor) -> torch.Tensor:
        values.append(tensor.read())
        return values[-1]

    args, kwargs = tree_map_only(DiskTensor, read, (args, dict(kwargs or {})))
    found = function(*args, **kwargs)
    if any(tensor._version for tensor in values):
        raise TypeError(f"{function} would change a tensor that is on the disk, which is not written to")
    return found


class DiskArrays(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name, each of which is read anew whenever it is asked for, unless it is small."""

    def __init__(
        self, arrays: Mapping[str, npt.NDArray[Any] | tuple[Place, np.dtype[Any], tuple[int, ...]]]
    ) -> None:
        self._arrays = dict(arrays)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        found = self._arrays[name]
        if isinstance(found, np.ndarray):
            return found
        place, dtype, shape = found
        made = np.empty(shape, dtype)
        try:
            place.read(made.reshape(-1).view(np.uint8))
        except ScratchError as error:
            raise PlanesLostError(str(error)) from error
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def sizes(self) -> set[int]:
        """Numbers of elements of the arrays."""
        return {
            found.size if isinstance(found, np.ndarray) else int(np.prod(found[2]))
            for found in self._arrays.values()
        }

    @property
    def nbytes(self) -> int:
        """Bytes that they take in memory."""
        return sum(found.nbytes for found in self._arrays.values() if isinstance(found, np.ndarray))


def put_tensor(file: ScratchFile, tensor: torch.Tensor) -> torch.Tensor:
    """Write a tensor, and return its stand-in, which reads the file; itself where it is small, there already, or
    cannot be written."""
    if isinstance(tensor, DiskTensor) or tensor.nbytes < _LEAST:
        return tensor
    place = file.put(tensor_to_bytes(tensor))
    return tensor if place is None else DiskTensor(place, tensor)


def put_arrays(file: ScratchFile, arrays: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
    """Write arrays, and return their stand-ins, in the same order; one that is small, or cannot be written, is given itself."""
    if isinstance(arrays, DiskArrays) or all(array.nbytes < _LEAST for array in arrays.values()):
        return arrays
    found: dict[str, npt.NDArray[Any] | tuple[Place, np.dtype[Any], tuple[int, ...]]] = {}
    for name, array in arrays.items():
        place = None
        if array.nbytes >= _LEAST:
            place = file.put(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        found[name] = array if place is None else (place, array.dtype, array.shape)
    return DiskArrays(found)


def in_memory(state: TrainingState) -> TrainingState:
    """Return the same state with all of its tensors in memory, or raise a ScratchError."""
    if not any(isinstance(tensor, DiskTensor) for tensor in state.tensors.values()):
        return state
    tensors = {
        name: tensor.read() if isinstance(tensor, DiskTensor) else tensor
        for name, tensor in state.tensors.items()
    }
    return TrainingState(state.tree, tensors, state.specs)
