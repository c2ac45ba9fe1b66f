"""Weights that are copied while the training goes on are those of one moment, or are not logged."""

import threading
from contextlib import nullcontext

import pytest
import torch
from support.small_log import SmallLogTraining
from torch import nn

import shrinkpoint
from shrinkpoint.errors import NoCheckpointError, ShrinkpointWarning
from shrinkpoint.steps import weight_copies
from shrinkpoint.steps.buffers import Buffers
from shrinkpoint.steps.weight_copies import WeightCopies


class Gate:
    """Holds the copying thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: bool = False) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        original = Buffers._timed

        def held(buffers, copy, then):
            def gated():
                found = copy() if after else None
                self.reached.set()
                assert self.opened.wait(20)
                return found if after else copy()

            return original(buffers, gated, then)

        monkeypatch.setattr(Buffers, "_timed", held)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def live(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().sum().backward()
    optimizer.step()


def test_a_step_waits_for_the_copy_of_the_weights_and_the_copy_has_those_before_it(monkeypatch):
    model, optimizer = model_and_optimizer()
    gate = Gate(monkeypatch)
    copies = WeightCopies([optimizer], nullcontext)
    before = {name: tensor.detach().clone() for name, tensor in live(model).items()}
    copy = copies.take(live(model))
    assert gate.reached.wait(20)
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    train(model, optimizer)  # the forward pass writes to the buffers, and the step to the weights
    assert gate.opened.is_set()
    found = copy.wait()
    assert found is not None
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert not torch.equal(live(model)["1.running_mean"], before["1.running_mean"])
    copy.release()
    copies.close()


@pytest.mark.parametrize("after", [False, True], ids=["before the copy", "after it"])
@pytest.mark.parametrize("how", ["in place", "through data"])
def test_weights_that_are_changed_otherwise_meanwhile_are_no_record(monkeypatch, how, after):
    model, optimizer = model_and_optimizer()
    gate = Gate(monkeypatch, after=after)
    copies = WeightCopies([optimizer], nullcontext)
    copy = copies.take(live(model))
    assert gate.reached.wait(20)
    with torch.no_grad():
        weight = model[0].weight.data if how == "through data" else model[0].weight
        weight.mul_(2)
    gate.opened.set()
    assert copy.wait() is None
    copy.release()
    gate.opened.clear()
    at_once = copies.take(live(model))  # such a training is not trusted again
    found = at_once.wait()
    assert found is not None
    assert torch.equal(found["0.weight"], model[0].weight)
    at_once.release()
    copies.close()


def test_memory_that_is_replaced_meanwhile_is_kept_until_it_is_copied(monkeypatch):
    model = nn.Sequential(
        nn.Linear(1024, 1024, bias=False)
    )  # large enough that freed memory is returned to the system
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gate = Gate(monkeypatch)
    copies = WeightCopies([optimizer], nullcontext)
    before = model[0].weight.detach().clone()
    copy = copies.take(live(model))
    assert gate.reached.wait(20)
    model.bfloat16()
    gate.opened.set()
    found = copy.wait()
    assert found is not None
    assert torch.equal(found["0.weight"], before)
    copy.release()
    copies.close()


def test_a_closure_is_called_before_the_training_waits(monkeypatch):
    model, optimizer = model_and_optimizer()
    gate = Gate(monkeypatch)
    copies = WeightCopies([optimizer], nullcontext)
    before = model[0].weight.detach().clone()
    copy = copies.take(live(model))

    def closure() -> torch.Tensor:
        assert not gate.opened.is_set()
        threading.Timer(0.2, gate.opened.set).start()
        optimizer.zero_grad()
        loss = model(torch.randn(8, 40)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert gate.opened.is_set()
    found = copy.wait()
    assert found is not None
    assert torch.equal(found["0.weight"], before)
    copy.release()
    copies.close()


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer without what torch's constructor makes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Unhooked:
    """An optimizer of somebody's own."""

    def __init__(self, parameters) -> None:
        self.param_groups = [{"params": list(parameters)}]


def test_the_optimizer_inside_of_a_wrapper_is_waited_for(monkeypatch):
    model, optimizer = model_and_optimizer()
    gate = Gate(monkeypatch)
    copies = WeightCopies([Wrapper(optimizer)], nullcontext)
    copy = copies.take(live(model))
    threading.Timer(0.2, gate.opened.set).start()
    train(model, optimizer)
    assert gate.opened.is_set()
    assert copy.wait() is not None
    copy.release()
    copies.close()


def test_weights_of_an_optimizer_without_hooks_are_copied_at_once():
    model, _ = model_and_optimizer()
    copies = WeightCopies([Unhooked(model.parameters())], nullcontext)
    before = model[0].weight.detach().clone()
    copy = copies.take(live(model))
    with torch.no_grad():
        model[0].weight.zero_()
    found = copy.wait()
    assert found is not None
    assert torch.equal(found["0.weight"], before)
    copy.release()
    copies.close()


def test_what_no_optimizer_owns_is_copied_at_once(monkeypatch):
    model, _ = model_and_optimizer()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    gate = Gate(monkeypatch)
    copies = WeightCopies([optimizer], nullcontext)
    before = model[0].weight.detach().clone()
    copy = copies.take(live(model))
    with torch.no_grad():
        model[0].weight.zero_()
    gate.opened.set()
    found = copy.wait()
    assert found is not None
    assert torch.equal(found["0.weight"], before)
    copy.release()
    copies.close()


def test_closing_removes_the_hooks():
    model, optimizer = model_and_optimizer()
    copies = WeightCopies([optimizer], nullcontext)
    for _ in range(2):  # it may be taken up again
        copies.take(live(model)).release()
        assert optimizer._optimizer_step_pre_hooks
        copies.close()
        assert not optimizer._optimizer_step_pre_hooks
        train(model, optimizer)


def disturbed(training: SmallLogTraining, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make a step whose copy is found to be of no single moment."""
    training.log._copies._disturbed = False
    with monkeypatch.context() as patch:
        patch.setattr(weight_copies, "_same_bits", lambda one, other: False)
        training.run(step - 1, step)


def test_a_record_that_was_disturbed_is_skipped_and_the_next_one_has_its_updates(tmp_path, monkeypatch):
    training = SmallLogTraining(tmp_path / "run").run(0, 14)
    disturbed(training, monkeypatch, 15)
    training.run(15, 18)
    training.checkpointer.close()
    assert training.log.off is None
    assert training.log.skipped == 1
    with pytest.raises(NoCheckpointError, match="step 15 is not in the log"):
        shrinkpoint.load_weights(f"{tmp_path}/run#step=15")
    for step in (14, 16, 18):
        assert training.miss(step, shrinkpoint.load_weights(f"{tmp_path}/run#step={step}"), 10) < 0.9


def test_a_segment_waits_for_the_rest_of_the_state_where_its_last_record_was_disturbed(tmp_path, monkeypatch):
    training = SmallLogTraining(tmp_path / "run", resume_weights=True).run(0, 13)
    for step in (14, 15, 16):
        disturbed(training, monkeypatch, step)
    training.run(16, 18)
    training.crash()
    assert training.log.skipped == 3
    again = SmallLogTraining(tmp_path / "run", resume_weights=True)
    with pytest.warns(ShrinkpointWarning, match="from the logged weights of step"):
        assert again.checkpointer.resume() >= 17
