"""Keeps compiled kernels in numba's cache; reads them where nothing can be written, too, and from a wheel; never fails a save.

numba uses the first folder that it may write to, and no other. An image whose kernels were compiled when it was built,
and which runs with a read-only file system or as another user, would compile them again at every start. Here kernels
that are not in the chosen folder are looked up in the others and in the package itself, and if none is writable, the user's
own folder in the temporary folder is used. A damaged file counts as missing, and a failed write gives a warning: compiling
continues without a cache.

A platform's wheel contains compiled kernels (`write`, called by ``.ci/platform_wheel.py``), so that a fresh machine compiles nothing.
They are for one version of numba and one of Python, and for a *level* of processors (x86-64-v3: those with AVX2) instead of the one
that compiled them. They are used if numba, Python and the kernels' sources are the same, the processor has what the level needs, numba
is set to no other one (``NUMBA_CPU_NAME``), and no file is damaged or missing: numba would execute what is in them, or LLVM end the
process. Otherwise kernels are compiled as if there were none.

Importing this module imports numba (see `shrinkpoint.runtime.jit`).
"""

import hashlib
import inspect
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
from llvmlite import binding
from numba.core import config
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
    _CacheLocator,
)
from numba.core.dispatcher import Dispatcher

from shrinkpoint.warn import warn

_CACHE = "_cache"  # the attribute of a kernel in which numba looks for its cache
_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = "*_kernels.py", "jit.py", "tables.py"
"""Files that kernels are compiled from: their modules, their compiler, and the one other module whose constants they have."""
_CONTENTS = "contents.json"


class Level(NamedTuple):
    """Processors that run the same machine code: their name in LLVM, and the features that they all have."""

    name: str
    features: frozenset[str]


LEVELS: Mapping[str, Level] = {
    "x86_64": Level("x86-64-v3", frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}))
}
"""What wheels are built for, by `platform.machine`."""


def keep(kernel: Any, function: Callable[..., Any]) -> Any:
    """Attach the cache to a compiled kernel of `function`; a plain function (with ``NUMBA_DISABLE_JIT``) is not
    changed, and the first one warned of."""
    if isinstance(kernel, Dispatcher):
        setattr(kernel, _CACHE, KernelCache(function))
    elif kernels_are_interpreted():
        _warn_of_interpreting()
    return kernel


def kernels_are_interpreted() -> bool:
    """Return whether numba is set to compile nothing."""
    return bool(config.DISABLE_JIT)


def kept_of(kernel: object) -> "KernelCache | None":
    """Return the cache of a kernel; None of anything else."""
    found = getattr(kernel, _CACHE, None) if isinstance(kernel, Dispatcher) else None
    return found if isinstance(found, KernelCache) else None


class KernelCache:
    """The cache of one kernel, instead of numba's own.

    Args:
        function: the kernel's Python function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        folders = [Path(folder) for folder in _folders(function)]
        own = next((folder for folder in folders if _is_writable(folder)), None) or _temporary(function)
        self._own = None if own is None else _Kernels(function, own)
        # a folder that is named and can be written is the only one
        self._others = (
            [] if config.CACHE_DIR and own == folders[0] else [each for each in folders if each != own]
        )

    @property
    def cache_path(self) -> str | None:
        """The folder that is written to; None if none is writable."""
        return self._own.cache_path if self._own is not None else None

    @cached_property
    def _all(self) -> list["_Kernels"]:
        """What is read, in this order: last the wheel's, since what was compiled for just this processor may be faster."""
        others = [_Kernels(self._function, folder) for folder in self._others if os.path.isdir(folder)]
        wheel, file = _wheel(), _file(self._function)
        if wheel is not None and file.is_relative_to(_PACKAGE):
            others.append(_Kernels(self._function, _in_wheel(wheel.folder, file), wheel.level))
        return [*([] if self._own is None else [self._own]), *others]

    def folders(self) -> Iterator[Path]:
        """Yield every folder that is read, in this order."""
        return (Path(each.cache_path) for each in self._all)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the compiled kernel for these types, from the first folder with an undamaged copy; None if there is none."""
        for each in self._all:
            try:
                found = each.load_overload(signature, target)
            except Exception:  # noqa: BLE001 - a damaged pickle may raise anything, and counts as missing
                continue
            if found is not None:
                return found
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store a compiled kernel, if possible; never raises in the background."""
        if self._own is None:
            _warn_once("numba finds no folder that it may write to")
            return
        try:
            try:
                self._own.save_overload(signature, compiled)
            except OSError:
                raise
            except Exception:  # noqa: BLE001 - the index is read first, and is damaged
                self._own.flush()
                self._own.save_overload(signature, compiled)
        except OSError as error:
            _warn_once(f"{self.cache_path} cannot be written ({error})")

    def flush(self) -> None:
        """Clear the writable cache."""
        if self._own is not None:
            self._own.flush()


@cache
def _warn_of_interpreting() -> None:
    warn(
        "NUMBA_DISABLE_JIT is set: the coders run as plain Python, which takes up to a hundred times as long and the"
        " interpreter's lock from the training. Unset it"
    )


@cache
def _warn_once(why: str) -> None:
    warn(
        f"the compiled coders cannot be kept: {why}. Every process compiles what it calls, for some 10 CPU seconds before a restore"
        " and half a minute before a save; let NUMBA_CACHE_DIR name a folder that lasts, or run `shrinkpoint compile` where"
        " an image is built (docs/clusters.md)"
    )


def _file(function: Callable[..., Any]) -> Path:
    return Path(inspect.getfile(function)).resolve()


def _folders(function: Callable[..., Any]) -> Iterator[str]:
    """Yield where numba looks for a folder that may be written to, in its order."""
    for kind in (UserProvidedCacheLocator, InTreeCacheLocator, UserWideCacheLocator):
        if kind is not UserProvidedCacheLocator or config.CACHE_DIR:
            yield kind(function, inspect.getfile(function)).get_cache_path()


def _is_writable(folder: Path) -> bool:
    try:
        _Folder(folder, 0).ensure_cache_path()
    except OSError:
        return False
    return True


def _temporary(function: Callable[..., Any]) -> Path | None:
    """Return the last resort of a read-only machine: a folder that only this user may write to, since its contents are executed."""
    try:
        own = Path(tempfile.gettempdir(), f"shrinkpoint-coders-{os.getuid()}")
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError:  # no temporary folder may be written to either
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return None
    folder = own / _CacheLocator.get_suitable_cache_subpath(inspect.getfile(function))
    return folder if _is_writable(folder) else None


@cache
def kernel_sources() -> str:
    """Return a digest of what all kernels are compiled from."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in _SOURCES for file in _PACKAGE.rglob(pattern)):
        digest.update(f"{file.relative_to(_PACKAGE).as_posix()} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _Kernels(FunctionCache):  # type: ignore[misc]
    """The compiled versions of one kernel in one folder, in numba's own format.

    Args:
        function: the kernel's Python function.
        folder: of its files.
        level: of the processors that they are for; None: those of the machine that compiled them.
    """

    def __init__(self, function: Callable[..., Any], folder: Path, level: str | None = None) -> None:
        self._impl_class = partial(_Files, folder)
        self._level = level
        super().__init__(function)

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        types, machine, *code = super()._index_key(signature, codegen)
        return (types, self._level or machine, *code)


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    def __init__(self, folder: Path, function: Callable[..., Any]) -> None:
        self._folder, self._locator_classes = folder, [self]
        super().__init__(function)

    def from_function(self, function: Callable[..., Any], file: str) -> "_Folder":
        """Asked for by numba of each of its classes of folders."""
        return _Folder(self._folder, function.__code__.co_firstlineno)

    def reduce(self, compiled: Any) -> Any:
        """Without the listing of types, which nothing reads and which has the paths of the machine that compiled."""
        return super().reduce(compiled._replace(type_annotation=""))


class _Folder(_CacheLocator):  # type: ignore[misc]
    """Where a kernel's files are, and what they were compiled from.

    Kernels are compiled with the parts and the constants of other modules. numba looks at a kernel's own module alone: after an update
    of a checkout, kernels of two versions would work on each other's arrays.
    """

    def __init__(self, folder: Path, line: int) -> None:
        self._folder, self._line = folder, line

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return kernel_sources()

    def get_disambiguator(self) -> str:
        return str(self._line)


# ---- a platform's wheel


class _Wheel(NamedTuple):
    folder: Path
    level: str
    coders: frozenset[str]


def includes(coders: Collection[str]) -> bool:
    """Return whether all of these coders, as `write` was given them, are precompiled for this machine."""
    wheel = _wheel()
    return wheel is not None and wheel.coders.issuperset(coders)


def write(kernels: Iterable[Any], coders: Iterable[str], *, at: Path) -> int:
    """Put all that was compiled of some kernels into the package's folder.

    To be called where numba compiles for the machine's level: ``NUMBA_CPU_NAME`` is its name, and
    ``NUMBA_CPU_FEATURES`` is empty.

    Args:
        kernels: compiled functions of this package (`shrinkpoint.runtime.jit`).
        coders: what they are enough for; `includes` finds it again.
        at: the package's folder in the wheel.

    Returns:
        How many compiled functions were written.

    Raises:
        RuntimeError: numba compiles for other processors, or there is no level for this machine.
    """
    level = LEVELS.get(platform.machine())
    if level is None or (level.name, "") != (config.CPU_NAME, config.CPU_FEATURES):
        raise RuntimeError(
            f"numba has to compile for {level.name if level else 'a level, of which none is known'}"
        )
    folder = at / _relative(level)
    written = 0
    for kernel in kernels:
        kept = _Kernels(kernel.py_func, _in_wheel(folder, _file(kernel.py_func)), level.name)
        for signature, compiled in kernel.overloads.items():
            kept.save_overload(signature, compiled)
            written += 1
    noted = {"sources": kernel_sources(), "coders": sorted(coders), "files": _digests(folder)}
    (folder / _CONTENTS).write_text(json.dumps(noted, indent=1))
    return written


@cache
def _wheel() -> _Wheel | None:
    """Return the kernels for this machine's level, by this numba and for this Python; None if there are none that can be used."""
    level = LEVELS.get(platform.machine())
    if level is None or config.DISABLE_JIT:
        return None
    if {config.CPU_NAME, config.CPU_FEATURES} - {None, level.name, ""}:
        return None  # numba is to compile for other processors
    if not level.features <= set(_features()):
        return None
    if sys.flags.optimize > 1:  # without docstrings, constants have other numbers: numba finds none of them
        return None
    folder = _PACKAGE / _relative(level)
    try:
        noted = json.loads((folder / _CONTENTS).read_text())
        sound = noted["sources"] == kernel_sources() and noted["files"] == _digests(folder)
        return _Wheel(folder, level.name, frozenset(noted["coders"])) if sound else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # none, or damaged
        return None


def _features() -> Iterator[str]:
    return (name for name, there in binding.get_host_cpu_features().items() if there)


def _relative(level: Level) -> Path:
    return Path("precompiled", f"numba-{numba.__version__}-{sys.implementation.cache_tag}", level.name)


def _in_wheel(folder: Path, file: Path) -> Path:
    """Return the folder of the kernels of a module of this package."""
    return folder / file.parent.relative_to(_PACKAGE)


def _digests(folder: Path) -> dict[str, str]:
    """Return those of all kernels' files, by their place in the folder."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.nb[ic]"))
    }
