"""Weights that are swapped right after a step, as for the validation of averages, and are back at the next one, cost the log nothing."""

import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from uuid import uuid4

import pytest
import torch
from support.stepped import Training
from torch import nn

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.steps import moment
from shrinkpoint.steps.moment import Moment
from shrinkpoint.steps.supervision import CannotLogError


def through_the_parameter(parameter: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def through_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """torch does not count these changes."""
    parameter.data.copy_(value)


WAYS = (through_the_parameter, through_data)


class Swapped(Training):
    """Validates the average of all weights so far after every second step.

    Args:
        put: changes a weight.
        when: begins the log's digest of each segment: before the weights are swapped, while they are, or when they are back.
        back: the last step after which they are put back.
    """

    def __init__(self, put: Callable[..., None], when: str = "", back: int = 99) -> None:
        super().__init__()
        self.put, self.when, self.back = put, when, back
        self.averages = [p.detach().clone() for p in self.model.parameters()]
        self.go = threading.Event()

    def swap(self, step: int) -> None:
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)
        if step % 2:
            return
        self.reached("before")
        stored = [p.detach().clone() for p in self.model.parameters()]
        for parameter, average in zip(self.model.parameters(), self.averages, strict=True):
            self.put(parameter, average)
        self.reached("swapped")
        if step > self.back:
            return
        for parameter, value in zip(self.model.parameters(), stored, strict=True):
            self.put(parameter, value)
        self.reached("back")

    def reached(self, when: str) -> None:
        if when == self.when:
            self.go.set()
            self.checkpointer.step_log._writer.flush()

    def run(self, begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            losses.append(self.step(step))
            if self.checkpointer is not None:
                self.go.clear()
                self.checkpointer.step(step + 1)
            self.swap(step + 1)
        return losses

    @contextmanager
    def held(self, patch: pytest.MonkeyPatch):
        """The log's thread takes no digest before the moment that was asked for."""
        digests_of = moment.digests_of

        def later(parts):
            if threading.current_thread() is not threading.main_thread():
                assert self.go.wait(600)
            return digests_of(parts)

        with patch.context() as inner:
            inner.setattr(moment, "digests_of", later)
            yield
            self.go.set()


@pytest.mark.parametrize("put", WAYS)
@pytest.mark.parametrize("when", ["before", "swapped", "back"])
def test_weights_that_are_put_back_are_logged_on(put, when, monkeypatch):
    truth = Swapped(put)
    losses = truth.run(0, 9)
    where = [f"memory://{uuid4().hex}/{name}" for name in ("run", "log")]
    training = Swapped(put, when).log(*where, every=50)
    training.checkpointer.resume()
    with training.held(monkeypatch), warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        assert training.run(0, 8) == losses[:8]
        training.crash()
    log = training.checkpointer.step_log
    assert (log.off, log.gaps, log.written) == (None, 0, 8)
    again = Swapped(put).log(*where, every=50)
    assert again.checkpointer.resume() == 8
    assert again.digest == training.digest
    assert again.run(8, 9) == losses[8:]
    again.checkpointer.close()


@pytest.mark.parametrize("put", WAYS)
def test_weights_that_stay_changed_turn_the_log_off_at_the_next_step(put, monkeypatch):
    where = [f"memory://{uuid4().hex}/{name}" for name in ("run", "log")]
    training = Swapped(put, "swapped", back=2).log(*where, every=50)
    training.checkpointer.resume()
    with training.held(monkeypatch):
        training.run(0, 4)
        log = training.checkpointer.step_log
        assert log.off is None
        with pytest.warns(ShrinkpointWarning, match=r"outside of optimizer.step.. right after step 4"):
            training.run(4, 5)
    assert "right after step 4" in log.off
    training.run(5, 7)  # and the training goes on
    training.checkpointer.close()
    assert Swapped(put).log(*where, every=50).checkpointer.resume() == 2


@pytest.mark.parametrize("back", [True, False])
def test_a_segment_whose_digest_was_postponed_is_written_at_the_end_if_the_weights_are_back(
    back, monkeypatch
):
    where = [f"memory://{uuid4().hex}/{name}" for name in ("run", "log")]
    training = Swapped(through_the_parameter, "swapped", back=99 if back else 3)
    training.log(*where, every=50, save_last=False).checkpointer.resume()
    with training.held(monkeypatch), warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        training.run(0, 4)
        assert training.checkpointer.step_log.written == 2
        training.checkpointer.close()
    assert training.checkpointer.step_log.written == (4 if back else 2)
    assert Swapped(through_the_parameter).log(*where, every=50).checkpointer.resume() == (4 if back else 2)


def test_weights_that_are_not_numbers_are_no_change():
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    taken = Moment(1, [torch.optim.SGD(model.parameters())], {})
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    assert not taken.take()
    taken.settle()
    assert taken.place().step == 1


def test_a_moment_of_other_weights_cannot_be_settled():
    model = nn.Linear(3, 3)
    moment = Moment(1, [torch.optim.SGD(model.parameters())], {})
    model.weight.data.add_(1)
    assert not moment.take()
    with pytest.raises(CannotLogError, match="right after step 1"):
        moment.settle()
    with pytest.raises(CannotLogError, match="right after step 1"):
        moment.place()


class Evaluated(Training):
    """Its closure begins and waits for the log's digest of the segment before."""

    def __init__(self) -> None:
        super().__init__(closure=True)
        self.go = threading.Event()
        self.digested = threading.Event()
        self.waited = 0
        step = self.optimizer.step

        def evaluated(closure):
            def work():
                self.go.set()
                self.waited += self.digested.wait(60)
                return closure()

            return step(work)

        self.optimizer.step = evaluated


def test_nothing_waits_for_a_digest_before_the_closure_is_evaluated(monkeypatch):
    """Frameworks have the whole step in the closure: the writer's thread takes the digest meanwhile."""
    digests_of = moment.digests_of
    training = Evaluated().log(*(f"memory://{uuid4().hex}/{name}" for name in ("run", "log")), every=50)
    training.checkpointer.resume()

    def later(parts):
        if threading.current_thread() is threading.main_thread():
            return digests_of(parts)
        assert training.go.wait(600)
        found = digests_of(parts)
        training.digested.set()
        return found

    training.digested.set()
    for step in range(6):
        training.go.clear()
        training.step(step)
        monkeypatch.setattr(moment, "digests_of", later)
        if step % 2:
            training.digested.clear()
        training.checkpointer.step(step + 1)
    training.go.set()
    assert training.waited == 6
    assert training.checkpointer.step_log.off is None
    training.crash()
