import subprocess
import sys
import threading

import pytest

from shrinkpoint.runtime.threads import Worker

EXIT = """
import sys
import torch
import shrinkpoint

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
evaluate = (lambda: 1.0) if sys.argv[2] == "raised" else None
checkpointer = shrinkpoint.Checkpointer(sys.argv[1], model, optimizer, evaluate=evaluate, keep_last=2, advanced=shrinkpoint.Advanced(threads=2))
checkpointer.save(1)
if sys.argv[2] == "raised":
    raise ValueError("the training's own")
"""


def test_one_job_at_a_time():
    worker, gate, done = Worker("test"), threading.Event(), []
    worker.submit(lambda: done.append(gate.wait(60)))
    assert worker.busy
    with pytest.raises(RuntimeError, match="test"):
        worker.submit(lambda: None)
    assert not worker.join(0.01)
    gate.set()
    assert worker.join()
    assert not worker.busy
    assert done == [True]


def test_the_thread_that_submits_a_job_goes_on_before_it_begins(monkeypatch):
    order = []
    monkeypatch.setattr("shrinkpoint.runtime.threads.time.sleep", lambda seconds: order.append("let go"))
    worker = Worker("test")
    worker.submit(lambda: order.append("job"))
    assert worker.join()
    assert order == ["let go", "job"]


def test_a_thread_that_cannot_be_started_leaves_nothing_to_wait_for(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    worker = Worker("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            worker.submit(lambda: None)
    assert worker.join()
    worker.submit(lambda: None)
    assert worker.join()


def test_join_without_a_job():
    assert Worker("test").join()


def test_finish_calls_the_hook_only_while_a_job_runs():
    gate = threading.Event()
    worker = Worker("test", before_exit=gate.set)
    worker.finish()
    assert not gate.is_set()
    worker.submit(lambda: gate.wait(60) and None)
    worker.finish()
    assert gate.is_set()
    assert not worker.busy


@pytest.mark.parametrize("how", ["plain", "raised"])
def test_a_process_that_ends_without_close_finishes_its_save(tmp_path, how):
    """Nobody serves evaluations any more, and the interpreter shuts thread pools down before it waits for threads."""
    run = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path / "run"), how], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == (1 if how == "raised" else 0), run.stderr
    assert "failed" not in run.stderr
    assert len(list((tmp_path / "run" / "commits").iterdir())) == 1
