"""A cache of compiled kernels on top of numba's: it also reads folders that are not writable, and never fails a save.

numba uses the first folder that it may write to, and no other. An image whose kernels were compiled when it was built,
and which runs with a read-only file system or as another user, would compile them again at every start. Here kernels
that are not in the chosen folder are looked up in the others and in the package itself
(`shrinkpoint.runtime.precompiled`), and if none is writable, the user's own folder in the temporary folder is used. A
damaged file counts as missing, and a failed write gives a warning: compiling continues without a cache.

Importing this module imports numba (see `shrinkpoint.runtime.jit`).
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from numba.core import config
from numba.core.caching import (
    CacheImpl,
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
    _SourceFileBackedLocatorMixin,
)
from numba.core.dispatcher import Dispatcher

from shrinkpoint.runtime.precompiled import precompiled
from shrinkpoint.warn import warn

__all__ = ["KernelCache", "keep", "kept_of", "kernel_sources", "kernels_are_interpreted"]

_CACHE = "_cache"  # the attribute of a kernel in which numba looks for its cache


def keep(kernel: Any, function: Callable[..., Any]) -> Any:
    """Attach the cache to a compiled kernel of `function`; a plain function (with ``NUMBA_DISABLE_JIT``) is not
    changed, and the first one warned of."""
    if isinstance(kernel, Dispatcher):
        setattr(kernel, _CACHE, KernelCache(function))
    elif kernels_are_interpreted():
        _warn_of_interpreting()
    return kernel


def kernels_are_interpreted() -> bool:
    """Whether numba is set to compile nothing."""
    return bool(config.DISABLE_JIT)


def kept_of(kernel: object) -> "KernelCache | None":
    """The cache of a kernel; None of anything else."""
    found = getattr(kernel, _CACHE, None) if isinstance(kernel, Dispatcher) else None
    return found if isinstance(found, KernelCache) else None


class KernelCache:
    """The cache of one kernel, instead of numba's own.

    Args:
        function: the kernel's Python function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._own: Any = None
        try:
            self._own = _Writable(function)
        except RuntimeError:  # numba's "cannot cache function": no folder may be written to
            return

    @property
    def cache_path(self) -> str | None:
        """The folder that is written to; None if none is writable."""
        return self._own.cache_path if self._own is not None else None

    @cached_property
    def read_only(self) -> list[Any]:
        """Caches in numba's other folders, as far as they exist, in numba's order.

        Empty if ``NUMBA_CACHE_DIR`` names a writable folder: then only that one is used.
        """
        found: list[Any] = []
        if config.CACHE_DIR and self.cache_path and Path(self.cache_path).is_relative_to(config.CACHE_DIR):
            return found
        for locator in CacheImpl._locator_classes:
            try:
                other = _readable(locator)(self._function)
            except RuntimeError:  # it has no folder for this kernel
                continue
            if other.cache_path != self.cache_path:
                found.append(other)
        return found

    @cached_property
    def precompiled(self) -> Any:
        """What the installed wheel has for this machine (`shrinkpoint.runtime.precompiled`); None if it has nothing.

        It is looked up last: what was compiled for just this processor may be faster.
        """
        return precompiled(self._function)

    def folders(self) -> Iterator[Path]:
        """Every folder that is read, in this order."""
        for each in self._all():
            yield Path(each.cache_path)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled kernel for these types, from the first folder with an undamaged copy; None if there is none."""
        for each in self._all():
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

    def enable(self) -> None:
        """As numba's own."""
        for each in self._all():
            each.enable()

    def disable(self) -> None:
        """As numba's own."""
        for each in self._all():
            each.disable()

    def flush(self) -> None:
        """Clear the writable cache."""
        if self._own is not None:
            self._own.flush()

    def _all(self) -> Iterator[Any]:
        if self._own is not None:
            yield self._own
        yield from self.read_only
        if self.precompiled is not None:
            yield self.precompiled


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


class _InTemporaryFolder(_SourceFileBackedLocatorMixin, _CacheLocator):  # type: ignore[misc]
    """The last resort, for a read-only machine: a folder that only this user may write to, since its contents are
    executed."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file = file
        self._lineno = function.__code__.co_firstlineno
        try:
            self._folder = Path(tempfile.gettempdir(), f"shrinkpoint-coders-{os.getuid()}")
        except FileNotFoundError as error:  # no temporary folder may be written to either
            raise RuntimeError(f"cannot cache {function.__qualname__}: {error}") from error

    def get_cache_path(self) -> str:
        return str(self._folder / self.get_suitable_cache_subpath(self._py_file))

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self._folder} is open to others")
        super().ensure_cache_path()


class _WritableFiles(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (*CacheImpl._locator_classes, _InTemporaryFolder)


@cache
def kernel_sources() -> str:
    """A digest of the sources of all kernels."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).resolve().parents[1].rglob("*_kernels.py")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _KernelFiles(FunctionCache):  # type: ignore[misc]
    """Kernels are compiled with the parts and the constants of other modules, so a cache is of all their sources.

    numba looks at a kernel's own module alone: after an update of a checkout, kernels of two versions would work on each other's
    arrays.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp(), kernel_sources()
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)


class _Writable(_KernelFiles):
    """In the first folder that may be written to."""

    _impl_class = _WritableFiles


@cache
def _readable(locator: Any) -> Any:
    """A cache in the folder of one of numba's locators, if that exists, writable or not."""

    def is_there(self: Any) -> None:  # instead of an attempt to write there
        if not os.path.isdir(self.get_cache_path()):
            raise FileNotFoundError(self.get_cache_path())

    readable = type(f"Readable{locator.__name__}", (locator,), {"ensure_cache_path": is_there})
    files = type("_ReadableFiles", (CompileResultCacheImpl,), {"_locator_classes": (readable,)})
    return type("_Readable", (_KernelFiles,), {"_impl_class": files})
