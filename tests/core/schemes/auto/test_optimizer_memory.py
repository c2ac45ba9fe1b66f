"""For how many steps first moments remember gradients, as saved optimizers say it."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from support.training import OPTIMIZERS, TinyMLP, capture, train

from shrinkpoint.schemes.auto.optimizer_memory import (
    EPSILON,
    UNKNOWN,
    epsilons,
    errors_at_once,
    memories,
    second_memories,
)
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState

MOMENTS = {"exp_avg", "momentum_buffer", "exp_avg_diff"}


def describe(path, tensor):
    role = (
        Role.EXP_AVG if path[-1] in MOMENTS else Role.EXP_AVG_SQ if path[-1] == "exp_avg_sq" else Role.OTHER
    )
    return Tag(role=role, layer_type=LayerType.LINEAR, parameter=None)


def remembered(saved):
    """By the last two parts of a moment's name, in whole and tenths of steps."""
    found = memories(TrainingState.capture(saved, describe))
    return {"/".join(name.split("/")[-2:]): round(steps, 3) for name, steps in found.items()}


def remembered_in_second(saved):
    """The same of second moments."""
    found = second_memories(TrainingState.capture(saved, describe))
    return {"/".join(name.split("/")[-2:]): round(steps, 3) for name, steps in found.items()}


def added(saved):
    """By the name of the second moment's tensor, without what stands before the last two parts."""
    found = epsilons(TrainingState.capture(saved, describe))
    return {"/".join(name.split("/")[-2:]): epsilon for name, epsilon in found.items()}


def optimizer(kind=torch.optim.AdamW, groups=1, **settings):
    """A saved optimizer after a step, of one parameter in each group."""
    given = settings.pop("each", [{}] * groups)
    made = kind([{"params": [torch.nn.Parameter(torch.ones(2))], **more} for more in given], **settings)
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    made.step()
    return made.state_dict()


def entry(*names):
    return {name: torch.zeros(2) for name in names}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_the_first_decay_of_adam_and_its_kin(kind):
    assert remembered(optimizer(kind, betas=(0.9, 0.999))) == {"0/exp_avg": 9.0}
    assert remembered({"a": {"b": (optimizer(kind, betas=(0.99, 0.95)),)}}) == {"0/exp_avg": 99.0}
    assert remembered(optimizer(kind, betas=(0.0, 0.95))) == {"0/exp_avg": 0.0}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_the_second_decay_of_adam_and_its_kin_is_that_of_its_second_moment(kind):
    assert remembered_in_second(optimizer(kind, betas=(0.9, 0.999))) == {"0/exp_avg_sq": 999.0}
    assert remembered_in_second(optimizer(kind, each=[{"betas": (0.9, 0.95)}, {"betas": (0.9, 0.0)}])) == {
        "0/exp_avg_sq": 19.0,
        "1/exp_avg_sq": 0.0,
    }


def test_second_moments_whose_decay_is_not_given_are_missing():
    assert remembered_in_second(optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)) == {}
    assert remembered_in_second(optimizer(torch.optim.Adamax, betas=(0.8, 0.999))) == {}
    for group in ({"betas": (0.9,), "params": [0]}, {"beta": 0.9, "params": [0]}, {"params": [0]}):
        assert remembered_in_second({"state": {0: entry("exp_avg_sq")}, "param_groups": [group]}) == {}


def test_of_three_decays_the_second_is_that_of_the_second_moment():
    """As AdEMAMix has them, whose third is that of its slow first moment."""
    group = {"betas": (0.9, 0.99, 0.9999), "params": [0]}
    saved = {"state": {0: entry("exp_avg", "exp_avg_sq")}, "param_groups": [group]}
    assert remembered_in_second(saved) == {"0/exp_avg_sq": 99.0}


def test_the_momentum_of_sgd():
    assert remembered(optimizer(torch.optim.SGD, lr=0.1, momentum=0.95)) == {"0/momentum_buffer": 19.0}
    assert remembered(optimizer(torch.optim.SGD, lr=0.1)) == {}


def test_adamax_has_a_second_moment_of_another_name():
    assert remembered(optimizer(torch.optim.Adamax, betas=(0.8, 0.999))) == {"0/exp_avg": 4.0}


def test_lions_second_decay_is_that_of_its_moment():
    group = {"lr": 1e-4, "betas": (0.9, 0.99), "params": [0]}
    assert remembered({"state": {0: entry("exp_avg")}, "param_groups": [group]}) == {"0/exp_avg": 99.0}


@pytest.mark.parametrize("name", ["momentum", "beta", "beta1", "mu"])
def test_decays_of_usual_names(name):
    saved = {"state": {0: entry("exp_avg")}, "param_groups": [{name: 0.75, "params": [0]}]}
    assert remembered(saved) == {"0/exp_avg": 3.0}
    assert remembered({**saved, "param_groups": [{name: 0.75, "beta2": 0.999, "params": [0]}]}) == {
        "0/exp_avg": 3.0
    }


def test_every_group_has_decays_of_its_own():
    saved = optimizer(each=[{"betas": (0.9, 0.99)}, {"betas": (0.5, 0.99)}])
    assert remembered([saved]) == {"0/exp_avg": 9.0, "1/exp_avg": 1.0}


def test_every_optimizer_is_found_with_its_own_parameters():
    saved = {"one": optimizer(betas=(0.5, 0.9)), "others": [optimizer(torch.optim.SGD, lr=1.0, momentum=0.8)]}
    assert remembered(saved) == {"0/exp_avg": 1.0, "0/momentum_buffer": 4.0}


def test_states_by_parameters_names_as_composer_saves_them():
    names = "model.embedding.weight", "model.0.bias"
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": list(names)}
    state = {name: {"step": torch.tensor(3.0), **entry("exp_avg", "exp_avg_sq")} for name in names}
    saved = {"state": {"optimizers": {"DecoupledAdamW": {"state": state, "param_groups": [group]}}}}
    found = memories(TrainingState.capture(saved, describe))
    assert len(found) == 2
    assert list(found.values()) == pytest.approx([9.0, 9.0])
    assert all(name in str(list(found)) for name in names)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_hyperparameters_may_be_tensors(kind):
    decay = torch.tensor(0.9, dtype=getattr(torch, kind))
    group = {"betas": (decay, torch.tensor(0.999)), "params": [0]}
    assert remembered({"state": {0: entry("exp_avg", "exp_avg_sq")}, "param_groups": [group]}) == {
        "0/exp_avg": 9.0
    }
    group = {"momentum": decay.reshape(1), "params": [0]}
    assert remembered({"state": {0: entry("exp_avg")}, "param_groups": [group]}) == {"0/exp_avg": 9.0}


def test_dicts_and_lists_of_every_kind():
    group = OrderedDict(lr=1, betas=[0.5, 0.9], params=(0,))
    state = OrderedDict({0: OrderedDict(entry("exp_avg", "exp_avg_sq"))})
    assert remembered({3: OrderedDict(state=state, param_groups=[{**group, "params": [0]}])}) == {
        "0/exp_avg": 1.0
    }


@pytest.mark.parametrize(
    "group",
    [
        {},
        {"lr": 1e-3},
        {"betas": ()},
        {"betas": None},
        {"betas": (1.0,)},
        {"betas": (-0.1,)},
        {"betas": (float("nan"),)},
        {"betas": (True,)},
        {"betas": ("0.9",)},
        {"betas": (torch.zeros(2),)},
        {"betas": (torch.zeros((), dtype=torch.complex64),)},
        {"momentum": None},
        {"momentum": 1.5},
    ],
)
def test_nothing_is_made_up(group):
    saved = {"state": {0: entry("exp_avg")}, "param_groups": [{**group, "params": [0]}]}
    assert remembered(saved) == {}


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        [],
        {"param_groups": None},
        {"param_groups": {"betas": (0.9, 0.99)}},
        {"param_groups": [7, None, []]},
        {"param_groups": [{"betas": (0.9, 0.99)}]},
        {"param_groups": [{"betas": (0.9, 0.99), "params": 0}]},
        {"param_groups": [{"betas": (0.9, 0.99), "params": [0]}]},
        {"param_groups": [{"betas": (0.9, 0.99), "params": [0, [1], None]}], "state": None},
        {"param_groups": [{"betas": (0.9, 0.99), "params": [0]}], "state": {1: {"exp_avg": torch.zeros(2)}}},
        {"param_groups": [{"betas": (0.9, 0.99), "params": [0]}], "state": {0: {"exp_avg": 3.0}}},
        {"param_groups": [{"betas": (0.9, 0.99), "params": [0]}], "state": {0: {"step": torch.zeros(())}}},
        {"param_groups": [{"betas": (0.9, 0.99), "params": [0]}], "state": {0: torch.zeros(2)}},
    ],
)
def test_what_is_no_optimizer_says_nothing(saved):
    assert remembered(saved) == {}


def test_several_moments_of_one_parameter():
    """As Adan and AdEMAMix have: which decay is the second one's is not known, and it may be the slowest of all."""
    group = {"betas": (0.8, 0.92, 0.99), "params": [0]}
    saved = {"state": {0: entry("exp_avg", "exp_avg_diff", "exp_avg_sq")}, "param_groups": [group]}
    assert remembered(saved) == {"0/exp_avg": 4.0, "0/exp_avg_diff": 99.0}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_moment_of_the_usual_optimizers_is_found(name):
    model = TinyMLP()
    made = OPTIMIZERS[name](model)
    train(model, made, range(2))
    state = capture(model, made)
    found = memories(state)
    moments = {name for name, spec in state.specs.items() if spec.tag.role is Role.EXP_AVG}
    assert set(found) <= moments
    groups = made.param_groups
    if "betas" in groups[0] or groups[0].get("momentum"):
        assert set(found) == moments
        assert all(0 <= steps <= UNKNOWN * 10 for steps in found.values())


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_as_many_steps_of_gradients_as_are_said_are_in_a_moment(decay):
    """With a sudden end of the gradients, what is left of the moment moves as far as so many steps of before."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    made = torch.optim.SGD([weight], lr=1.0, momentum=decay, dampening=decay)
    for _ in range(2000):
        weight.grad = torch.ones_like(weight)
        made.step()
    start = float(weight.detach())
    for _ in range(3000):
        weight.grad = torch.zeros_like(weight)
        made.step()
    (steps,) = memories(TrainingState.capture(made.state_dict(), describe)).values()
    assert start - float(weight.detach()) == pytest.approx(steps, rel=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_what_is_added_to_the_root_is_the_groups_own(kind):
    assert added(optimizer(kind)) == {"0/exp_avg_sq": 1e-8}
    assert added(optimizer(kind, each=[{"eps": 1e-3}, {"eps": 0.0}])) == {
        "0/exp_avg_sq": 1e-3,
        "1/exp_avg_sq": 0.0,
    }
    assert added(optimizer(torch.optim.SGD, momentum=0.9, lr=0.1)) == {}


@pytest.mark.parametrize("told", [None, "small", float("nan"), -1.0, (1e-30, 1e-3), True, torch.ones(3)])
def test_what_an_optimizer_does_not_say_as_a_number_is_what_torchs_own_add(told):
    saved = {"state": {0: entry("exp_avg", "exp_avg_sq")}, "param_groups": [{"eps": told, "params": [0]}]}
    assert added(saved) == {"0/exp_avg_sq": EPSILON}


def test_what_is_added_may_be_a_tensor():
    group = {"eps": torch.tensor(0.25), "params": [0]}
    assert added({"state": {0: entry("exp_avg_sq")}, "param_groups": [group]}) == {"0/exp_avg_sq": 0.25}


@pytest.mark.parametrize(
    ("kind", "settings", "steps"),
    [
        (torch.optim.RMSprop, {}, {"0/square_avg": 99}),
        (torch.optim.RMSprop, {"alpha": 0.9, "centered": True}, {"0/square_avg": 9}),
        (torch.optim.Adadelta, {"rho": 0.95}, {"0/square_avg": 19, "0/acc_delta": 19}),
        (torch.optim.Adagrad, {}, {}),
    ],
)
def test_means_of_squares_without_betas(kind, settings, steps):
    assert remembered_in_second(optimizer(kind, **settings)) == steps


@pytest.mark.parametrize("memory", [0.5, 19, 99, 999])
@pytest.mark.parametrize("interval", [1, 5, 40])
def test_errors_that_are_there_at_once_are_those_that_have_not_faded(memory, interval):
    rng, kept, drawn = np.random.default_rng(0), np.exp(-interval / memory), np.zeros(4000)
    for _ in range(3000):
        drawn = kept * drawn + rng.standard_normal(drawn.size)
    assert errors_at_once(memory, interval, 10**6) == pytest.approx(float(np.var(drawn)), rel=0.1)


def test_where_nothing_fades_all_saves_leave_their_errors():
    assert errors_at_once(float("inf"), 5, 200) == 200
    assert errors_at_once(1e6, 5, 200) == 200
    assert errors_at_once(0, 5, 200) == 1
