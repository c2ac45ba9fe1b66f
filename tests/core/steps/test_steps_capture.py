"""Gradients are copied during the optimizer's step only where it leaves them as they are."""

import threading
from uuid import uuid4

import pytest
import torch
from support.stepped import Training
from torch import nn

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.steps import recorder as capture_module
from shrinkpoint.steps.record import Dense
from shrinkpoint.steps.recorder import Capture


def gradients() -> list[torch.Tensor | None]:
    return [torch.randn(300, 40), None, torch.randn(7).t()]


def parameters(some: list[torch.Tensor | None]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(3) if one is None else torch.zeros_like(one)) for one in some]
    for parameter, gradient in zip(made, some, strict=True):
        parameter.grad = gradient
    return made


def steps(capture: Capture, optimizer: torch.optim.Optimizer, count: int) -> list[bool]:
    """Whether each step's gradients were copied during it; the copies are compared with what there was before."""
    made = []
    live = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(count):
        for gradient in live:
            if gradient is not None:
                gradient.copy_(torch.randn(gradient.shape))
        before = [None if one is None else one.clone() for one in live]
        captured = capture.begin(0, live)
        optimizer.step()
        copies = capture.end(captured)
        assert copies is not None
        for expected, copy in zip(before, copies, strict=True):
            assert (expected is None) == (copy is None)
            assert copy is None or (isinstance(copy, Dense) and torch.equal(copy.values, expected))
        captured.copied.release()
        made.append(captured.during)
    return made


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_that_stay_as_they_are_are_copied_during_the_step(foreach):
    capture = Capture()
    optimizer = torch.optim.AdamW(parameters(gradients()), foreach=foreach)
    assert steps(capture, optimizer, 5) == [False, False, True, True, True]
    capture.close()


def test_what_is_not_a_number_is_as_it_was():
    capture = Capture()
    [parameter] = parameters([torch.tensor([float("nan"), 1.0])])
    for during in (False, False, True):
        captured = capture.begin(0, [parameter.grad])
        assert captured.during == during
        assert capture.end(captured) is not None
    capture.close()


def test_gradients_that_the_optimizer_writes_to_are_copied_before_it():
    """With ``foreach`` and Nesterov momentum torch adds the momentum to the gradients themselves."""
    capture = Capture()
    optimizer = torch.optim.SGD(parameters(gradients()), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    assert steps(capture, optimizer, 6) == [False] * 6
    capture.close()


def test_a_fused_optimizer_that_unscales_is_never_copied_during_its_step():
    """In the steps that it skips it leaves the gradients as they are, and torch counts no changes of the others."""
    capture = Capture()
    optimizer = torch.optim.AdamW(parameters([torch.randn(300, 40)]), fused=True)
    [gradient] = [p.grad for p in optimizer.param_groups[0]["params"]]
    for infinite in (1.0, 1.0, 1.0, 0.0, 0.0):
        gradient.copy_(torch.randn(gradient.shape))
        before = gradient.clone()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(infinite)
        captured = capture.begin(0, [gradient], scaled=True)
        optimizer.step()
        [copy] = capture.end(captured)
        assert torch.equal(copy.values, before)
        assert not captured.during
        assert torch.equal(gradient, before) == bool(infinite)
        captured.copied.release()
    del optimizer.grad_scale, optimizer.found_inf
    assert steps(capture, optimizer, 4) == [False, False, True, True]
    capture.close()


class Decaying(torch.optim.Optimizer):
    """As optimizers were written once: it changes gradients in a way that torch does not count, from some step on."""

    def __init__(self, params, *, quietly: bool, since: int) -> None:
        super().__init__(params, {"lr": 0.01})
        self.quietly, self.since, self.steps = quietly, since, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.data if self.quietly else parameter.grad
                if self.steps >= self.since:
                    gradient.add_(parameter.data, alpha=0.01)
                parameter.add_(gradient, alpha=-0.01)
        self.steps += 1
        return loss


@pytest.mark.parametrize("since", [0, 1])
@pytest.mark.parametrize("quietly", [False, True])
def test_changes_that_torch_does_not_count_are_found(quietly, since):
    capture = Capture()
    optimizer = Decaying(parameters(gradients()), quietly=quietly, since=since)
    assert steps(capture, optimizer, 5) == [False] * 5
    capture.close()


def test_it_is_checked_again_now_and_then(monkeypatch):
    """What changes later, and what torch does not count, is noticed by the contents; steps before it may be wrong."""
    monkeypatch.setattr(capture_module, "_CHECKED_EVERY", 4)
    capture = Capture()
    optimizer = Decaying(parameters(gradients()), quietly=True, since=6)
    assert steps(capture, optimizer, 6) == [False, False, True, True, False, True]
    live = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    found = []
    for _ in range(3):
        captured = capture.begin(0, live)
        optimizer.step()
        found.append((captured.during, capture.end(captured) is None))
        captured.copied.release()
    assert found == [(True, False), (True, False), (False, True)]
    assert steps(capture, optimizer, 3) == [False] * 3
    capture.close()


def replaced(training: Training, optimizer: torch.optim.Optimizer) -> Training:
    training.optimizer = optimizer
    training.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 7))
    return training


def test_an_optimizer_that_begins_to_write_to_its_gradients_leaves_a_gap_until_the_next_checkpoint():
    name = uuid4().hex

    def training() -> Training:
        made = Training()
        replaced(made, Decaying(made.model.parameters(), quietly=False, since=7))
        return made.log(f"memory://{name}/run", f"memory://{name}/log", every=10, steps=1)

    first = training()
    first.checkpointer.resume()
    first.run(0, 7)
    with pytest.warns(ShrinkpointWarning, match="gap after step 7: the optimizer has begun to write"):
        first.run(7, 9)
    first.run(9, 13)
    assert (first.checkpointer.step_log.gaps, first.checkpointer.step_log.off) == (1, None)
    first.crash()
    again = training()
    again.optimizer.steps = 13  # which is no part of its state_dict()
    assert again.checkpointer.resume() == 13
    assert again.digest == first.digest


def test_the_next_record_waits_for_a_copy_that_was_left_behind(monkeypatch):
    """After a step that raised, its buffers are not given away while they are being filled."""
    capture, go, began = Capture(), threading.Event(), threading.Event()
    [parameter] = parameters([torch.ones(4)])
    for _ in range(2):
        capture.end(capture.begin(0, [parameter.grad]))
    prepare = Snapshotter.prepare

    def slow(self, state):
        copy = prepare(self, state)

        def waits():
            began.set()
            assert go.wait(60)
            return copy()

        return waits

    monkeypatch.setattr(Snapshotter, "prepare", slow)
    left = capture.begin(0, [parameter.grad])
    assert left.during
    assert began.wait(60)
    threading.Timer(0.05, go.set).start()
    left.copied.release()
    assert go.is_set()
    capture.close()


def test_no_memory_for_a_copy_turns_the_log_off_and_training_goes_on(monkeypatch):
    name, prepare = uuid4().hex, Snapshotter.prepare
    training = Training().log(f"memory://{name}/run", f"memory://{name}/log", every=50, steps=4)
    training.checkpointer.resume()
    training.run(0, 3)

    def fails(self, state):
        copy = prepare(self, state)

        def fails_in_the_thread():
            if threading.current_thread().name.startswith("shrinkpoint-gradients"):
                raise MemoryError("no memory for this")
            return copy()

        return fails_in_the_thread

    with monkeypatch.context() as patch:
        patch.setattr(Snapshotter, "prepare", fails)
        with pytest.warns(ShrinkpointWarning, match="step log is off: MemoryError: no memory for this"):
            training.run(3, 5)
    training.run(5, 6)
    assert "MemoryError" in training.checkpointer.step_log.off
    training.checkpointer.close()
