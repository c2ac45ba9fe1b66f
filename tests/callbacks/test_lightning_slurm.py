"""Under SLURM the run is saved where Lightning would write a checkpoint of its own, and the newer of the two is continued."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from support.lightning_models import Crash, fit

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.config import Advanced
from shrinkpoint.errors import ConfigError, ShrinkpointWarning

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NODELIST": "localhost",
}


@pytest.fixture(name="job", autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of SLURM's; what `scontrol` was told is a line in the file."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    before = signal.getsignal(signal.SIGUSR1)
    yield tmp_path / "told"
    signal.signal(signal.SIGUSR1, before)


def _fit(tmp_path: Path, *callbacks: Any, every: int | None = 100, **options: Any) -> Any:
    ours = CompressedCheckpoint(
        str(tmp_path / "run"), every_n_train_steps=every, scheme="lossless", advanced=Advanced(busy="wait")
    )
    environment = SLURMEnvironment(auto_requeue=True)
    root = {"default_root_dir": str(tmp_path / "root"), "plugins": [environment]}
    return fit(ours, *callbacks, **{**root, **options})


class Signalled(Callback):
    def __init__(self, step: int, number: signal.Signals = signal.SIGUSR1) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(self.number)


def test_the_run_is_saved_and_the_job_requeued(tmp_path: Path, job: Path) -> None:
    _fit(tmp_path, Signalled(12), Crash(15))
    assert job.read_text() == "requeue 7\n"
    assert not list((tmp_path / "root").glob("hpc_ckpt*"))
    whole = fit()
    part = _fit(tmp_path, Signalled(20))
    assert part.trace == whole.trace[13:]
    assert job.read_text() == "requeue 7\n" * 2


def test_the_newer_of_the_run_and_of_lightnings_own_checkpoint_is_continued(tmp_path: Path) -> None:
    own = fit(Crash(13), default_root_dir=str(tmp_path / "root"))
    own.trainer.save_checkpoint(tmp_path / "root" / "hpc_ckpt_1.ckpt")
    first = _fit(tmp_path, Crash(21), every=1)
    assert first.trace[0][2] == 13
    with pytest.warns(ShrinkpointWarning, match=r"hpc_ckpt_1.ckpt.* is older than step 20 of .*run"):
        second = _fit(tmp_path, max_epochs=3)
    assert second.trace[0][2] == 20
    third = fit(max_epochs=4, ckpt_path=str(tmp_path / "root" / "hpc_ckpt_1.ckpt"))
    third.trainer.save_checkpoint(tmp_path / "root" / "hpc_ckpt_2.ckpt")
    with pytest.warns(ShrinkpointWarning, match=r"hpc_ckpt_2.ckpt.* is newer than step 24"):
        last = _fit(tmp_path, max_epochs=5)
    assert last.trace[0][2] == 32


def test_the_newer_of_the_run_and_of_a_checkpoint_at_an_error_is_continued(tmp_path: Path) -> None:
    def go_on(*callbacks: Any, **options: Any) -> Any:
        ours = CompressedCheckpoint(
            str(tmp_path / "run"), every_n_train_steps=5, scheme="lossless", advanced=Advanced(busy="wait")
        )
        return fit(ours, OnExceptionCheckpoint(tmp_path), *callbacks, **options)

    go_on(Crash(13))
    written = (tmp_path / "on_exception.ckpt").read_bytes()
    with pytest.warns(ShrinkpointWarning, match=r"on_exception.ckpt.* is newer than step 10 of .*run"):
        second = go_on(max_epochs=2)
    assert second.trace[0][2] == 13
    (tmp_path / "on_exception.ckpt").write_bytes(written)  # as where the second one was killed
    with pytest.warns(ShrinkpointWarning, match=r"on_exception.ckpt.* is older than step 16 of .*run"):
        third = go_on(max_epochs=3)
    assert third.trace[0][2] == 16
    (tmp_path / "on_exception.ckpt").write_bytes(written)
    again = go_on(max_epochs=3, ckpt_path=str(tmp_path / "on_exception.ckpt"))
    assert again.trace[0][2] == 13


def test_a_checkpoint_that_cannot_be_read_does_not_hinder_the_run(tmp_path: Path) -> None:
    _fit(tmp_path, Crash(13), every=5)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "hpc_ckpt_1.ckpt").write_bytes(b"cut short")
    with pytest.warns(ShrinkpointWarning, match=r"hpc_ckpt_1.ckpt cannot be read"):
        part = _fit(tmp_path, max_epochs=2)
    assert part.trace[0][2] == 10


def test_a_signal_of_the_users_saves_and_then_calls_the_earlier_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[list[int]] = []

    def requeue(number: int, frame: Any) -> None:
        saved.append([path.name for path in (tmp_path / "run" / "data").iterdir()])  # type: ignore[misc]
        raise SystemExit(1)

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        ours = CompressedCheckpoint(
            str(tmp_path / "run"),
            every_n_train_steps=100,
            scheme="lossless",
            advanced=Advanced(signals=("SIGUSR2",)),
        )
        fit(ours, Signalled(12, signal.SIGUSR2))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(saved) == 1
    assert len(saved[0]) == 1
    whole = fit()
    part = fit(CompressedCheckpoint(str(tmp_path / "run"), every_n_train_steps=100, scheme="lossless"))
    assert part.trace == whole.trace[13:]


def test_a_signal_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for signals in ("SIGUSR2", ["SIGNONE"], ["SIGKILL"]):
        with pytest.raises(ConfigError, match="signals="):
            CompressedCheckpoint(str(tmp_path / "run"), advanced=Advanced(signals=signals))
