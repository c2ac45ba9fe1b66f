"""What is put into a scratch file comes back, or an error does; nothing is left of it."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError, ScratchError
from shrinkpoint.saver import Saver
from shrinkpoint.state import scratch
from shrinkpoint.state.scratch import Scratch


def bytes_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full then; a write is cut there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def descriptor_of(file: scratch.ScratchFile) -> int:
    return file._file.fileno()


def test_bytes_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_AT_ONCE", 100)
    file = Scratch(tmp_path).file()
    all_data = [bytes_of(seed, count) for seed, count in enumerate((1, 0, 99, 100, 101, 12345))]
    places = [file.put(data) for data in all_data]
    for place, data in zip(reversed(places), reversed(all_data), strict=True):
        assert place is not None
        found = np.empty(place.size, np.uint8)
        place.read(found)
        assert np.array_equal(found, data)


def test_no_name_is_left(tmp_path: Path) -> None:
    file = Scratch(tmp_path).file()
    place = file.put(bytes_of(0, 1000))
    assert not list(tmp_path.iterdir())
    number = descriptor_of(file)
    del file
    os.fstat(number)  # the place has it
    del place
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, numpy as np\n"
        "from shrinkpoint.state.scratch import Scratch\n"
        "assert Scratch(sys.argv[1]).file().put(np.zeros(10**6, np.uint8))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_room_is_free_where_a_forked_process_has_the_file_open(tmp_path: Path) -> None:
    file = Scratch(tmp_path).file()
    file.put(bytes_of(0, 10**6))
    other = os.dup(descriptor_of(file))  # as it stays in a loader's worker
    del file
    assert os.fstat(other).st_size == 0
    os.close(other)


def test_a_forked_process_takes_nothing_away(tmp_path: Path) -> None:
    file = Scratch(tmp_path).file()
    data = bytes_of(0, 1000)
    place = file.put(data)
    child = os.fork()
    if not child:
        scratch._free(file._file, os.getppid())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert place is not None
    found = np.empty(1000, np.uint8)
    place.read(found)
    assert np.array_equal(found, data)


def test_on_a_full_disk_what_is_there_stays_and_one_warning_tells(tmp_path: Path) -> None:
    found = Scratch(tmp_path)
    file, data = found.file(), bytes_of(0, 3000)
    place = file.put(data)
    with files_of_at_most(4000):
        with pytest.warns(match=r"nothing more could be written to scratch_folder=.*saves go on"):
            assert file.put(data) is None
        assert os.fstat(descriptor_of(file)).st_size == 3000  # what was cut is gone
        assert file.put(bytes_of(1, 10)) is None  # it is not tried again
        assert found.file().put(bytes_of(1, 5000)) is None  # no second warning, which would be an error
    assert place is not None
    memory = np.empty(3000, np.uint8)
    place.read(memory)
    assert np.array_equal(memory, data)
    assert found.file().put(bytes_of(1, 5000)) is not None  # the next file is tried


def test_a_folder_that_has_vanished_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    found = Scratch(folder)
    folder.rmdir()
    with pytest.warns(match="nothing more could be written"):
        file = found.file()
    assert file.put(bytes_of(0, 10)) is None


def test_other_bytes_are_an_error(tmp_path: Path) -> None:
    file = Scratch(tmp_path).file()
    place, other = file.put(bytes_of(0, 1000)), file.put(bytes_of(1, 1000))
    assert place is not None
    assert other is not None
    os.pwrite(descriptor_of(file), bytes([bytes_of(0, 1000)[500] ^ 1]), 500)
    with pytest.raises(ScratchError, match=r"scratch_folder=.* gives back other bytes .*Give another one"):
        place.read(np.empty(1000, np.uint8))
    other.read(np.empty(1000, np.uint8))


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Scratch(tmp_path).file()
    place = file.put(bytes_of(0, 1000))
    assert place is not None

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing)
        with pytest.raises(ScratchError, match=r"cannot be read \(Input/output error\)"):
            place.read(np.empty(1000, np.uint8))
    os.ftruncate(descriptor_of(file), 10)
    with pytest.raises(ScratchError, match="shorter"):
        place.read(np.empty(1000, np.uint8))


def test_a_disk_that_fails_at_everything_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Scratch(tmp_path).file()
    assert file.put(bytes_of(0, 1000)) is not None

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        patched.setattr(os, "ftruncate", failing)
        with pytest.warns(match=r"nothing more could be written .*Input/output error"):
            assert file.put(bytes_of(1, 1000)) is None
        del file  # an error while it is let go of would be a warning of Python's


@pytest.mark.parametrize("value", [3, "", b"/tmp", "no/such/folder", __file__])
def test_what_is_no_folder_is_refused_at_construction(value: object) -> None:
    with pytest.raises(ConfigError, match=r"scratch_folder.*local disk"):
        SaverConfig(scratch_folder=value)


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SaverConfig(scratch_folder=tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(
        ConfigError, match=r"scratch_folder=.* cannot be written to .*leave scratch_folder out"
    ):
        SaverConfig(scratch_folder=tmp_path)


def test_adoption_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adopt with scratch_folder="):
        SaverConfig(adopt=3, scratch_folder=tmp_path)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a file system in memory")
def test_a_folder_in_memory_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(match=r"scratch_folder='/dev/shm' is in memory itself \(tmpfs\)"):
        Saver(str(tmp_path / "run"), SaverConfig(scratch_folder="/dev/shm")).check()
    Scratch(tmp_path).check()
