"""Kernels that a platform's wheel contains compiled, so that a fresh machine compiles nothing.

`write` puts what numba compiled in this process into the package's folder ``precompiled``, when a wheel is built
(``.ci/platform_wheel.py``). The files are those of numba's own cache, for one version of numba and one of Python, and
for a *level* of processors (x86-64-v3: those with AVX2) instead of the one that compiled them. A kernel is taken from
there if numba, Python and every source that kernels depend on are the same, the processor has what the level needs,
numba is set to no other one (``NUMBA_CPU_NAME``), and no file is damaged or missing: numba would execute what is in them,
or LLVM end the process. Otherwise it is compiled as if there were none.

Importing this module imports numba (see `shrinkpoint.runtime.jit`).
"""

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
from llvmlite import binding
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

__all__ = ["LEVELS", "Level", "PrecompiledKernels", "includes", "precompiled", "write"]

_PACKAGE = Path(__file__).parents[1]
_CONTENTS = "contents.json"
_WITH_KERNELS = ("entropy", "quantize", "runtime", "schemes")


class Level(NamedTuple):
    """Processors that run the same machine code: their name in LLVM, and the features that they all have."""

    name: str
    features: frozenset[str]


LEVELS: Mapping[str, Level] = {
    "x86_64": Level("x86-64-v3", frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}))
}
"""What wheels are built for, by `platform.machine`."""


def includes(coders: Collection[str]) -> bool:
    """Whether all of these coders, as `write` was given them, are precompiled for this machine."""
    folder = _folder()
    return folder is not None and set(coders) <= set(_contents(folder)["coders"])


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
    if level is None or (level.name, "") != (numba.config.CPU_NAME, numba.config.CPU_FEATURES):
        raise RuntimeError(
            f"numba has to compile for {level.name if level else 'a level, of which none is known'}"
        )
    folder = at / _relative(level)
    written = 0
    for kernel in kernels:
        kept = PrecompiledKernels(kernel.py_func, folder, level, writable=True)
        for signature, compiled in kernel.overloads.items():
            kept.save_overload(signature, compiled)
            written += 1
    contents = folder / _CONTENTS
    noted = {"sources": _sources(), "coders": sorted(coders), "files": _digests(folder)}
    contents.write_text(json.dumps(noted, indent=1))
    return written


class PrecompiledKernels(FunctionCache):  # type: ignore[misc]
    """The compiled versions of one kernel, in numba's own format.

    Args:
        function: the kernel's Python function, of this package.
        folder: of all kernels for one level.
        level: which it is.
        writable: whether to make the folder.

    Raises:
        RuntimeError: there are none of this function.
    """

    def __init__(
        self, function: Callable[..., Any], folder: Path, level: Level, *, writable: bool = False
    ) -> None:
        self._impl_class = partial(_Files, _Places(folder, writable))
        self._level = level.name
        super().__init__(function)

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        types, _, *code = super()._index_key(signature, codegen)
        return (types, self._level, *code)


def precompiled(function: Callable[..., Any]) -> PrecompiledKernels | None:
    """What this machine can use of a kernel's compiled versions; None if there are none."""
    folder, level = _folder(), LEVELS.get(platform.machine())
    if folder is None or level is None:
        return None
    try:
        return PrecompiledKernels(function, folder, level)
    except RuntimeError:  # numba's "cannot cache function": not one of this package
        return None


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    def __init__(self, places: "_Places", function: Callable[..., Any]) -> None:
        self._locator_classes = [places]
        super().__init__(function)

    def reduce(self, compiled: Any) -> Any:
        """Without the listing of types, which nothing reads and which has the paths of the machine that compiled."""
        return super().reduce(compiled._replace(type_annotation=""))


class _Places(NamedTuple):
    """Finds the folder of a kernel's files, as numba's classes of locators do."""

    root: Path
    writable: bool

    def from_function(self, function: Callable[..., Any], file: str) -> "_Place | None":
        """None for a function of another package, or of whose folder nothing was compiled."""
        path = Path(file)
        if not path.is_relative_to(_PACKAGE):
            return None
        folder = self.root / path.parent.relative_to(_PACKAGE)
        if self.writable:
            folder.mkdir(parents=True, exist_ok=True)
        return _Place(folder, function.__code__.co_firstlineno) if folder.is_dir() else None


class _Place(_CacheLocator):  # type: ignore[misc]
    def __init__(self, folder: Path, line: int) -> None:
        self._folder = folder
        self._line = line

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return _sources()

    def get_disambiguator(self) -> str:
        return str(self._line)


@cache
def _sources() -> str:
    """A digest of what compiled kernels depend on."""
    digest = hashlib.sha256()
    for folder in _WITH_KERNELS:
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(_PACKAGE).as_posix()} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _folder() -> Path | None:
    """The kernels for this machine's level, by this numba and for this Python; None if there are none that can be used."""
    level = LEVELS.get(platform.machine())
    if level is None or numba.config.DISABLE_JIT or not _is_meant(level):
        return None
    if (
        sys.flags.optimize > 1
    ):  # without docstrings, other constants have other numbers: numba finds none of them
        return None
    folder = _PACKAGE / _relative(level)
    noted = _contents(folder)
    try:
        sound = noted["sources"] == _sources() and noted["files"] == _digests(folder)
    except OSError:  # one cannot be read
        return None
    return folder if sound else None


def _is_meant(level: Level) -> bool:
    """Whether numba is to compile for the level, or for this machine and that has what the level needs."""
    others = {numba.config.CPU_NAME, numba.config.CPU_FEATURES} - {None, level.name, ""}
    return not others and level.features <= set(_features())


def _features() -> Iterator[str]:
    return (name for name, there in binding.get_host_cpu_features().items() if there)


def _relative(level: Level) -> Path:
    return Path("precompiled", f"numba-{numba.__version__}-{sys.implementation.cache_tag}", level.name)


def _digests(folder: Path) -> dict[str, str]:
    """Of all kernels' files, by their place in the folder."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.nb[ic]"))
    }


def _contents(folder: Path) -> dict[str, Any]:
    """What `write` noted; nothing where there are no kernels, or the list is damaged."""
    try:
        noted = json.loads((folder / _CONTENTS).read_text())
        return {
            "sources": noted["sources"],
            "coders": [str(coder) for coder in noted["coders"]],
            "files": dict(noted["files"]),
        }
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {"sources": None, "coders": [], "files": {}}
