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


ADAMS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam]


@pytest.mark.parametrize("kind", ADAMS)
def test_the_decays_of_adam_and_its_kin(kind):
    assert remembered(optimizer(kind, betas=(0.9, 0.999))) == {"0/exp_avg": 9.0}
    assert remembered({"a": {"b": (optimizer(kind, betas=(0.99, 0.95)),)}}) == {"0/exp_avg": 99.0}
    assert remembered(optimizer(kind, betas=(0.0, 0.95))) == {"0/exp_avg": 0.0}
    assert remembered_in_second(optimizer(kind, betas=(0.9, 0.999))) == {"0/exp_avg_sq": 999.0}
    each = [{"betas": (0.9, 0.95)}, {"betas": (0.9, 0.0)}]
    assert remembered_in_second(optimizer(kind, each=each)) == {"0/exp_avg_sq": 19.0, "1/exp_avg_sq": 0.0}
    assert added(optimizer(kind)) == {"0/exp_avg_sq": 1e-8}
    each = [{"eps": 1e-3}, {"eps": 0.0}]
    assert added(optimizer(kind, each=each)) == {"0/exp_avg_sq": 1e-3, "1/exp_avg_sq": 0.0}


@pytest.mark.parametrize(
    ("kind", "settings", "firsts", "seconds"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.95}, {"0/momentum_buffer": 19}, {}),
        (torch.optim.SGD, {"lr": 0.1}, {}, {}),
        (torch.optim.Adamax, {"betas": (0.8, 0.999)}, {"0/exp_avg": 4}, {}),
        (torch.optim.AdamW, {"each": [{"betas": (0.9, 0.99)}, {"betas": (0.5, 0.99)}]},
         {"0/exp_avg": 9, "1/exp_avg": 1}, {"0/exp_avg_sq": 99, "1/exp_avg_sq": 99}),
        (torch.optim.RMSprop, {}, {}, {"0/square_avg": 99}),
        (torch.optim.RMSprop, {"alpha": 0.9, "centered": True}, {}, {"0/square_avg": 9}),
        (torch.optim.Adadelta, {"rho": 0.95}, {}, {"0/square_avg": 19, "0/acc_delta": 19}),
        (torch.optim.Adagrad, {}, {}, {}),
    ],
)  # fmt: skip
def test_the_decays_of_torchs_others(kind, settings, firsts, seconds):
    saved = optimizer(kind, **settings)
    assert (remembered(saved), remembered_in_second(saved)) == (firsts, seconds)
    if kind is torch.optim.SGD:
        assert added(saved) == {}


@pytest.mark.parametrize(
    ("group", "keys", "firsts", "seconds"),
    [
        ({"betas": (0.9, 0.99), "lr": 1e-4}, ["exp_avg"], {"exp_avg": 99}, {}),  # Lion's moment decays by the second
        *(({name: 0.75, **more}, ["exp_avg"], {"exp_avg": 3}, {})
          for name in ("momentum", "beta", "beta1", "mu") for more in ({}, {"beta2": 0.999})),
        ({"betas": (0.9,)}, ["exp_avg_sq"], {}, {}),
        ({"beta": 0.9}, ["exp_avg_sq"], {}, {}),
        ({}, ["exp_avg_sq"], {}, {}),
        # of three, as AdEMAMix has them, the last is that of its slow first moment; which one of several has is not known
        ({"betas": (0.9, 0.99, 0.9999)}, ["exp_avg", "exp_avg_sq"], {"exp_avg": 9}, {"exp_avg_sq": 99}),
        ({"betas": (0.8, 0.92, 0.99)}, ["exp_avg", "exp_avg_diff", "exp_avg_sq"],
         {"exp_avg": 4, "exp_avg_diff": 99}, {"exp_avg_sq": 11.5}),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.999))}, ["exp_avg", "exp_avg_sq"],
         {"exp_avg": 9}, {"exp_avg_sq": 999}),
        ({"momentum": torch.tensor([0.9], dtype=torch.float64)}, ["exp_avg"], {"exp_avg": 9}, {}),
    ],
)  # fmt: skip
def test_the_decays_of_anybodys(group, keys, firsts, seconds):
    saved = {"state": {0: entry(*keys)}, "param_groups": [{**group, "params": [0]}]}
    for found, wanted in ((remembered(saved), firsts), (remembered_in_second(saved), seconds)):
        assert found == pytest.approx({f"0/{key}": steps for key, steps in wanted.items()}, rel=1e-3)


def test_every_optimizer_is_found_with_its_own_parameters():
    saved = {"one": optimizer(betas=(0.5, 0.9)), "others": [optimizer(torch.optim.SGD, lr=1.0, momentum=0.8)]}
    assert remembered(saved) == {"0/exp_avg": 1.0, "0/momentum_buffer": 4.0}
    group = OrderedDict(lr=1, betas=[0.5, 0.9], params=[0])
    state = OrderedDict({0: OrderedDict(entry("exp_avg", "exp_avg_sq"))})
    assert remembered({3: OrderedDict(state=state, param_groups=[group])}) == {"0/exp_avg": 1.0}


def test_states_by_parameters_names_as_composer_saves_them():
    names = "model.embedding.weight", "model.0.bias"
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": list(names)}
    state = {name: {"step": torch.tensor(3.0), **entry("exp_avg", "exp_avg_sq")} for name in names}
    saved = {"state": {"optimizers": {"DecoupledAdamW": {"state": state, "param_groups": [group]}}}}
    found = memories(TrainingState.capture(saved, describe))
    assert len(found) == 2
    assert list(found.values()) == pytest.approx([9.0, 9.0])
    assert all(name in str(list(found)) for name in names)


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


@pytest.mark.parametrize("told", [None, "small", float("nan"), -1.0, (1e-30, 1e-3), True, torch.ones(3)])
def test_what_an_optimizer_does_not_say_as_a_number_is_what_torchs_own_add(told):
    saved = {"state": {0: entry("exp_avg", "exp_avg_sq")}, "param_groups": [{"eps": told, "params": [0]}]}
    assert added(saved) == {"0/exp_avg_sq": EPSILON}
    saved["param_groups"][0]["eps"] = torch.tensor(0.25)
    assert added(saved) == {"0/exp_avg_sq": 0.25}


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
