"""Optimizers inside of wrappers: seen through where the wrapper has no state of its own, and nowhere else."""

from typing import Any

import pytest
import torch
from support.training import TinyMLP, capture, train
from torch.optim import Optimizer

from shrinkpoint.optimizers.updates import OptimizerKind, compare_updates
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.stateful import unwrapped
from shrinkpoint.state.training import Role


class Plain:
    """No optimizer by class, as users write them around one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class Accelerated(Optimizer):
    """What accelerate's ``AcceleratedOptimizer`` does: an optimizer by class, all of whose state is the wrapped one's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:
        raise AssertionError("a wrapper is never stepped in its optimizer's place")


class Lookahead(Optimizer):
    """Keeps weights of its own beside the state of what it wraps, with the same groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, {}


WRAPPERS = pytest.mark.parametrize("wrap", [Plain, Accelerated])


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = TinyMLP(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(5))
    return model, optimizer


@WRAPPERS
def test_wrappers_are_seen_through_however_many_there_are(trained, wrap):
    _, optimizer = trained
    assert unwrapped(optimizer) is optimizer
    assert unwrapped(wrap(optimizer)) is optimizer
    assert unwrapped(wrap(Accelerated(optimizer))) is optimizer


def test_what_keeps_state_of_its_own_is_no_wrapper(trained):
    _, optimizer = trained
    lookahead = Lookahead(optimizer)
    assert unwrapped(lookahead) is lookahead


def test_an_optimizer_that_wraps_itself_is_found_in_the_end(trained):
    _, optimizer = trained
    optimizer.optimizer = optimizer
    assert unwrapped(optimizer) is optimizer


@WRAPPERS
def test_roles_and_updates_are_those_of_the_wrapped_optimizer(trained, wrap):
    model, optimizer = trained
    wrapped = wrap(optimizer)
    describe = describe_training(model, [wrapped], model_path=("model",), optimizers_path=("optimizers",))
    moments = optimizer.state_dict()["state"][0]
    for key, role in (("exp_avg", Role.EXP_AVG), ("exp_avg_sq", Role.EXP_AVG_SQ)):
        assert describe(("optimizers", "0", "state", "0", key), moments[key]).role is role
    assert OptimizerKind.of(wrapped).kind is torch.optim.AdamW
    state = capture(model, wrapped)
    compared = compare_updates(state, state, [OptimizerKind.of(wrapped)])
    assert (compared.error, compared.length) == (0.0, 1.0)


def test_accelerates_own_wrapper_is_seen_through(trained):
    accelerate = pytest.importorskip("accelerate")
    _model, optimizer = trained
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert type(prepared) is not torch.optim.AdamW
    assert unwrapped(prepared) is optimizer
