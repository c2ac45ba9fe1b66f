"""Compiled kernels of a wheel: used where they fit the sources, numba and the processor, and otherwise as if there were none."""

import json
import platform
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from shrinkpoint.engine import warmup
from shrinkpoint.entropy.static import huffman_kernels
from shrinkpoint.runtime import kernel_cache
from shrinkpoint.runtime.jit import jit_allocating
from shrinkpoint.runtime.kernel_cache import KernelCache

FUNCTION = huffman_kernels.huffman_encode.py_func
LEVEL = kernel_cache.Level("of-tests", frozenset({"cmov"}))


@pytest.fixture(autouse=True)
def _known_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "LEVELS", {platform.machine(): LEVEL})
    monkeypatch.setattr(kernel_cache, "_features", lambda: iter(["cmov", "sse"]))


@pytest.fixture(scope="module", name="kernel")
def _kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiled here, and not taken from numba's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        kernel = jit_allocating(FUNCTION)
        written(kernel)
    return kernel


@pytest.fixture(name="package")
def _package(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package's folder with one compiled kernel, which is looked up there; numba's own folders are empty."""
    monkeypatch.setattr(numba.config, "CPU_NAME", LEVEL.name)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "")
    assert kernel_cache.write([kernel], ["auto", "lossless"], at=tmp_path / "package") == 1
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache._wheel.cache_clear()
    relative = kernel_cache._relative
    monkeypatch.setattr(kernel_cache, "_relative", lambda level: tmp_path / "package" / relative(level))
    return tmp_path / "package"


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Any:
    yield
    kernel_cache._wheel.cache_clear()


def written(kernel: Any) -> bytes:
    """What a kernel makes of some arguments."""
    out = np.zeros(1, np.uint8)
    kernel(np.array([2, 0, 1]), np.array([0, 2, 3]), np.array([1, 2, 2]), out)
    return out.tobytes()


def loaded(kernel: Any) -> Any:
    """What a fresh process would find."""
    return KernelCache(FUNCTION).load_overload(kernel.signatures[0], kernel.targetctx)


def test_a_kernel_is_taken_from_the_package(kernel: Any, package: Path) -> None:
    assert written(loaded(kernel).entry_point) == written(kernel) == bytes([0b11010000])
    assert not list(package.parent.joinpath("cache").rglob("*.nbc"))


def test_what_was_compiled_for_this_processor_comes_first(kernel: Any, package: Path) -> None:
    kept = KernelCache(FUNCTION)
    kept.save_overload(kernel.signatures[0], kernel.overloads[kernel.signatures[0]])
    assert [Path(each).is_relative_to(package) for each in kept.folders()] == [False, True]
    for file in package.rglob("*.nbc"):
        file.unlink()
    assert loaded(kernel) is not None


def test_the_wheel_says_nothing_of_the_machine_that_compiled(kernel: Any, package: Path) -> None:
    files = list(package.rglob("*.nb[ic]"))
    assert len(files) == 2
    home = str(Path(np.__file__).parents[1]).encode()
    assert [file for file in files if home in file.read_bytes()] == []


@pytest.mark.parametrize(
    "change",
    [
        "sources",
        "features",
        "machine",
        "numba",
        "off",
        "another processor",
        "fewer features",
        "file cut",
        "bit",
        "missing",
        "folder",
    ],
)
def test_what_does_not_fit_counts_as_missing(
    kernel: Any, package: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel_cache.includes(["auto"])
    kernel_cache._wheel.cache_clear()
    if change == "sources":
        monkeypatch.setattr(kernel_cache, "kernel_sources", lambda: "others")
    elif change == "features":
        monkeypatch.setattr(kernel_cache, "_features", lambda: iter(["sse"]))
    elif change == "machine":
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    elif change == "numba":
        monkeypatch.setattr(numba, "__version__", "0.0")
    elif change == "off":
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    elif change == "another processor":
        monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    elif change == "fewer features":
        monkeypatch.setattr(numba.config, "CPU_NAME", None)
        monkeypatch.setattr(numba.config, "CPU_FEATURES", "-avx2")
    else:
        [file] = package.rglob("*.nbc")
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        if change == "bit":  # of the object code: LLVM would end the process, or run it
            at = whole.index(b"\x7fELF") + 16
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        elif change == "missing":
            file.unlink()
        elif change == "folder":  # stands for a file that cannot be read, which root always can
            file.unlink()
            file.mkdir()
    assert loaded(kernel) is None
    assert not kernel_cache.includes(["auto"])


def test_coders_are_compiled_if_all_that_is_asked_for_is_there(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "_folders", lambda: iter([]))
    assert warmup.is_compiled("auto")
    assert warmup.is_compiled("lossless")
    assert not warmup.is_compiled("excp")
    assert not kernel_cache.includes(["auto", "excp"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"sources": 1, "coders": 2, "files": 3}',
        '{"sources": "", "coders": [["x"]], "files": {}}',
        "[" * 10**5,
    ],
)
def test_a_damaged_list_of_coders_counts_as_none(kernel: Any, package: Path, text: str) -> None:
    [contents] = package.rglob("contents.json")
    assert json.loads(contents.read_text())["coders"]
    contents.write_text(text)
    assert not kernel_cache.includes(["auto"])


def test_a_function_of_another_package_has_none(kernel: Any, package: Path) -> None:
    assert [folder.is_relative_to(package) for folder in KernelCache(FUNCTION).folders()] == [False, True]
    assert [folder.is_relative_to(package) for folder in KernelCache(loaded).folders()] == [False]


def test_kernels_for_one_processor_are_not_put_into_a_wheel(
    kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    with pytest.raises(RuntimeError, match="has to compile for of-tests"):
        kernel_cache.write([kernel], ["auto"], at=tmp_path)
    monkeypatch.setattr(kernel_cache, "LEVELS", {})
    with pytest.raises(RuntimeError, match="none is known"):
        kernel_cache.write([kernel], ["auto"], at=tmp_path)
    assert list(tmp_path.iterdir()) == []
