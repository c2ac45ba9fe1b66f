"""Weights that are copied while the training goes on are those of one moment, or are not logged."""

import threading
from contextlib import nullcontext

import pytest
import torch
from support.small_log import SmallLogTraining
from torch import nn

import shrinkpoint
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


@pytest.mark.parametrize("how", ["in place", "through data"])
def test_weights_that_are_changed_otherwise_meanwhile_are_no_record(monkeypatch, how):
    model, optimizer = model_and_optimizer()
    gate = Gate(monkeypatch, after=True)
    copies = WeightCopies([optimizer], nullcontext)
    copy = copies.take(live(model))
    assert gate.reached.wait(20)
    with torch.no_grad():
        weight = model[0].weight.data if how == "through data" else model[0].weight
        weight.mul_(2)
    gate.opened.set()
    assert copy.wait() is None
    copy.release()
    again = copies.take(live(model))
    assert again.wait() is not None
    again.release()
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
    assert optimizer._optimizer_step_pre_hooks
    copies.take(live(model)).release()
    copies.close()
    assert not optimizer._optimizer_step_pre_hooks
    train(model, optimizer)


def test_a_record_that_was_disturbed_is_skipped_and_the_next_one_has_its_updates(tmp_path, monkeypatch):
    from shrinkpoint.steps import weight_copies

    training = SmallLogTraining(tmp_path / "run").run(0, 14)
    real = weight_copies.Unchanged.at_all
    monkeypatch.setattr(weight_copies.Unchanged, "at_all", lambda self: False)
    training.run(14, 15)
    training.log.flush()
    monkeypatch.setattr(weight_copies.Unchanged, "at_all", real)
    training.run(15, 18)
    training.checkpointer.close()
    assert training.log.off is None
    assert training.log.skipped == 1
    with pytest.raises(shrinkpoint.errors.NoCheckpointError, match="step 15 is not in the log"):
        shrinkpoint.load_weights(f"{tmp_path}/run#step=15")
    for step in (14, 16, 18):
        assert training.miss(step, shrinkpoint.load_weights(f"{tmp_path}/run#step={step}"), 10) < 0.9
