"""The progress bar of a replay: on a terminal, for long ones, with every segment."""

import io
import sys
from uuid import uuid4

import pytest
from support.stepped import Training

from shrinkpoint.steps import replay
from shrinkpoint.steps.replay import ReplayBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, after_s: float) -> str:
    """What a replay of three segments prints."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(replay, "_AFTER_S", after_s)
    monkeypatch.setenv("TERM", "xterm")
    with ReplayBar() as bar:
        for done in (1, 2, 3):
            bar(done, 3)
        if bar._bar is not None:
            assert [(task.completed, task.total) for task in bar._bar.tasks] == [(3, 3)]
    return stderr.getvalue()


def test_a_long_replay_has_a_bar_on_a_terminal(monkeypatch):
    assert "replaying logged steps" in shown(Terminal(), monkeypatch, after_s=0.0)


def test_a_short_one_has_none(monkeypatch):
    assert shown(Terminal(), monkeypatch, after_s=1e9) == ""


def test_nor_has_one_without_a_terminal(monkeypatch):
    assert shown(io.StringIO(), monkeypatch, after_s=0.0) == ""


def test_a_resume_reports_every_segment(monkeypatch):
    name = uuid4().hex
    places = f"memory://{name}/run", f"memory://{name}/log"
    training = Training().log(*places, every=5, steps=1)
    training.checkpointer.resume()
    training.run(0, 8)
    training.crash()
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(ReplayBar, "__call__", lambda bar, done, of: calls.append((done, of)))
    assert Training().log(*places).checkpointer.resume() == 8
    assert calls == [(1, 3), (2, 3), (3, 3)]
