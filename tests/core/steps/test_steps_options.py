"""Wrong options are refused before training starts; a log that fails costs a warning and nothing else."""

import os
import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch
from support.options import grouped
from support.stepped import Training, held_up

import shrinkpoint
from shrinkpoint.errors import ConfigError, ShrinkpointWarning, StoreError
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.writer import SegmentWriter


def refused(match: str, **options) -> None:
    training = Training()
    with pytest.raises(ConfigError, match=match):
        shrinkpoint.Checkpointer(
            options.pop("url", "memory://refused/run"),
            training.model,
            options.pop("optimizer", training.optimizer),
            **grouped(**{"scheme": "lossless", "log_url": "memory://refused/log", **options}),
        )


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("step_log='exakt' must be 'exact' or 'small', or None", {"step_log": "exakt"}),
        ("step_log=True must be 'exact' or 'small'", {"step_log": True}),
        (r"GB per hour.*StepLog\(url=.*/dev/shm", {"log_url": None, "url": "memory://far/run"}),
        ("is within the run", {"log_url": "memory://refused/run"}),
        ("is within the run", {"log_url": "memory://refused/run/log"}),
        ("there is none", {"optimizer": []}),
        ("needs scheme='lossless', not 'auto'", {"scheme": "auto"}),
        ("keep_optimizer=0 does not store", {"keep_optimizer": 0}),
        ("after_step must be a function", {"after_step": 3}),
        ("LBFGS", {"optimizer": torch.optim.LBFGS([torch.nn.Parameter(torch.ones(3))])}),
    ],
    ids=str,
)
def test_what_cannot_be_logged_is_refused(match, options):
    refused(match, **{"step_log": "exact", **options})


def test_a_log_within_the_run_by_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    refused("is within the run", step_log="exact", url=f"{tmp_path}/run", log_url=f"{tmp_path}/link/log")


def test_several_processes(monkeypatch):
    monkeypatch.setattr("shrinkpoint.checkpointer.world", lambda: SimpleNamespace(size=2))
    refused("needs one process, or a DistributedDataParallel that every process gives", step_log="exact")


@pytest.mark.parametrize(
    "fields",
    [
        {"segment_steps": 0},
        {"segment_steps": True},
        {"keep": 0},
        {"every": 0},
        {"every": 2.0},
        {"overhead": -1},
        {"overhead": True},
        {"quantization_step": float("nan")},
    ],
)
def test_fields(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        StepLog(kind="small", **fields)


@pytest.mark.parametrize("fields", [{"every": 2}, {"quantization_step": 4.0}])
def test_fields_of_the_other_kind(fields):
    with pytest.raises(ConfigError, match="is of use with kind='small' only"):
        StepLog(**fields)


def test_after_step_with_a_log_that_replays_nothing():
    with pytest.raises(ConfigError, match="kind='exact' only"):
        StepLog(kind="small", after_step=lambda: None)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used for a log"):
        Training().log("memory://unwritable/run", str(tmp_path / "file"))


def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path, monkeypatch):
    training = Training().log(f"memory://{uuid4().hex}/run", str(tmp_path / "log"))
    training.checkpointer.resume()
    training.run(0, 2)
    training.checkpointer.step_log.flush()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shrinkpoint.store.local._write_synced", full)
    training.run(2, 4)
    training.checkpointer.step_log.flush()
    with pytest.warns(ShrinkpointWarning, match="the step log is off: .*disk is full") as told:
        training.run(4, 8)
    assert len(told) == 1
    training.leave()
    assert training.checkpointer.saver.reports()[-1].step == 5


def test_steps_that_come_too_fast_leave_a_gap_until_the_next_checkpoint(monkeypatch, places):
    truth = Training()
    truth.run(0, 8)
    training = Training().log(*places, every=6, steps=1, overhead=0.02)
    with monkeypatch.context() as patch:
        go = held_up(patch)
        patch.setattr("shrinkpoint.steps.exact._AT_ONCE_S", 0.0)
        training.checkpointer.resume()
        with pytest.warns(ShrinkpointWarning, match="gap after step .*overhead=None") as told:
            training.run(0, 6)
        assert len(told) == 1
        assert training.checkpointer.step_log.log.gaps == 1
        go.set()
        training.checkpointer.step_log.flush()
    training.run(6, 8)
    training.crash()
    again = Training().log(*places, every=6, steps=1)
    assert again.checkpointer.resume() == 8
    assert again.digest == truth.digest


def test_steps_may_wait_for_the_log(monkeypatch, places):
    training = Training().log(*places, steps=1)
    with monkeypatch.context() as patch:
        go = held_up(patch)
        patch.setattr("shrinkpoint.steps.exact._AT_ONCE_S", 0.0)
        submit, segments = SegmentWriter.submit, []

        def submitted(*arguments, **more) -> bool:
            segments.append(arguments)
            if len(segments) == 2:  # which waits for the first one
                threading.Timer(0.3, go.set).start()
            return submit(*arguments, **more)

        patch.setattr(SegmentWriter, "submit", submitted)
        training.checkpointer.resume()
        training.run(0, 8)
        training.crash()
    assert training.checkpointer.step_log.log.gaps == 0
    assert training.checkpointer.step_log.log.blocked_s > 0.25
    assert Training().log(*places).checkpointer.resume() == 8


def test_segments_that_no_checkpoint_needs_are_removed(tmp_path):
    training = Training().log(f"memory://{uuid4().hex}/run", str(tmp_path))
    training.checkpointer.resume()
    training.run(0, 22)
    training.leave()
    (folder,) = tmp_path.iterdir()
    names = sorted(os.listdir(folder))
    assert names[0].endswith("-0000000000.steps")
    # from the last but one checkpoint on: 15 to 17, 19, 20, 22
    assert len(names) == 1 + 4


def test_a_crashed_writers_temporary_files_are_removed(tmp_path):
    url = f"memory://{uuid4().hex}/run"
    training = Training().log(url, str(tmp_path))
    training.checkpointer.resume()
    training.run(0, 3)
    training.crash()
    (folder,) = tmp_path.iterdir()
    left = folder / ".tmp-0123456789abcdef"
    left.write_bytes(bytes(100))
    os.utime(left, (1e9, 1e9))  # the clock of files ticks every few milliseconds
    Training().log(url, str(tmp_path))
    assert not list(folder.glob(".tmp-*"))


def test_hooks_are_gone_when_training_is_over():
    training = Training().log(f"memory://{uuid4().hex}/run", f"memory://{uuid4().hex}/log")
    training.checkpointer.resume()
    training.run(0, 3)
    training.checkpointer.close()
    assert not training.optimizer._optimizer_step_pre_hooks
    assert not training.optimizer._optimizer_step_post_hooks


def test_a_loop_that_never_resumes_is_logged_too(places):
    training = Training().log(*places)
    training.run(0, 9)
    digest = training.digest
    training.crash()
    again = Training().log(*places)
    assert again.checkpointer.resume() == 9
    assert again.digest == digest


def test_parameters_that_were_added_end_the_replay_there(places):
    training = Training().log(*places, every=50)
    training.checkpointer.resume()
    training.run(0, 4)
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    training.scheduler.base_lrs.append(0.1)
    training.scheduler.lr_lambdas.append(lambda step: 1.0)
    training.run(4, 6)
    training.crash()
    again = Training().log(*places, every=50)
    with pytest.warns(ShrinkpointWarning, match="13 parameters|parameters, and optimizer 0 has"):
        assert again.checkpointer.resume() == 4
