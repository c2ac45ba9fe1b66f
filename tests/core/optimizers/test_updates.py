"""What restored optimizer state does to the next updates: recognised for any optimizer, and nothing live is touched."""

import contextlib
import math
import threading

import pytest
import torch
from support.containers import identical
from support.optimizers import KINDS, Lion, Muon
from support.training import TinyMLP, capture, train
from torch.optim.optimizer import register_optimizer_step_post_hook

from shrinkpoint.optimizers.updates import OptimizerKind, Updates, compare_updates, moments_of_direction
from shrinkpoint.state.training import Role, TrainingState


class Trained:
    """Some steps of a training, and its snapshot."""

    def __init__(self, make, steps=30):
        torch.manual_seed(0)
        self.model = TinyMLP(32)
        self.optimizer = make(self.model)
        train(self.model, self.optimizer, range(steps))
        self.state = capture(self.model, self.optimizer)

    def with_moments(self, change, role=Role.EXP_AVG):
        tensors = {
            name: change(tensor) if self.state.specs[name].tag.role is role else tensor
            for name, tensor in self.state.tensors.items()
        }
        return TrainingState(self.state.tree, tensors, self.state.specs)

    def compare(self, restored, **options):
        return compare_updates(self.state, restored, [OptimizerKind.of(self.optimizer)], **options)

    def live(self):
        """Copies of everything that training goes on with."""
        return {
            "model": {name: p.detach().clone() for name, p in self.model.named_parameters()},
            "gradients": {
                name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None
            },
            "state": {
                index: {
                    key: value.clone() if torch.is_tensor(value) else value for key, value in entry.items()
                }
                for index, entry in self.optimizer.state_dict()["state"].items()
            },
            "groups": [
                {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()}
                for group in self.optimizer.state_dict()["param_groups"]
            ],
            "random": torch.get_rng_state(),
        }


@pytest.fixture(params=KINDS, scope="module")
def trained(request):
    return Trained(KINDS[request.param])


def noise(tensor):
    """Of the moment's own size, element by element, so that no second moment notices."""
    signs = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    return torch.where(signs, -tensor, tensor)


def wide(tensor):
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
    return tensor + 4 * tensor.abs() * drawn


def test_identical_states_differ_by_exactly_nothing(trained):
    copies = trained.with_moments(torch.clone)
    found = trained.compare(copies)
    assert (found.error, found.length) == (0.0, 1.0)
    assert found.lost_steps == pytest.approx(0, abs=1e-12)


def test_noise_of_the_moments_own_size_is_recognised(trained):
    found = trained.compare(trained.with_moments(noise))
    assert found.error > 0.8  # of what it takes to be as bad as no update at all
    assert found.lost_steps > 2
    half = trained.compare(trained.with_moments(lambda tensor: torch.lerp(noise(tensor), tensor, 0.9)))
    assert half.error < 0.5 * found.error


def test_wide_noise_is_recognised(trained):
    found = trained.compare(trained.with_moments(wide))
    assert found.error > 0.8
    sizes = type(trained.optimizer) not in (Lion, Muon)  # whose updates always have the same size
    assert found.length > 1.1 if sizes else found.length == pytest.approx(1, abs=0.1)


def test_moments_that_are_gone_are_lost_steps(trained):
    found = trained.compare(trained.with_moments(torch.zeros_like))
    assert found.lost_steps > 2


@pytest.mark.parametrize("name", ["Adam", "AdamW", "AdamW-fused-groups", "AdamW-tensor-rate"])
def test_a_second_moment_that_is_too_small_makes_updates_too_long(name):
    trained = Trained(KINDS[name])
    found = trained.compare(trained.with_moments(lambda v: v / 4, Role.EXP_AVG_SQ))
    assert found.length == pytest.approx(2, abs=0.15)


@pytest.mark.parametrize(
    ("kind", "options", "role", "least"),
    [
        (torch.optim.RMSprop, {}, Role.SQUARES, 1.8),
        (torch.optim.RMSprop, {"momentum": 0.9}, Role.SQUARES, 1.02),  # the momentum is of updates already
        (torch.optim.Adagrad, {}, Role.SQUARES, 1.8),
        (torch.optim.Adadelta, {}, Role.SQUARES, 1.4),
        (torch.optim.Adamax, {}, Role.STATE, 1.8),
    ],
)
def test_squares_and_sizes_that_are_too_small_make_updates_too_long(kind, options, role, least):
    trained = Trained(lambda model: kind(model.parameters(), **options))
    same = trained.compare(trained.with_moments(torch.clone, role))
    assert (same.error, same.length) == (0.0, 1.0)
    assert trained.compare(trained.with_moments(lambda v: v / 4, role)).length > least


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_other_dtypes_are_tried_as_well(kind, dtype):
    torch.manual_seed(0)
    model = TinyMLP(32).to(dtype)
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = 0.01 * torch.randn_like(parameter)
        optimizer.step()
    state = capture(model, optimizer)
    tensors = {
        name: tensor / 4 if state.specs[name].tag.role in (Role.EXP_AVG_SQ, Role.SQUARES) else tensor
        for name, tensor in state.tensors.items()
    }
    small = TrainingState(state.tree, tensors, state.specs)
    kinds = [OptimizerKind.of(optimizer)]
    assert compare_updates(state, state, kinds).error == 0
    assert compare_updates(state, small, kinds).length > 1.5


def test_nothing_live_is_touched(trained):
    before = trained.live()
    trained.compare(trained.with_moments(wide))
    assert identical(trained.live(), before)


def test_a_moment_that_is_not_finite_is_never_taken_for_a_good_one(trained):
    def broken(tensor):
        return torch.full_like(tensor, math.nan)

    found = trained.compare(trained.with_moments(broken))
    assert isinstance(found, Updates)
    assert not (found.error < 1 and found.length <= 1.1)


@pytest.mark.parametrize("name", ["Adam", "AdamW-tensor-rate", "SGD", "Lion"])
def test_a_learning_rate_of_zero_is_no_excuse(name):
    trained = Trained(KINDS[name])
    for group in trained.optimizer.param_groups:
        group["lr"] = group["lr"] * 0
    trained.state = capture(trained.model, trained.optimizer)
    assert trained.compare(trained.with_moments(noise)).error > 0.8


def test_the_result_does_not_depend_on_the_learning_rate():
    found = []
    for rate in (1e-5, 1e-1):
        trained = Trained(KINDS["Adam"])
        for group in trained.optimizer.param_groups:
            group["lr"] = rate
        trained.state = capture(trained.model, trained.optimizer)
        found.append(trained.compare(trained.with_moments(noise)))
    assert found[0].error == pytest.approx(found[1].error, rel=1e-2)
    assert found[0].lost_steps == pytest.approx(found[1].lost_steps, rel=1e-2)


@pytest.mark.parametrize("scheduled", ["StepLR", "OneCycleLR"])
def test_a_scheduler_that_wraps_step_does_not_lead_to_the_live_optimizer(scheduled):
    trained = Trained(KINDS["AdamW"])
    schedulers = torch.optim.lr_scheduler
    made = {
        "StepLR": lambda: schedulers.StepLR(trained.optimizer, 10),
        "OneCycleLR": lambda: schedulers.OneCycleLR(trained.optimizer, 0.1, total_steps=100),
    }[scheduled]()
    trained.optimizer.step()
    made.step()
    assert "step" in vars(trained.optimizer)
    trained.state = capture(trained.model, trained.optimizer)
    before = trained.live()
    assert trained.compare(trained.with_moments(noise)).error > 0.8
    assert identical(trained.live(), before)


def test_live_hooks_are_never_called():
    trained = Trained(KINDS["AdamW"])
    called = []
    trained.optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    trained.optimizer.register_step_post_hook(lambda *_: called.append("post"))
    for parameter in trained.model.parameters():
        parameter.register_hook(lambda gradient: called.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    assert isinstance(trained.compare(trained.state), Updates)
    assert called == []


def test_hooks_on_all_optimizers_are_never_called_and_named():
    trained, called = Trained(KINDS["AdamW"]), []
    handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        found = trained.compare(trained.state)
    finally:
        handle.remove()
    assert found == "there are hooks on all optimizers' steps"
    assert called == []


# ---- optimizers of anybody's


def with_step(step, base=torch.optim.SGD):
    return type("Own", (base,), {"step": step})


def test_a_class_whose_step_closes_over_a_number_is_tried():
    factor = 3.0

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                moment.lerp_(p.grad, 0.1)
                p.data.add_(moment, alpha=-factor * group["lr"])

    trained = Trained(lambda model: with_step(step)(model.parameters(), lr=0.01))
    assert trained.compare(trained.with_moments(noise)).lost_steps > 2


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_class_whose_step_closes_over_live_weights_is_not_stepped(wrapped):
    trained = Trained(KINDS["SGD"])
    weight = trained.model.inner.weight

    def step(self, closure=None):
        weight.data.add_(1)

    def outer(self, closure=None):
        return step(self, closure)

    kind = with_step(outer if wrapped else step)
    optimizer = kind(trained.model.parameters(), lr=0.01, momentum=0.9)
    optimizer.load_state_dict(trained.optimizer.state_dict())
    before = weight.detach().clone()
    found = compare_updates(trained.state, trained.state, [OptimizerKind.of(optimizer)])
    assert isinstance(found, str)
    assert "Own.step holds tensors or modules of its own" in found
    assert identical(weight.detach(), before)


def test_sparse_adam_says_why_it_cannot_be_tried():
    torch.manual_seed(0)
    model = torch.nn.Embedding(20, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.arange(9)).square().sum().backward()
    optimizer.step()
    state = capture(model, optimizer)
    before = model.weight.detach().clone()
    found = compare_updates(state, state, [OptimizerKind.of(optimizer)])
    assert isinstance(found, str)
    assert found.startswith(
        "SparseAdam cannot be stepped on copies (RuntimeError: SparseAdam does not support dense"
    )
    assert identical(model.weight.detach(), before)


def test_an_optimizer_that_holds_what_cannot_be_copied_can_be_saved_and_says_why_it_is_not_tried():
    trained = Trained(KINDS["SGD"])
    trained.optimizer.lock = threading.Lock()
    found = trained.compare(trained.state)
    assert "SGD cannot be stepped on copies" in found
    assert "lock" in found


def test_an_attribute_that_hides_a_default_of_the_class_is_kept():
    class Scaled(torch.optim.SGD):
        ready = False

        def step(self, closure=None):
            if not self.ready:
                raise RuntimeError("not ready")
            return super().step(closure)

    trained = Trained(lambda model: Scaled(model.parameters(), lr=0.01, momentum=0.9), steps=0)
    trained.optimizer.ready = True
    train(trained.model, trained.optimizer, range(5))
    trained.state = capture(trained.model, trained.optimizer)
    assert isinstance(trained.compare(trained.state), Updates)


def test_an_optimizer_that_steps_another_one_is_not_taken_for_perfect():
    class Wrapper(torch.optim.SGD):
        def step(self, closure=None):
            return self.inner.step(closure)

    trained = Trained(KINDS["SGD"])
    optimizer = Wrapper(trained.model.parameters(), lr=0.01, momentum=0.9)
    optimizer.inner = trained.optimizer
    before = trained.live()
    found = compare_updates(trained.state, trained.with_moments(noise), [OptimizerKind.of(optimizer)])
    assert isinstance(found, str)
    assert identical(trained.live(), before)


# ---- what is found in a state


def test_without_moments_there_is_nothing_to_be_tried():
    trained = Trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    assert "no optimizer holds moments" in trained.compare(trained.state)


def test_the_worst_of_several_optimizers_is_told():
    torch.manual_seed(0)
    model = TinyMLP(32)
    optimizers = [torch.optim.AdamW(model.inner.parameters()), Lion(model.outer.parameters())]
    for seed in range(20):
        for optimizer in optimizers:
            train(model, optimizer, [seed])
    state = capture(model, *optimizers)
    kinds = [OptimizerKind.of(optimizer) for optimizer in optimizers]

    def changed(prefix):
        tensors = {
            name: noise(value)
            if state.specs[name].tag.role is Role.EXP_AVG and name.startswith(prefix)
            else value
            for name, value in state.tensors.items()
        }
        return compare_updates(state, TrainingState(state.tree, tensors, state.specs), kinds)

    both = changed("optimizers/")
    each = [changed("optimizers/0"), changed("optimizers/1")]
    assert both.error == max(found.error for found in each) > 0.8
    assert both.lost_steps == max(found.lost_steps for found in each)


def test_only_the_parameters_that_are_asked_for_are_tried():
    trained = Trained(KINDS["Adam"])
    restored = trained.with_moments(noise)
    assert trained.compare(restored, parameters={"outer.weight"}).error > 0.8
    state = trained.state
    names = {
        name
        for name, spec in state.specs.items()
        if spec.tag.role is Role.EXP_AVG and spec.tag.parameter == "inner.weight"
    }
    tensors = {name: noise(value) if name in names else value for name, value in state.tensors.items()}
    only_inner = TrainingState(state.tree, tensors, state.specs)
    assert trained.compare(only_inner, parameters={"outer.weight"}).error == 0
    assert trained.compare(only_inner, parameters={"inner.weight"}).error > 0.8


def test_it_runs_beside_training_without_a_trace():
    """Stepping copies in a thread while training goes on changes nothing in it."""

    def losses(compare):
        trained = Trained(KINDS["AdamW"])
        kinds = [OptimizerKind.of(trained.optimizer)]
        work = lambda: compare_updates(trained.state, trained.with_moments(noise), kinds)  # noqa: E731
        thread = threading.Thread(target=work) if compare else contextlib.nullcontext()
        if compare:
            thread.start()
        train(trained.model, trained.optimizer, range(100, 130))
        if compare:
            thread.join()
        return trained.live()

    assert identical(losses(True), losses(False))


# ---- optimizers that take a moment's direction alone


def directions(trained):
    found = moments_of_direction(trained.state, [OptimizerKind.of(trained.optimizer)])
    firsts = {name for name, spec in trained.state.specs.items() if spec.tag.role is Role.EXP_AVG}
    assert found in (set(), firsts)
    return bool(found)


def test_signs_and_orthogonal_updates_take_the_direction_of_a_moment_and_others_its_length(trained):
    before = trained.live()
    assert directions(trained) == isinstance(trained.optimizer, (Lion, Muon))
    assert identical(trained.live(), before)


def test_a_matrix_is_tried_however_large_it_is(monkeypatch):
    monkeypatch.setattr("shrinkpoint.optimizers.updates._MOST_ELEMENTS", 200)
    trained = Trained(KINDS["AdamW"])
    tensors = {
        name: noise(tensor)
        if trained.state.specs[name].tag.role is Role.EXP_AVG and tensor.dim() == 2
        else tensor
        for name, tensor in trained.state.tensors.items()
    }
    restored = TrainingState(trained.state.tree, tensors, trained.state.specs)
    assert trained.compare(restored).error > 0.8
