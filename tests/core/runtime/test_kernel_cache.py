"""Compiled kernels are found where they may only be read, kept where that is safe, and never why anything fails."""

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.runtime import kernel_cache
from shrinkpoint.runtime.kernel_cache import KernelCache, keep, kept_of

SOURCE = """
from shrinkpoint.runtime.jit import jit

@jit
def doubled(x):
    return 2 * x
"""


@pytest.fixture(autouse=True)
def _told_anew() -> Iterator[None]:
    kernel_cache._warn_once.cache_clear()
    yield
    kernel_cache._warn_once.cache_clear()


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Imports a module with one kernel, as if in a new process; nothing of the user's own is looked at."""
    source = tmp_path / "package" / "kernels.py"
    source.parent.mkdir()
    source.write_text(SOURCE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")

    def anew() -> ModuleType:
        spec = importlib.util.spec_from_file_location("kernels", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return anew


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets numba find no folder writable but those below the given ones: it tries by making a temporary file there."""
    made = tempfile.TemporaryFile

    def but(*folders: Path) -> None:
        def refuses(*arguments: object, dir: str, **options: object) -> object:
            if not any(Path(dir).is_relative_to(folder) for folder in folders):
                raise OSError(30, "Read-only file system", dir)
            return made(*arguments, dir=dir, **options)

        monkeypatch.setattr(tempfile, "TemporaryFile", refuses)

    return but


def was_compiled(kernel: object) -> bool:
    """Whether its call compiled it, rather than that it was found."""
    assert kernel(21) == 42
    return bool(kernel.stats.cache_misses)


def test_what_an_image_brings_along_is_found_where_nothing_can_be_written(imported, read_only) -> None:
    assert was_compiled(imported().doubled)
    read_only()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = imported().doubled
        assert not was_compiled(found)
    assert found.stats.cache_path is None


def test_what_an_image_brings_along_is_found_beside_a_folder_of_the_user(
    imported, read_only, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "image"))
    assert was_compiled(imported().doubled)
    read_only(tmp_path / "home")
    found = imported().doubled
    assert not was_compiled(found)
    assert found.stats.cache_path.startswith(str(tmp_path / "home"))
    kept = kept_of(found)
    assert kept is not None
    assert [str(folder).startswith(str(tmp_path / "image")) for folder in kept.folders()] == [
        False,
        True,
        False,
    ]


def test_a_folder_that_is_named_and_can_be_written_is_the_only_one(
    imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert was_compiled(imported().doubled)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "named"))
    assert was_compiled(imported().doubled)
    assert not was_compiled(imported().doubled)


def test_a_folder_of_the_users_own_is_the_last_resort(imported, read_only, tmp_path: Path) -> None:
    read_only(tmp_path / "tmp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = imported().doubled
        assert was_compiled(first)
        assert not was_compiled(imported().doubled)
    folder = tmp_path / "tmp" / f"shrinkpoint-coders-{os.getuid()}"
    assert Path(first.stats.cache_path).is_relative_to(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["open", "a link", "another's"])
def test_what_others_could_have_written_is_not_run(
    imported, read_only, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = tmp_path / "tmp" / f"shrinkpoint-coders-{os.getuid()}"
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o777 if how == "open" else 0o700)
        folder.chmod(0o777 if how == "open" else 0o700)
    if how == "another's":
        uid = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: uid)
        folder.rename(tmp_path / "tmp" / f"shrinkpoint-coders-{os.getuid()}")
    read_only(tmp_path / "tmp", tmp_path / "elsewhere")
    assert imported().doubled.stats.cache_path is None


def test_without_a_temporary_folder_what_an_image_brings_along_is_found(
    imported, read_only, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing at all may be written, Python knows no temporary folder."""
    assert was_compiled(imported().doubled)

    def none_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    read_only()
    assert not was_compiled(imported().doubled)


def test_where_nothing_can_be_kept_the_price_is_told_once(imported, read_only) -> None:
    read_only()
    kernel = imported().doubled
    with pytest.warns(ShrinkpointWarning, match="CPU seconds.*NUMBA_CACHE_DIR") as told:
        assert kernel(21) == 42
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel(21.5) == 43.0


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", b"cut"])
def test_damaged_files_are_made_again(imported, suffix: str, content: bytes) -> None:
    first = imported().doubled
    assert was_compiled(first)
    (file,) = Path(first.stats.cache_path).glob(f"*{suffix}")
    file.write_bytes(file.read_bytes()[:40] if content == b"cut" else content)
    assert was_compiled(imported().doubled)
    assert not was_compiled(imported().doubled)


def test_a_full_disk_costs_no_save(imported, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    kernel = imported().doubled
    with pytest.warns(ShrinkpointWarning, match="No space left on device"):
        assert kernel(21) == 42


def test_a_function_that_is_not_compiled_has_no_cache() -> None:
    def function(x: int) -> int:
        return x

    assert keep(function, function) is function
    assert kept_of(function) is None


def test_numba_may_empty_it(imported) -> None:
    kernel = imported().doubled
    assert was_compiled(kernel)
    cache = kept_of(kernel)
    assert isinstance(cache, KernelCache)
    cache.flush()
    assert was_compiled(imported().doubled)


def test_coders_that_numba_is_told_not_to_compile_are_said_to_be_slow() -> None:
    programs = (
        "import shrinkpoint.entropy.static.rans_kernels, shrinkpoint.entropy.static.table_kernels",
        "import sys; from shrinkpoint.cli.app import main; sys.argv[1:] = ['compile']; main()",
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
            capture_output=True,
            text=True,
        )
        for program in programs
    ]
    assert [each.returncode for each in done] == [0, 1]
    assert done[0].stderr.count("the coders run as plain Python") == 1
    assert "error: NUMBA_DISABLE_JIT is set, so numba compiles nothing: unset it" in done[1].stderr


def test_kernels_are_compiled_from_nothing_that_a_cache_does_not_notice() -> None:
    """A cache is of all the sources that `kernel_sources` reads, so kernels may have no others."""
    package = Path(kernel_cache.__file__).resolve().parents[1]
    for file in package.rglob("*_kernels.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module != "shrinkpoint.arrays":  # types
                name = f"{(node.module or '').rpartition('.')[2]}.py"
                ours = (node.module or "").startswith("shrinkpoint.")
                assert not ours or any(fnmatch(name, each) for each in kernel_cache._SOURCES), file
