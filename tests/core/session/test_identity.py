"""A run is continued by the optimizer that it was made with, on the parameters that it had."""

import warnings
from functools import partial

import pytest
import torch
from support.options import grouped
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shrinkpoint
from shrinkpoint.errors import ShrinkpointWarning, StateMismatchError
from shrinkpoint.session.identity import identities, other_schedulers, scheduler_classes

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


decoupled = pytest.mark.skipif(
    "decoupled_weight_decay" not in torch.optim.Adam(nn.Linear(1, 1).parameters()).defaults,
    reason="this release of torch's Adam has no such option",
)


class Own(torch.optim.AdamW):
    """A class of the user's."""


def stored(url, make, **stateful):
    net = model()
    optimizer = make(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpointer = shrinkpoint.Checkpointer(url, net, optimizer, scheme="lossless")
    checkpointer.save(10, wait=True)
    checkpointer.close()


def resumed(url, make, net=None):
    net = net or model()
    before = [parameter.clone() for parameter in net.parameters()]
    optimizer = make(net)
    checkpointer = shrinkpoint.Checkpointer(url, net, optimizer, scheme="lossless")
    try:
        return checkpointer.resume(), net
    except StateMismatchError:
        assert all(map(torch.equal, before, net.parameters()))
        assert not optimizer.state
        raise
    finally:
        checkpointer.close()


def adamw(net):
    return torch.optim.AdamW(net.parameters(), 1e-3)


@pytest.mark.parametrize(
    ("one", "other"),
    [("AdamW", "RAdam"), ("RAdam", "AdamW"), ("AdamW", "Adamax"), ("Adamax", "AdamW"), ("Adam", "RAdam")],
)
def test_another_optimizer_of_torch_is_refused(tmp_path, one, other):
    stored(tmp_path / "run", lambda net: getattr(torch.optim, one)(net.parameters(), 1e-3))
    with pytest.raises(
        StateMismatchError, match=rf"run with torch.optim.{one}, and this one has torch.optim.{other}"
    ):
        resumed(tmp_path / "run", lambda net: getattr(torch.optim, other)(net.parameters(), 1e-3))


@pytest.mark.parametrize("make", [lambda net: Own(net.parameters(), 1e-3)])
def test_a_class_of_another_name_goes_on_with_a_warning(tmp_path, make):
    stored(tmp_path / "run", adamw)
    with pytest.warns(
        ShrinkpointWarning, match=r"torch.optim.AdamW, and this one, which goes on with its state, is \S*Own"
    ):
        assert resumed(tmp_path / "run", make)[0] == 10


@pytest.mark.parametrize(
    ("one", "other", "replaced"),
    [
        ("Adam", "AdamW", False),  # which decouples whatever it loads
        pytest.param("AdamW", "Adam", True, marks=decoupled),  # which decouples if the checkpoint says so
    ],
)
def test_only_options_that_a_load_does_replace_are_told(tmp_path, one, other, replaced):
    stored(tmp_path / "run", lambda net: getattr(torch.optim, one)(net.parameters(), weight_decay=0.1))
    made = []

    def make(net):
        made.append(getattr(torch.optim, other)(net.parameters(), weight_decay=0.1))
        return made[0]

    with pytest.warns(ShrinkpointWarning) as caught:
        assert resumed(tmp_path / "run", make)[0] == 10
    told = [str(warning.message) for warning in caught]
    assert [other in message for message in told] == [True] * (2 if replaced else 1)
    assert any("decoupled_weight_decay" in message for message in told) is replaced
    group = made[0].param_groups[0]
    assert group.get("decoupled_weight_decay", True)


def test_the_same_one_is_continued_without_a_word(tmp_path):
    stored(tmp_path / "run", adamw)
    assert resumed(tmp_path / "run", adamw)[0] == 10


@pytest.mark.parametrize("order", [(2, 0, 3), (3, 2, 0)])
def test_parameters_in_another_order_are_refused(tmp_path, order):
    stored(tmp_path / "run", adamw)
    with pytest.raises(StateMismatchError, match="had its parameters in another order"):
        resumed(
            tmp_path / "run",
            lambda net: torch.optim.AdamW([p for place in order for p in net[place].parameters()], 1e-3),
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight_decay": 0.5}, r"weight_decay=0.5, .* the checkpoint's 0.01"),
        ({"betas": (0.5, 0.6)}, r"betas=\(0.5, 0.6\), .* the checkpoint's \(0.9, 0.999\)"),
        ({"amsgrad": True}, "amsgrad=True, .* the checkpoint's False"),
        ({"weight_decay": 0.5, "lr": 1.0}, "lr=1, weight_decay=0.5, .* the checkpoint's 0.001, 0.01"),
    ],
)
def test_options_that_the_checkpoint_replaces_are_named(tmp_path, given, said):
    stored(tmp_path / "run", adamw)
    with pytest.warns(ShrinkpointWarning, match=f"resume: {said}"):
        resumed(tmp_path / "run", lambda net: torch.optim.AdamW(net.parameters(), **{"lr": 1e-3, **given}))


class Counting(torch.optim.SGD):
    """Keeps a count and a mode in its groups, as schedule-free optimizers do."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay=weight_decay)
        self.defaults |= {"k": 0, "train_mode": False}
        for group in self.param_groups:
            group |= {"k": 0, "train_mode": False}

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1
            group["train_mode"] = True


def test_what_an_optimizer_counts_in_its_groups_is_no_option(tmp_path):
    stored(tmp_path / "run", lambda net: Counting(net.parameters(), 1e-3))
    assert resumed(tmp_path / "run", lambda net: Counting(net.parameters(), 1e-3))[0] == 10
    with pytest.warns(ShrinkpointWarning, match="resume: weight_decay=0.5, which this process gave"):
        resumed(tmp_path / "run", lambda net: Counting(net.parameters(), 1e-3, 0.5))


def test_kernels_may_change_without_a_word(tmp_path):
    stored(tmp_path / "run", adamw)
    assert (
        resumed(tmp_path / "run", lambda net: torch.optim.AdamW(net.parameters(), 1e-3, foreach=False))[0]
        == 10
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype_are_converted_with_a_warning(tmp_path, dtype):
    stored(tmp_path / "run", adamw)
    with pytest.warns(
        ShrinkpointWarning, match=f"6 tensors of the model have another dtype .* 0.weight is {dtype} here"
    ):
        assert resumed(tmp_path / "run", adamw, model().to(dtype))[0] == 10


def test_wrappers_that_state_dicts_do_not_name_may_come_and_go(tmp_path):
    def wrapped():
        net = model()
        net[2] = checkpoint_wrapper(net[2])
        return net

    stored(tmp_path / "run", adamw)
    assert resumed(tmp_path / "run", adamw, wrapped())[0] == 10


def test_names_are_looked_up_once_for_all_saves(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "shrinkpoint.session.trained.identities", lambda *given: calls.append(1) or identities(*given)
    )
    net = model()
    optimizer = torch.optim.SGD(net[0].parameters(), 1e-3)
    checkpointer = shrinkpoint.Checkpointer(tmp_path / "run", net, optimizer, scheme="lossless")
    for step in (1, 2):
        checkpointer.save(step, wait=True)
    optimizer.add_param_group({"params": net[2].parameters()})
    checkpointer.save(3, wait=True)
    checkpointer.close()
    assert len(calls) == 2
    kinds = [
        shrinkpoint.load(f"{tmp_path}/run#step={step}")["identities"][0]["parameters"] for step in (1, 2, 3)
    ]
    assert kinds[0] == kinds[1] != kinds[2]


class Wrapper:
    """As accelerate's."""

    def __init__(self, scheduler):
        self.scheduler = scheduler


def linear(step, *, total):
    return 1 - step / total


def cosine(step, *, total):
    return 1 - (step / total) ** 2


def test_schedulers_are_known_by_their_class_and_the_names_of_their_functions():
    optimizer = torch.optim.SGD(model().parameters(), 1e-3)
    schedulers = torch.optim.lr_scheduler
    found = scheduler_classes(
        {
            "step": schedulers.StepLR(optimizer, 3),
            "wrapped": Wrapper(schedulers.StepLR(optimizer, 3)),
            "partial": schedulers.LambdaLR(optimizer, partial(linear, total=9)),
            "nameless": schedulers.LambdaLR(optimizer, lambda step: 1.0),
            "sampler": object(),
        }
    )
    assert found == {
        "step": "torch.optim.lr_scheduler.StepLR",
        "wrapped": "torch.optim.lr_scheduler.StepLR",
        "partial": "torch.optim.lr_scheduler.LambdaLR linear",
        "nameless": "torch.optim.lr_scheduler.LambdaLR",
    }
    assert other_schedulers({}, found) is None  # of a checkpoint that does not say
    assert other_schedulers(found, found) is None


def schedules(url, make):
    net = model()
    optimizer = adamw(net)
    return shrinkpoint.Checkpointer(url, net, optimizer, scheme="lossless", scheduler=make(optimizer))


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
            "scheduler was torch.optim.lr_scheduler.StepLR and is torch.optim.lr_scheduler.CosineAnnealingLR here",
        ),
        (
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, partial(linear, total=9)),
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, partial(cosine, total=9)),
            "LambdaLR linear and is torch.optim.lr_scheduler.LambdaLR cosine here",
        ),
    ],
)
def test_another_scheduler_is_warned_of_and_takes_the_state(tmp_path, one, other, names):
    first = schedules(tmp_path / "run", one)
    first.save(10, wait=True)
    first.close()
    same = schedules(tmp_path / "run", one)
    assert same.resume() == 10
    same.close()
    second = schedules(tmp_path / "run", other)
    with pytest.warns(
        ShrinkpointWarning, match=f"another learning rate scheduler.*{names}.*All of that state"
    ):
        assert second.resume() == 10
    second.close()


def scaled(url, *, enabled, seed):
    torch.manual_seed(seed)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * seed, enabled=enabled)
    given = {"scheme": "lossless", "scaler": scaler}
    return net, scaler, shrinkpoint.Checkpointer(url, net, optimizer, **grouped(**given))


def test_a_disabled_scaler_and_an_enabled_one_are_told_apart_before_anything_is_restored(tmp_path):
    for enabled in (False, True):
        url = tmp_path / f"run-{enabled}"
        first, _, checkpointer = scaled(url, enabled=enabled, seed=1)
        checkpointer.save(10, wait=True)
        checkpointer.close()
        again, scaler, checkpointer = scaled(url, enabled=enabled, seed=2)
        assert checkpointer.resume() == 10  # the same: nothing to tell
        assert scaler.get_scale() == (4.0 if enabled else 1.0)
        checkpointer.close()
    again, _, checkpointer = scaled(tmp_path / "run-False", enabled=True, seed=2)
    before, generator = again.weight.clone(), torch.get_rng_state()
    with pytest.raises(StateMismatchError, match=r"disabled GradScaler as 'scaler'.*its own scale, 8"):
        checkpointer.resume()
    assert torch.equal(again.weight, before)
    assert torch.equal(torch.get_rng_state(), generator)
    checkpointer.close()
    again, _, checkpointer = scaled(tmp_path / "run-True", enabled=False, seed=2)
    with pytest.raises(ShrinkpointWarning, match="GradScaler scaler is disabled here and was enabled"):
        checkpointer.resume()
    assert not torch.equal(again.weight, first.weight)  # where warnings are errors, it is in time as well
    with pytest.warns(ShrinkpointWarning, match="its scale is not restored"):
        assert checkpointer.resume() == 10
    assert torch.equal(again.weight, first.weight)
    checkpointer.close()


class Tied(nn.Module):
    """Two embeddings, which may be one."""

    def __init__(self, *, tied, equal=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Embedding(6, 4), nn.Embedding(6, 4)
        self.register_buffer("table", torch.ones(3))
        self.register_buffer(
            "again", self.table if tied else torch.ones(3)
        )  # as moving to a device leaves them
        if tied:
            self.second.weight = self.first.weight
        elif equal:
            with torch.no_grad():
                self.second.weight.copy_(self.first.weight)


def one_optimizer(net):
    """Which trains one of the two in any case: groups tell nothing then."""
    return torch.optim.SGD([net.first.weight], 0.1)


def save_model(url, net):
    checkpointer = shrinkpoint.Checkpointer(url, net, one_optimizer(net), scheme="lossless")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer.save(10, wait=True)
    checkpointer.close()


def test_separate_weights_of_different_values_do_not_go_into_tied_ones(tmp_path):
    save_model(tmp_path / "run", Tied(tied=False))
    with pytest.raises(
        StateMismatchError, match=r"first.weight and second.weight are separate.*here they are tied"
    ):
        resumed(tmp_path / "run", one_optimizer, Tied(tied=True))


def test_separate_weights_of_equal_values_go_into_tied_ones(tmp_path):
    stored = Tied(tied=False, equal=True)
    with torch.no_grad():
        stored.first.weight[0, 0] = stored.second.weight[0, 0] = float("nan")
    save_model(tmp_path / "run", stored)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the state resumed from|.*not finite")
        assert resumed(tmp_path / "run", one_optimizer, Tied(tied=True))[0] == 10


def test_tied_weights_go_into_separate_ones_with_a_warning(tmp_path):
    save_model(tmp_path / "run", Tied(tied=True))
    assert resumed(tmp_path / "run", one_optimizer, Tied(tied=True))[0] == 10  # the same: nothing to tell
    with pytest.warns(
        ShrinkpointWarning, match=r"first.weight and second.weight are tied.*in the checkpoint"
    ) as caught:
        begins, net = resumed(tmp_path / "run", one_optimizer, Tied(tied=False))
    assert begins == 10
    assert torch.equal(net.first.weight, net.second.weight)
    assert len(caught) == 1
    assert "table" not in str(caught[0].message)  # buffers are left out
