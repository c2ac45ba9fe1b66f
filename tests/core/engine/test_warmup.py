"""Coders are compiled beside the training; whatever becomes of that, saves go on."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.training import TinyMLP

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.coding.selective import decode_checkpoint
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine import warmup
from shrinkpoint.engine.warmup import Warmup
from shrinkpoint.saver import Saver

WAITS = "import time; time.sleep(600)"
FAILS = "import sys; print('no room', file=sys.stderr); sys.exit(3)"

PARENT = """
import sys, time
from shrinkpoint.engine.warmup import Warmup
warmup = Warmup("auto")
warmup.start()
print(warmup._child.process.pid, flush=True)
if sys.argv[1] == "lives":
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def compiled_where_called() -> None:
    """In the place of the suite's own: here, children are started."""


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a child was asked to compile, where nothing is compiled yet; none is started."""
    asked: list[str] = []
    monkeypatch.setattr(warmup, "is_compiled", lambda scheme: False)
    monkeypatch.setattr(warmup, "_spawn", lambda scheme: asked.append(scheme))
    return asked


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch):
    """Lets a program run in the place of the one that compiles, where nothing is compiled yet."""

    def instead(program: str) -> None:
        def spawn(scheme: str) -> warmup._Child:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_Child.end` closes it
            command = [sys.executable, "-c", program]
            return warmup._Child(subprocess.Popen(command, stderr=errors), errors)

        monkeypatch.setattr(warmup, "_spawn", spawn)
        monkeypatch.setattr(warmup, "is_compiled", lambda scheme: False)

    return instead


def started(scheme: str = "auto") -> Warmup:
    found = Warmup(scheme)
    found.start()
    return found


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether the process is there, and not one that has ended and only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_no_process_where_all_is_compiled(spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(warmup, "is_compiled", lambda scheme: asked.append(scheme) or True)
    started().wait()
    assert asked == ["auto"]
    assert spawned == []


def test_one_process_where_it_is_not(child) -> None:
    child("pass")
    found = started()
    running = found._child
    assert running is not None
    found.start()
    assert found._child is running
    found.wait()
    assert running.process.returncode == 0


def test_the_first_save_waits_for_it_in_the_background(
    child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    child(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)")
    checkpointer = Checkpointer(
        str(tmp_path / "run"), model := TinyMLP(), torch.optim.AdamW(model.parameters()), scheme="lossless"
    )
    saver = checkpointer.saver
    assert saver._warmup._child is not None
    said: list[str] = []
    monkeypatch.setattr(
        "shrinkpoint.engine.under_way.waiting_for", lambda text: said.append(text) or nullcontext()
    )
    assert checkpointer.save(1) is not None
    assert not saver.flush(0.2)
    assert said[0].endswith("whose coders are being compiled")
    assert saver.reports() == []
    gate.touch()
    assert saver.flush(60)
    assert checkpointer.save(2) is not None
    assert saver.flush(60)
    assert "compiled" not in said[-1]
    assert [report.step for report in saver.reports()] == [1, 2]
    assert saver.close()


def test_a_failure_is_told_and_the_save_goes_on(
    child, tmp_path: Path, warned_in_background: list[Warning]
) -> None:
    child(FAILS)
    saver = Saver(str(tmp_path / "run"), SaverConfig(scheme="lossless"))
    saver.check()
    with pytest.warns(match="exit code 3: no room"):
        assert saver.save({"weight": torch.zeros(8)}, step=1, wait=True) is not None
    saver.close()
    warned_in_background.clear()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", [OSError("out of processes"), AttributeError("of another numba")])
def test_where_none_can_be_had_training_begins_and_the_save_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned_in_background: list[Warning], error: Exception
) -> None:
    def spawn(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(warmup, "is_compiled", lambda scheme: False)
    monkeypatch.setattr(warmup, "_spawn", spawn)
    saver = Saver(str(tmp_path / "run"), SaverConfig(scheme="lossless"))
    saver.check()
    assert saver.save({"weight": torch.zeros(8)}, step=1, wait=True) is not None
    saver.close()
    assert [str(warning) for warning in warned_in_background if str(error) in str(warning)]
    warned_in_background.clear()


def test_one_that_never_ends_is_ended(
    child, monkeypatch: pytest.MonkeyPatch, warned_in_background: list[Warning]
) -> None:
    child(WAITS)
    monkeypatch.setattr(warmup, "_LIMIT_S", 0.1)
    with pytest.warns(match="none after 0.1 s"):
        started().wait()
    warned_in_background.clear()


@pytest.mark.filterwarnings("error")
def test_close_ends_it_without_a_word(child, tmp_path: Path) -> None:
    child(WAITS)
    saver = Saver(str(tmp_path / "run"))
    saver.check()
    child = saver._warmup._child
    assert saver.close()
    assert child.process.returncode == -signal.SIGKILL
    assert child.end() == ""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_it_does_not_outlive_the_training(tmp_path: Path, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "ends" if how == "ends" else "lives"],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if how == "killed":
        assert runs(pid)
        parent.kill()
    said = parent.communicate(timeout=60)[1]
    wait_until(lambda: not runs(pid))
    assert said == ""


def test_without_a_cache_there_is_no_process(spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "cache_folder", lambda: None)
    started().wait()
    assert spawned == []


@pytest.mark.parametrize("where", ["frozen", "itself", "nowhere"])
def test_no_process_where_it_would_be_the_training_itself(
    spawned, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In a frozen application the executable is the application, which would begin to train, and so on."""
    if where == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif where == "itself":
        monkeypatch.setenv("SHRINKPOINT_WARMUP", "1")
    else:
        monkeypatch.setattr(sys, "executable", "")
    assert started()._failure is None
    assert spawned == []


def test_modules_are_those_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the working folder's; to the end, with the real program."""
    (tmp_path / "torch.py").write_text("raise SystemExit('taken for torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    child = warmup._spawn("lossless")
    assert child.process.wait(300) == 0, child.end()
    child.end()


def test_a_restore_has_the_cache_for_itself(child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, config = str(tmp_path / "run"), SaverConfig(scheme="lossless")
    first = Saver(url, config)
    first.save({"weight": torch.zeros(8)}, step=1, wait=True)
    first.close()
    child(WAITS)
    saver = Saver(url, SaverConfig(scheme="lossless"))
    seen = []

    def decode(*arguments: object, **options: object) -> object:
        seen.append(saver._warmup._child)
        return decode_checkpoint(*arguments, **options)

    monkeypatch.setattr("shrinkpoint.engine.placement.decode_checkpoint", decode)
    saver.check()
    before = saver._warmup._child
    assert before is not None
    assert saver.restore() is not None
    assert saver.restore(1) is not None
    assert seen == [None, None]
    assert before.process.returncode == -signal.SIGKILL
    assert saver._warmup._child is not None
    saver.close()
    unopened = Saver(url, SaverConfig(scheme="lossless"))
    assert unopened.restore() is not None
    assert unopened._warmup._child is None
