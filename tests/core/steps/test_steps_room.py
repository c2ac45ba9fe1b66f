"""A file system with too little room: the log is off before it is full, the training continues, and there is one warning."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from support.small_log import SmallLogTraining
from support.stepped import Training

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.steps.room import Room
from shrinkpoint.store.urls import parse_url

MB = 10**6


def file_system(monkeypatch: pytest.MonkeyPatch, folder: Path, *, total: float, used: float = 0.0) -> Any:
    """Let a folder seem to be all that there is in a small file system; returns the bytes in it now."""

    def there() -> float:
        return used + sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    monkeypatch.setattr(
        "shrinkpoint.steps.room.shutil.disk_usage",
        lambda path: SimpleNamespace(total=total, used=there(), free=total - there()),
    )
    return there


def room(every: int | None, intervals: int = 2) -> Room:
    return Room(parse_url("/dev/shm/steps"), intervals, every)


def lack(of: Room, *, size: int, kept: int, step_bytes: float) -> str:
    reason = of.lack(size=size, kept=kept, step_bytes=step_bytes)
    assert reason is not None
    return reason


def test_two_intervals_must_fit_besides_a_part_for_others(tmp_path, monkeypatch):
    file_system(monkeypatch, tmp_path, total=160 * MB, used=40 * MB)  # 110 MB, and 10 MB for others
    assert room(55).lack(size=8 * MB, kept=0, step_bytes=MB) is None
    reason = lack(room(56), size=8 * MB, kept=0, step_bytes=MB)
    assert "the steps of 2 intervals between checkpoints, which are kept, take 0.112 GB" in reason
    assert "has 0.11 GB, besides 0.01 GB that are left to other programs" in reason
    assert "save more often than every 56 steps" in reason
    assert room(37, intervals=3).lack(size=8 * MB, kept=0, step_bytes=MB) is not None
    assert room(56).lack(size=8 * MB, kept=8 * MB, step_bytes=MB) is None  # which are there already


def test_a_segment_must_fit_where_no_interval_is_known(tmp_path, monkeypatch):
    file_system(monkeypatch, tmp_path, total=160 * MB, used=140 * MB)
    assert room(None).lack(size=10 * MB, kept=0, step_bytes=MB) is None
    assert "the next steps take 0.0101 GB" in lack(
        room(None), size=10_100_000, kept=50 * MB, step_bytes=10 * MB
    )


def test_the_interval_is_learned_from_commits(tmp_path, monkeypatch):
    file_system(monkeypatch, tmp_path, total=160 * MB, used=100 * MB)
    learning = room(None)
    learning.committed(100)
    assert learning.lack(size=MB, kept=0, step_bytes=MB) is None
    learning.committed(130)
    assert "every 30 steps" in lack(learning, size=MB, kept=0, step_bytes=MB)
    skipping = room(10)  # of which every other save is skipped
    assert skipping.lack(size=MB, kept=0, step_bytes=2 * MB) is None
    skipping.committed(20)
    skipping.committed(40)
    assert "every 20 steps" in lack(skipping, size=MB, kept=0, step_bytes=2 * MB)


def test_of_a_remote_log_nothing_is_known():
    remote = Room(parse_url("memory://far/log"), 2, 10**9)
    assert remote.lack(size=10**15, kept=0, step_bytes=10.0**12) is None


def told_once(training: Any, begin: int, end: int, match: str) -> None:
    def steps() -> None:
        for step in range(begin, end):
            training.run(step, step + 1)
            training.checkpointer.step_log.flush()

    with pytest.warns(ShrinkpointWarning, match=match) as told:
        steps()
    assert len(told) == 1


def test_a_log_without_room_for_two_intervals_is_off_and_told_once(tmp_path, monkeypatch):
    truth = Training()
    losses = truth.run(0, 8)
    (tmp_path / "log").mkdir()
    there = file_system(monkeypatch, tmp_path / "log", total=16 * MB)
    training = Training().log(f"memory://{uuid4().hex}/run", str(tmp_path / "log"), every=1000)
    training.checkpointer.resume()
    told_once(training, 0, 6, "save more often than every 1000 steps")
    assert there() < 1000  # all that was written is the segment that takes the turn
    assert training.run(6, 8) == losses[6:]
    training.checkpointer.close()


def test_the_small_log_is_off_too(tmp_path, monkeypatch):
    there = file_system(monkeypatch, tmp_path / "run" / "steps", total=400_000)
    training = SmallLogTraining(tmp_path / "run", every=1000)
    training.run(0, 1)
    training.checkpointer.save(1, wait=True)
    told_once(training, 1, 8, "the step log is off: the steps of 3 intervals between checkpoints")
    assert training.log.off is not None
    assert there() < 1000
    training.checkpointer.close()


def test_a_small_log_that_fits_is_on(tmp_path, monkeypatch):
    there = file_system(monkeypatch, tmp_path / "run" / "steps", total=1 * MB)
    training = SmallLogTraining(tmp_path / "run", every=10).run(0, 45)
    assert training.log.off is None
    assert 10_000 < there() < MB
    training.checkpointer.close()


def test_what_a_resumed_training_inherits_counts_as_kept(tmp_path, monkeypatch):
    """It has room for two intervals together with what is there, and not in addition to it."""
    places = f"memory://{uuid4().hex}/run", str(tmp_path / "log")
    training = Training().log(*places, every=15)
    training.checkpointer.resume()
    training.run(0, 8)
    training.crash()
    there = sum(path.stat().st_size for path in (tmp_path / "log").rglob("*.steps"))
    file_system(monkeypatch, tmp_path / "log", total=34 * there / 8 * 16 / 15)
    again = Training().log(*places, every=15)
    assert again.checkpointer.resume() == 8
    again.run(8, 14)
    again.checkpointer.step_log.flush()
    again.run(14, 15)
    assert again.checkpointer.step_log.off is None
    again.checkpointer.close()
