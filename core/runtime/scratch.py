"""A file on a local disk for what a save does not need in memory at the moment.

It has no name, so that nothing of it is left when the process ends, however it ends. What is written is read back by ordinary calls, into
memory that is allocated for it: of a file that is mapped, a disk that is full or fails would end the process with a signal.
"""

import os
import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from shrinkpoint.arrays import UInt8s
from shrinkpoint.errors import ConfigError, ScratchError
from shrinkpoint.warn import brief, warn

__all__ = ["Place", "Scratch", "ScratchFile", "check_scratch"]

_AT_ONCE = 1 << 25
"""Bytes of one call: a file system may limit them, and a checksum finds them in the processor's cache."""
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_HINT = "give a folder on a local disk, or leave scratch_folder out"


def check_scratch(folder: object) -> None:
    """Refuse what is no folder to write to.

    Args:
        folder: as of `SaverConfig.scratch_folder`; None is none.

    Raises:
        ConfigError: it is not there, is no folder, or cannot be written to.
    """
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
    """Makes files in a folder; warns once where one cannot be made or written to.

    Args:
        folder: on a local disk.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = _path(folder)
        """Its absolute path."""
        self._warned = False

    def look(self) -> None:
        """Warn where the folder is in memory itself."""
        kind = _file_system(self.folder)
        if kind in _MEMORY:
            warn(
                f"scratch_folder={self.folder!r} is in memory itself ({kind}), so that a save takes no less of it: {_HINT}"
            )

    def file(self) -> "ScratchFile":
        """A new file. It is gone, and its room on the disk free, as soon as nothing refers to it or to a `Place` in it."""
        return ScratchFile(self)

    def trouble(self, error: OSError) -> None:
        """Warn, the first time, that something stays in memory.

        Args:
            error: why.
        """
        if not self._warned:
            self._warned = True
            warn(
                f"nothing more could be written to scratch_folder={self.folder!r} ({error.strerror or error}): saves go on, and take"
                " memory for it instead. Is there room for three times the training's state? This warning comes once"
            )


class ScratchFile:
    """Appends to a file without a name, until that fails once.

    Args:
        scratch: whose it is.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
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

    @property
    def folder(self) -> str:
        """Where it is."""
        return self._scratch.folder

    def put(self, data: UInt8s) -> "Place | None":
        """Write some bytes; from any thread.

        Args:
            data: contiguous.

        Returns:
            Where they are; None, after a warning, where they could not be written.
        """
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
                self._scratch.trouble(error)
                with suppress(
                    OSError
                ):  # others may need the room; a disk that fails does not give it back either
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
        """Fill memory from an offset on.

        Raises:
            OSError: the disk has failed, or the file is shorter.
        """
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
        """Read them back; from any thread.

        Args:
            memory: `size` bytes, contiguous.

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
                f"scratch_folder={self.file.folder!r} cannot be read ({error.strerror or error}): is its disk failing? Give another"
                " one, or leave scratch_folder out"
            ) from error
        if checksum.digest() != self.checksum:
            raise ScratchError(
                f"scratch_folder={self.file.folder!r} gives back other bytes than were written there: its disk is failing, or"
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
    """The kind of file system that a folder is on, as Linux names it; None where that is not known."""
    point = os.path.realpath(folder)
    while not os.path.ismount(point) and point != os.path.dirname(point):
        point = os.path.dirname(point)
    kind = None
    try:
        with open("/proc/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields = line.split(" ")
                if len(fields) > 2 and _unescaped(fields[1]) == point:
                    kind = fields[2]  # the last one hides the others
    except OSError:  # no Linux, or a sandbox: then no warning either
        return None
    return kind


def _unescaped(path: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path
