"""What takes long is said after a while, on a terminal as a line, elsewhere in the log, and not to the quiet."""

import io
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import TinyMLP
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.runtime import progress
from shrinkpoint.runtime.progress import quieted, waiting_for
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter


def wait_until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER_S", 0.05)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """To be called in the test, before which pytest puts its own stream there."""

    def opened() -> Terminal:
        stream = Terminal()
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        return stream

    return opened


def test_a_terminal_gets_a_line_that_goes_away(terminal: Callable[[], Terminal]) -> None:
    stream = terminal()
    with waiting_for("reading [step] 3") as waiting:
        wait_until(lambda: "reading [step] 3" in stream.getvalue())
        waiting.say("reading [step] 4")
        wait_until(lambda: "reading [step] 4" in stream.getvalue())
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is erased


def test_what_is_quick_says_nothing(
    terminal: Callable[[], Terminal], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shrinkpoint.runtime.progress")
    stream = terminal()
    with waiting_for("reading"):
        pass
    time.sleep(0.2)
    assert stream.getvalue() == ""
    assert not caplog.records


def test_elsewhere_it_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    caplog.set_level(logging.INFO, logger="shrinkpoint.runtime.progress")
    with waiting_for("reading") as waiting:
        wait_until(lambda: bool(caplog.records))
        waiting.say("reading on")
    assert [record.getMessage() for record in caplog.records] == ["reading ..."]
    assert capsys.readouterr().err == ""


def test_without_a_log_it_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(logging.getLogger("shrinkpoint.runtime.progress"), "hasHandlers", lambda: False)
    said: list[str] = []

    def read() -> bool:
        said.append(capsys.readouterr().err)
        return bool(said[-1])

    with waiting_for("reading") as waiting:
        wait_until(read)
        waiting.say("reading on")
    assert "".join([*said, capsys.readouterr().err]) == "shrinkpoint: reading ...\n"


def test_the_quiet_hear_nothing(terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal()
    with quieted(True), quieted(True), waiting_for("reading"):
        time.sleep(0.2)
    with quieted(False), waiting_for("reading") as waiting:
        logging.getLogger("shrinkpoint").setLevel(logging.WARNING)
        time.sleep(0.2)
    logging.getLogger("shrinkpoint").setLevel(logging.NOTSET)
    monkeypatch.setenv("SHRINKPOINT_QUIET", "1")
    waiting.begin()
    with waiting_for("reading"):
        time.sleep(0.2)
    assert stream.getvalue() == ""


def test_errors_pass_and_no_thread_is_left(terminal: Callable[[], Terminal]) -> None:
    terminal()
    before = threading.active_count()

    def divide() -> float:
        with waiting_for("dividing"):
            time.sleep(0.2)
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    time.sleep(0.3)
    assert threading.active_count() == before


def slow_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> shrinkpoint.Checkpointer:
    torch.manual_seed(0)
    model = TinyMLP()
    made = shrinkpoint.Checkpointer(
        str(tmp_path / "run"), model, torch.optim.SGD(model.parameters(), 0.1), scheme="lossless"
    )
    commit = RunWriter.commit

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return commit(*arguments, **options)

    monkeypatch.setattr(RunWriter, "commit", slowly)
    return made


def test_closing_says_what_it_waits_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shrinkpoint.runtime.progress")
    checkpointer = slow_run(tmp_path, monkeypatch)
    checkpointer.save(7)
    checkpointer.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("waiting for the last save, of step 7, to ")


def test_another_one_of_the_same_run_says_what_it_waits_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shrinkpoint.runtime.progress")
    first = slow_run(tmp_path, monkeypatch)
    first.save(7)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shrinkpoint.Checkpointer(str(tmp_path / "link"), model, optimizer, scheme="lossless").close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("waiting for the last save by an earlier saver of this process, of step 7, to ")
    first.close()


def test_resuming_and_verifying_say_what_they_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = slow_run(tmp_path, monkeypatch)
    checkpointer.save(7, wait=True)
    checkpointer.close()
    url = str(tmp_path / "run")
    fetch_blob = RunStore.fetch_blob

    def slowly(store: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return fetch_blob(store, *arguments, **options)

    monkeypatch.setattr("shrinkpoint.store.run.RunStore.fetch_blob", slowly)
    caplog.set_level(logging.INFO, logger="shrinkpoint.runtime.progress")
    shrinkpoint.Saver(url).restore(7)
    runner = CliRunner()
    assert runner.invoke(app, ["verify", url, "--all"]).exit_code == 0
    assert runner.invoke(app, ["export", f"{url}#step=7", str(tmp_path / "a.ckpt")]).exit_code == 0
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("reading the checkpoint of step 7 of ")
    assert "verifying step 7 (1 of 1) ..." in told
    assert told[2].startswith("reading ")
    caplog.clear()
    assert runner.invoke(app, ["--quiet", "verify", url]).exit_code == 0
    assert not caplog.records
    assert not progress.is_quiet()
