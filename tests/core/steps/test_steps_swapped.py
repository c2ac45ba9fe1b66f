"""Weights that are swapped right after a step, as for the validation of averages, and are back at the next one, cost the log nothing."""

import warnings
from collections.abc import Callable
from uuid import uuid4

import pytest
import torch
from support.stepped import Training

from shrinkpoint.errors import ShrinkpointWarning


def through_the_parameter(parameter: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def through_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """torch does not count these changes."""
    parameter.data.copy_(value)


class Swapped(Training):
    """Validates the average of all weights so far after every second step.

    Args:
        put: changes a weight.
        back: the last step after which they are put back.
    """

    def __init__(self, put: Callable[..., None], back: int = 99) -> None:
        super().__init__()
        self.put, self.back = put, back
        self.averages = [p.detach().clone() for p in self.model.parameters()]

    def swap(self, step: int) -> None:
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)
        if step % 2:
            return
        stored = [p.detach().clone() for p in self.model.parameters()]
        for parameter, average in zip(self.model.parameters(), self.averages, strict=True):
            self.put(parameter, average)
        if self.checkpointer is not None:
            self.checkpointer.step_log.flush()
        if step > self.back:
            return
        for parameter, value in zip(self.model.parameters(), stored, strict=True):
            self.put(parameter, value)

    def run(self, begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            losses.append(self.step(step))
            if self.checkpointer is not None:
                self.checkpointer.step(step + 1)
            self.swap(step + 1)
        return losses


@pytest.mark.parametrize("put", [through_the_parameter, through_data])
def test_weights_that_are_put_back_are_logged_on(put):
    truth = Swapped(put)
    losses = truth.run(0, 9)
    where = [f"memory://{uuid4().hex}/{name}" for name in ("run", "log")]
    training = Swapped(put).log(*where, every=50)
    training.checkpointer.resume()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        assert training.run(0, 8) == losses[:8]
        training.crash()
    log = training.checkpointer.step_log.log
    assert (log.off, log.gaps, log.written) == (None, 0, 8)
    again = Swapped(put).log(*where, every=50)
    assert again.checkpointer.resume() == 8
    assert again.digest == training.digest
    assert again.run(8, 9) == losses[8:]
    again.checkpointer.close()


def test_a_replay_ends_before_weights_that_stay_changed():
    where = [f"memory://{uuid4().hex}/{name}" for name in ("run", "log")]
    training = Swapped(through_the_parameter, back=2).log(*where, every=50)
    training.checkpointer.resume()
    training.run(0, 8)
    training.crash()
    again = Swapped(through_the_parameter).log(*where, every=50)
    with pytest.warns(ShrinkpointWarning, match="replayed from step 4 to 6, give another state"):
        assert again.checkpointer.resume() == 4
    again.checkpointer.close()
