"""State of optimizers that nobody knows, told by what they do with gradients and by its values."""

from typing import Any

import pytest
import torch
from support.optimizers import Lion
from support.training import TinyMLP, capture, train

from shrinkpoint.optimizers.recognition import behaviours, recognised
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.state.training import Role, TrainingState


class Stranger(torch.optim.Optimizer):
    """Keeps whatever `keep` makes of its parameter, its gradient and what it has kept."""

    def __init__(self, params: Any, keep: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.01, **options})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for name, make in self.keep.items():
                    state[name] = make(state.get(name, torch.zeros_like(p)), p.grad, p)
                p.sub_(p.grad, alpha=group["lr"])


def first(old, grad, weight):
    return torch.lerp(grad, old, 0.9)


def second(old, grad, weight):
    return torch.lerp(grad.square(), old, 0.9)


def largest(old, grad, weight):
    return torch.maximum(0.9 * old, grad.abs())


def last(old, grad, weight):
    return grad.clone()


def averaged(old, grad, weight):
    return weight - 0.01 * grad


def normalized(old, grad, weight):
    return torch.lerp(grad / (grad.norm() + 1e-12), old, 0.9)


def rotated(old, grad, weight):
    return torch.lerp(grad.flip(0).square(), old, 0.9)


def trained(steps: int = 12, **keep: Any) -> tuple[TrainingState, Any]:
    torch.manual_seed(0)
    model = TinyMLP(32)
    optimizer = Stranger(model.parameters(), keep)
    train(model, optimizer, range(steps))
    return capture(model, optimizer), OptimizerKind.of(optimizer)


def roles_of(state: TrainingState) -> dict[str, set[Role]]:
    """Of each key, all that its tensors have."""
    found: dict[str, set[Role]] = {}
    for name, spec in state.specs.items():
        if name.startswith("optimizers/"):
            found.setdefault(name.rpartition("/")[2], set()).add(spec.tag.role)
    return found


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"m": first, "v": second}, {"m": Role.EXP_AVG, "v": Role.EXP_AVG_SQ}),
        (
            {"m": first, "m2": first, "v": second},
            {"m": Role.EXP_AVG, "m2": Role.EXP_AVG, "v": Role.EXP_AVG_SQ},
        ),
        ({"m": first, "v": second, "w": second}, {"m": Role.EXP_AVG, "v": Role.SQUARES, "w": Role.SQUARES}),
        ({"v": second}, {"v": Role.SQUARES}),
        ({"m": first, "u": largest}, {"m": Role.EXP_AVG, "u": Role.STATE}),
        ({"m": first, "u": largest, "v": second}, {"m": Role.EXP_AVG, "u": Role.STATE, "v": Role.SQUARES}),
        ({"g": last}, {"g": Role.STATE}),
        ({"z": averaged}, {"z": Role.AVERAGE}),
        ({"n": normalized}, {"n": Role.OTHER}),
        ({"r": rotated, "m": first}, {"r": Role.STATE, "m": Role.EXP_AVG}),
        ({"exp_avg": first, "exp_avg_sq": second}, {"exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.EXP_AVG_SQ}),
        (
            {"exp_avg": normalized, "exp_avg_sq": second},
            {"exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.SQUARES},
        ),
        ({"exp_avg": first, "exp_avg_sq": rotated}, {"exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.SQUARES}),
    ],
)
def test_state_is_what_it_does(keep, expected):
    state, kind = trained(**keep)
    found = recognised(state, [kind])
    assert roles_of(found) == {key: {role} for key, role in expected.items()}
    assert dict(found.tensors.items()) == dict(state.tensors)


def test_what_is_stored_exactly_says_why():
    state, kind = trained(n=normalized)
    tags = [spec.tag for name, spec in recognised(state, [kind]).specs.items() if name.endswith("/n")]
    assert tags
    assert all(tag.why and "neither a sum of gradients" in tag.why for tag in tags)


def test_without_its_optimizer_values_alone_tell():
    state, _ = trained(m=first, v=second, z=averaged)
    roles = roles_of(recognised(state))
    assert roles == {"m": {Role.OTHER}, "v": {Role.STATE}, "z": {Role.AVERAGE}}


def test_squares_that_are_negative_are_none():
    state, kind = trained(sum=lambda old, grad, weight: old - grad.square())
    assert roles_of(recognised(state, [kind])) == {"sum": {Role.OTHER}}


def test_nothing_is_asked_of_what_is_known():
    torch.manual_seed(0)
    model = TinyMLP(32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(3))
    state = capture(model, optimizer)
    assert recognised(state, [OptimizerKind.of(optimizer)]) is state


def test_an_optimizer_that_cannot_be_stepped_on_copies_tells_nothing():
    def fails(old, grad, weight):
        if weight.shape == (8, 8):
            raise RuntimeError
        return grad.square()

    state, kind = trained(v=fails)
    assert behaviours(kind, {"lr": 0.1}) == {}
    assert roles_of(recognised(state, [kind])) == {"v": {Role.STATE}}


def test_nothing_live_is_touched():
    model = TinyMLP(32)
    optimizer = Lion(model.parameters())
    train(model, optimizer, range(3))
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    assert behaviours(OptimizerKind.of(optimizer), optimizer.param_groups[0])["exp_avg"].role is Role.EXP_AVG
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
