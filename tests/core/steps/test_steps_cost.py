"""What the training's thread spends in the exact log: all of it is counted, and how long it may wait is bounded."""

import threading
import time
from uuid import uuid4

import pytest
import torch
from support.stepped import Training
from torch import nn

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.steps import moment, supervision
from shrinkpoint.steps.buffers import Buffers
from shrinkpoint.steps.moment import Moment
from shrinkpoint.steps.supervision import CannotLogError, Patience
from shrinkpoint.steps.writer import JobQueue, SegmentWriter


def places() -> tuple[str, str]:
    name = uuid4().hex
    return f"memory://{name}/run", f"memory://{name}/log"


class Clock:
    """Stands still but where it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now / 2


@pytest.mark.parametrize("closure", [False, True])
def test_copies_of_gradients_are_counted_and_the_closure_is_not(monkeypatch, closure):
    clock, taken = Clock(), []
    take = Buffers.take

    def slow(*arguments, **options):
        taken.append(arguments[1])
        clock.now += 1.0
        return take(*arguments, **options)

    training = Training(closure=closure).log(*places(), every=50, steps=2)
    batch = training.batches.next

    def slow_batch() -> torch.Tensor:
        clock.now += 100.0
        return batch()

    training.checkpointer.resume()
    with monkeypatch.context() as patch:
        patch.setattr(supervision, "time", clock)
        patch.setattr(Buffers, "take", slow)
        patch.setattr(training.batches, "next", slow_batch)
        before, before_cpu = (
            training.checkpointer.step_log.blocked_s,
            training.checkpointer.step_log.blocked_cpu_s,
        )
        training.run(0, 4)
        assert taken.count("0") == 4  # a copy of the first optimizer's gradients in each step
        assert taken.count("remainder") == 2
        log = training.checkpointer.step_log
        assert (log.blocked_s - before, log.blocked_cpu_s - before_cpu) == (6.0, 3.0)
    training.crash()


def test_a_segment_waits_until_the_one_before_is_written():
    queue, go = JobQueue("test"), threading.Event()
    assert queue.submit(go.wait, size=1, patience_s=0.0)
    assert not queue.submit(lambda: None, size=1, patience_s=0.01)
    assert queue.submit(lambda: None, size=1, ahead=1, patience_s=0.0)
    assert queue.submit(lambda: None)  # what holds no memory
    go.set()
    assert queue.submit(lambda: None, size=1)
    queue.close()


def test_waiting_is_bounded_by_its_share(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervision, "time", clock)
    monkeypatch.setattr(supervision, "_AT_ONCE_S", 1.0)
    bounded = Patience(0.1)
    assert bounded.left_s == 1.0
    with bounded.spent():
        clock.now += 1.0
    assert bounded.left_s == pytest.approx(0.1)
    clock.now += 100.0
    assert bounded.left_s == pytest.approx(10.1)
    with bounded.spent():
        clock.now += 50.0
    assert bounded.left_s == 0.0
    assert Patience(None).left_s == float("inf")


def test_the_next_step_waits_for_a_digest_that_has_begun(monkeypatch):
    digests_of = moment.digests_of

    def slow(parts):
        time.sleep(0.05)
        return digests_of(parts)

    where = places()
    training = Training().log(*where, every=50, steps=1)
    training.checkpointer.resume()
    with monkeypatch.context() as patch:
        patch.setattr(moment, "digests_of", slow)
        for step in range(4):  # no flush, which would wait, too
            training.step(step)
            training.checkpointer.step(step + 1)
        training.crash()
    assert training.checkpointer.step_log.off is None
    again = Training().log(*where)
    assert again.checkpointer.resume() == 4
    assert again.digest == training.digest


def test_a_step_waits_for_no_other_work_of_the_writer(monkeypatch):
    """What it must know of the state before it is changed, the training's thread then takes itself."""
    put, go = SegmentWriter._put, threading.Event()

    def held(*arguments) -> str:
        assert go.wait(600)
        return put(*arguments)

    where = places()
    training = Training().log(*where, every=50, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "_put", held)
        training.checkpointer.resume()
        training.run(0, 3)  # one segment and a half: the second one would wait for the first
        assert not go.is_set()
        go.set()
        training.crash()
    assert Training().log(*where).checkpointer.resume() == 2


def test_weights_that_change_while_their_digest_is_taken_and_stay_so_turn_the_log_off(monkeypatch):
    digests_of = moment.digests_of
    began, go = threading.Event(), threading.Event()

    def slow(parts):
        began.set()
        assert go.wait(600)
        return digests_of(parts)

    training = Training().log(*places(), every=50, steps=1)
    training.checkpointer.resume()
    with monkeypatch.context() as patch:
        patch.setattr(moment, "digests_of", slow)
        training.step(0)
        training.checkpointer.step(1)
        assert began.wait(600)
        with torch.no_grad():
            training.model.table.weight.mul_(0.5)
        go.set()
        training.checkpointer.step_log.flush()
    with pytest.warns(ShrinkpointWarning, match="changed outside of optimizer.step.. right after step 1"):
        training.run(1, 2)
    assert "step 1" in training.checkpointer.step_log.off
    training.checkpointer.close()


def test_an_abandoned_moment_has_no_digest_and_keeps_nobody_waiting():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    left, taken = Moment(3, [optimizer], {}), Moment(3, [optimizer], {})
    left.abandon()
    left.settle()
    with pytest.raises(CannotLogError, match="step 3"):
        left.place()
    assert taken.take()
    place = taken.place()
    taken.abandon()
    taken.settle()
    assert taken.place() == place
    assert place.step == 3
