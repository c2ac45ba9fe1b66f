"""Going on from a state for some steps, and back: no trace in the training, and the steps that it would have made."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.containers import identical
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, TinyMLP, train
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.quality.resumed_steps import ResumedRun, UntilFailure, obstacle
from shrinkpoint.state.rng import capture_rng

MARKS = (0, 2, 5)


class Lionlike(torch.optim.Optimizer):
    """Replaces its state and writes parameters by ``.data``, as hand-made optimizers do."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.get("momentum", torch.zeros_like(p))
                p.data = p.data - group["lr"] * (0.9 * momentum + 0.1 * p.grad).sign()
                state["momentum"] = 0.99 * momentum + 0.01 * p.grad
                state["steps"] = state.get("steps", 0) + 1


EVERY: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "Lion": lambda model: Lionlike(model.parameters()),
    "AdamW-foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
}


class Leaky(TinyConvNet):
    """Dropout, every generator, and all that a module can keep beside its parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.by_name: dict[str, list[float]] = {"loss": []}
        self.count = 0
        self.hidden = torch.zeros(80)
        self.total = np.zeros(1)
        self.generators = (torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out = nn.functional.dropout(super().forward(images), 0.3, self.training) + self.hidden.detach()
        torch_, python, numpy = self.generators
        noise = torch.rand(1, generator=torch_) + python.random() + numpy.random() + random.random()
        out = out * (1 + 0.01 * (noise + np.random.rand() + torch.rand(1)))
        if self.training:
            self.count += 1
            self.hidden = 0.1 * out.mean(dim=0)
            self.losses.append(out.mean())
            self.by_name["loss"].append(float(out.mean()))
            self.total += float(out.mean())
        return out


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [part.training for part in model.modules()],
        "rng": capture_rng(),
    }


def run_of(model: Any, optimizer: torch.optim.Optimizer, **more: Any) -> ResumedRun:
    given = {
        "losses": lambda index: [model.loss(100 + index)],
        "evaluate": lambda: float(model.loss(7)),
    } | more
    return ResumedRun(module=model, optimizers=[optimizer], **given)


def made(name: str, model_class: type[nn.Module] = TinyMLP, steps: int = 3) -> tuple[Any, Any]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = model_class()
    optimizer = EVERY[name](model)
    train(model, optimizer, range(steps))
    return model, optimizer


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return copy.deepcopy((model.state_dict(), [optimizer.state_dict()]))


@pytest.mark.parametrize("model_class", [TinyGPT, Leaky])
@pytest.mark.parametrize("name", list(EVERY))
def test_a_training_does_not_notice(name: str, model_class: type[nn.Module]) -> None:
    def trained(*, tried: bool) -> dict[str, Any]:
        model, optimizer = made(name, model_class)
        run = run_of(model, optimizer)
        assert obstacle(model, [optimizer]) is None
        for start in (3, 5, 7):
            state = saved(model, optimizer)
            preserved_state = copy.deepcopy(state)
            train(model, optimizer, range(start, start + 2))  # the probe comes later than the state
            before = everything(model, optimizer)
            places = [p.data_ptr() for p in model.parameters()]
            if tried:
                losses = run.steps(*state, MARKS)
                assert losses == run.steps(*state, MARKS)
                assert len(set(losses)) == len(MARKS)
                assert identical(everything(model, optimizer), before)
                assert identical(state, preserved_state)
                assert places == [p.data_ptr() for p in model.parameters()]
        kept = {key: value for key, value in vars(model).items() if not key.startswith("_")}
        return {
            **everything(model, optimizer),
            "kept": {k: str(v) for k, v in kept.items() if k != "generators"},
        }

    assert identical(trained(tried=True), trained(tried=False))


@pytest.mark.parametrize("name", ["SGD", "AdamW-fused-groups", "Adafactor", "Lion"])
def test_the_steps_are_those_that_training_would_have_made(name: str) -> None:
    model, optimizer = made(name)
    state = saved(model, optimizer)
    train(model, optimizer, range(3, 5))
    other, its = made(name, steps=0)
    other.load_state_dict(state[0])
    its.load_state_dict(copy.deepcopy(state[1][0]))
    wanted = []
    for start, end in ((100, 100), (100, 102), (102, 105)):
        train(other, its, range(start, end))
        wanted.append((float(other.loss(7)),))
    assert run_of(model, optimizer).steps(*state, MARKS) == wanted


def test_a_first_save_before_the_optimizer_has_state() -> None:
    model, optimizer = made("AdamW", steps=0)
    state = saved(model, optimizer)
    train(model, optimizer, range(3))
    before = everything(model, optimizer)
    assert run_of(model, optimizer).steps(*state, (2,))[0][0] > 0
    assert identical(everything(model, optimizer), before)
    empty, its = made("AdamW", steps=0)
    run_of(empty, its).steps(*state, (2,))
    assert not its.state


@pytest.mark.parametrize("where", ["loss", "evaluate", "clip", "optimizer"])
def test_whatever_is_raised_everything_is_as_before(where: str) -> None:
    model, optimizer = made("AdamW", Leaky)
    state = saved(model, optimizer)
    before = everything(model, optimizer)

    def fail(*_: Any) -> Any:
        random.random()
        torch.rand(1)
        raise KeyboardInterrupt if where == "loss" else MemoryError

    more: dict[str, Any] = {"losses" if where == "loss" else where: fail} if where != "optimizer" else {}
    if where == "optimizer":
        state[1][0]["param_groups"][0]["params"].pop()
    with pytest.raises((MemoryError, KeyboardInterrupt, StateMismatchError)):
        run_of(model, optimizer, **more).steps(*state, MARKS)
    assert identical(everything(model, optimizer), before)


def test_the_learning_rate_is_the_states_and_schedulers_and_hooks_stand_still() -> None:
    model, optimizer = made("AdamW")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fired: list[str] = []
    optimizer.register_step_post_hook(lambda *_: fired.append("step"))
    state = saved(model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    for seed in range(3):
        train(model, optimizer, [seed])
        scheduler.step()
    fired.clear()
    seen: list[float] = []

    def losses(index: int) -> Any:
        seen.append(optimizer.param_groups[0]["lr"])
        yield model.loss(index)

    before = copy.deepcopy(scheduler.state_dict())
    run_of(model, optimizer, losses=losses).steps(*state, (2,))
    assert seen == [rate, rate]
    assert not fired
    assert scheduler.state_dict() == before
    train(model, optimizer, [9])
    assert fired == ["step"]
    assert optimizer.param_groups[0]["lr"] == rate / 8


def test_losses_by_batch() -> None:
    model, optimizer = made("SGD")
    state = saved(model, optimizer)
    [whole] = run_of(model, optimizer).steps(*state, (3,))
    run = run_of(model, optimizer, evaluate=lambda: torch.stack([model.loss(7), model.loss(8)]))
    [[first, second]] = run.steps(*state, (3,))
    assert [first] == list(whole)
    assert first != second


def test_scaled_gradients_are_unscaled_before_they_are_limited() -> None:
    model, optimizer = made("AdamW")
    state = saved(model, optimizer)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    [plain] = run_of(model, optimizer, clip=clip).steps(*state, (3,))
    [scaled] = run_of(model, optimizer, clip=clip, scale=2.0**16).steps(*state, (3,))
    assert scaled == pytest.approx(plain, rel=1e-6)


def test_a_step_whose_scaled_gradients_overflow_is_left_out() -> None:
    model, optimizer = made("AdamW")
    state = saved(model, optimizer)
    before = everything(model, optimizer)
    for index, loss in ((1, math.inf), (0, math.nan)):
        run = run_of(
            model,
            optimizer,
            losses=lambda i, index=index, loss=loss: [model.loss(i) * (loss if i == index else 1.0)],
            scale=2.0**16,
        )
        assert all(map(math.isfinite, run.steps(*state, (2,))[0]))
    assert identical(everything(model, optimizer), before)


def test_parts_of_a_batch_add_up_and_gradients_are_limited() -> None:
    model, optimizer = made("SGD")
    state = saved(model, optimizer)
    [whole] = run_of(model, optimizer).steps(*state, (3,))
    parts = run_of(model, optimizer, losses=lambda i: (model.loss(100 + i) / 2 for _ in range(2)))
    assert parts.steps(*state, (3,))[0] == pytest.approx(whole, rel=1e-6)
    norms: list[float] = []

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        norms.append(float(sum(p.grad.square().sum() for p in model.parameters())))

    limited = run_of(model, optimizer, clip=clip).steps(*state, (3,))
    assert len(norms) == 3
    assert max(norms) < 1e-11
    assert limited != whole


def test_steps_are_in_train_mode_and_measurements_in_eval_mode() -> None:
    model, optimizer = made("SGD", Leaky)
    model.body[1].eval()
    modes: list[tuple[str, bool, bool]] = []

    def losses(index: int) -> Any:
        modes.append(("step", model.training, model.body[1].training))
        yield model.loss(index)

    def evaluate() -> float:
        assert not torch.is_grad_enabled()
        modes.append(("held out", model.training, model.body[1].training))
        return float(model.loss(0))

    run = run_of(model, optimizer, losses=losses, evaluate=evaluate)
    state = saved(model, optimizer)
    run.steps(*state, (1, 2))
    assert modes == [("step", True, False), ("held out", False, False)] * 2
    modes.clear()
    with torch.inference_mode():  # as in a validation
        model.eval()
        run.steps(*state, (1,))
    assert modes == [("step", True, True), ("held out", False, False)]
    assert not any(part.training for part in model.modules())


def test_gradients_that_are_accumulated_stay() -> None:
    model, optimizer = made("AdamW")
    model.loss(1).backward()
    reference = [p.grad for p in model.parameters()]
    values = [gradient.clone() for gradient in reference]
    run_of(model, optimizer).steps(*saved(model, optimizer), MARKS)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), reference, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(reference, values, strict=True))


@pytest.mark.parametrize("loss", [1.0, torch.tensor(1.0), torch.ones(2, requires_grad=True) * 2])
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    model, optimizer = made("SGD")
    with pytest.raises(ConfigError, match="one element with a gradient"):
        run_of(model, optimizer, losses=lambda index: [loss]).steps(*saved(model, optimizer), (1,))


def test_another_models_state_is_refused() -> None:
    model, optimizer = made("SGD")
    weights, states = saved(model, optimizer)
    weights["inner.bias"] = torch.zeros(1)
    with pytest.raises(StateMismatchError, match=r"inner\.bias was saved with the shape \(1,\)"):
        run_of(model, optimizer).steps(weights, states, (1,))


class OfItsOwn(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"mine": super().state_dict()}


def test_says_why_no_steps_can_be_taken() -> None:
    model, sgd = made("SGD")
    parameters = list(model.parameters())
    assert obstacle(model, [sgd]) is None
    assert obstacle(model, [torch.optim.LBFGS(parameters)]) == "LBFGS computes the loss itself"
    assert obstacle(model, [OfItsOwn(parameters, lr=0.1)]) == "OfItsOwn has a state of its own form"
    differentiable = torch.optim.SGD(parameters, lr=0.1, differentiable=True)
    assert "differentiable" in str(obstacle(model, [differentiable]))
    sgd.state[parameters[0]]["helper"] = object()
    assert obstacle(model, [sgd]) == "SGD keeps objects in its state"
    assert "no plain tensors" in str(obstacle(nn.Linear(2, 2, device="meta"), []))
    assert obstacle(torch.jit.script(nn.Linear(2, 2)), []) == "the model is compiled by torch.jit"
    hook = parameters[0].register_post_accumulate_grad_hook(lambda p: None)
    assert obstacle(model, []) == "parameters have hooks on their gradients"
    hook.remove()
    backward = model.register_full_backward_hook(lambda *_: None)
    assert obstacle(model, []) == "modules have hooks on their gradients"
    backward.remove()
    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    assert obstacle(model, []) == "there are hooks on all optimizers' steps"
    everywhere.remove()
    assert obstacle(model, []) is None


def test_after_a_failure_nothing_is_offered() -> None:
    told: list[str] = []
    once = UntilFailure(told.append)
    assert once.guard(None) is None
    good = once.guard(lambda state, marks: [1.0])
    assert good is not None
    assert good({}, (1,)) == [1.0]

    def fail(state: object, marks: Any) -> Any:
        raise MemoryError("too little")

    bad = once.guard(fail)
    assert bad is not None
    for _ in range(2):
        with pytest.raises(MemoryError):
            bad({}, (1,))
    assert once.guard(fail) is None
    assert len(told) == 1
    assert "MemoryError: too little" in told[0]


def test_steps_are_offered_until_they_fail_or_until_the_model_has_changed_twice_in_a_row() -> None:
    told: list[str] = []
    outcomes: list[Exception | None] = []

    def steps(state: object, marks: Any) -> list[float]:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return [1.0]

    watch = UntilFailure(told.append)
    changed = StateMismatchError("other parameters")
    for outcome in (changed, None, changed, changed):
        guarded = watch.guard(steps)
        assert guarded is not None
        outcomes.append(outcome)
        if outcome is None:
            assert guarded(None, [1]) == [1.0]
        else:
            with pytest.raises(StateMismatchError):
                guarded(None, [1])
    assert watch.guard(steps) is None
    assert len(told) == 1
    assert "other parameters" in told[0]

    watch = UntilFailure(told.append)
    guarded = watch.guard(steps)
    assert guarded is not None
    outcomes.append(MemoryError())
    with pytest.raises(MemoryError):
        guarded(None, [1])
    assert watch.guard(steps) is None
