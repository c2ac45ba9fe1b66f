"""What optimizers train is stored, frozen again as it was, and missed where it is replaced; the loop of a `Checkpointer`."""

import itertools
import re
import warnings
from collections import UserDict, deque
from functools import partial

import numpy as np
import pytest
import torch
from support.options import grouped
from torch import nn
from torch.nn.utils import prune

import shrinkpoint
from shrinkpoint import Checkpointer
from shrinkpoint.config import Advanced
from shrinkpoint.errors import ShrinkpointWarning, StateMismatchError

beside = pytest.mark.filterwarnings("ignore:the optimizer trains .* are saved by their places")


class Loss(nn.Module):
    """With weights, as sentence-transformers' SoftmaxLoss."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(6, 3)

    def forward(self, out, target):
        return nn.functional.cross_entropy(self.classifier(out), target)


class Training:
    """Its optimizers train a loss and a list of heads that nothing stores; parts are unfrozen by step."""

    def __init__(self, url, *, unfreeze_at=None, several=False, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
        self.loss, self.heads = Loss(), [nn.Linear(6, 2) for _ in range(2)]
        self.scale = nn.Parameter(torch.ones(()))
        beside = [*self.loss.parameters(), *(p for head in self.heads for p in head.parameters()), self.scale]
        self.unfreeze_at, trained = unfreeze_at, list(self.model.parameters())
        if unfreeze_at is not None:
            for parameter in self.model[0].parameters():
                parameter.requires_grad_(False)
            self.model[1].track_running_stats = False
            trained = list(self.model[3].parameters())
        if several:
            self.optimizers = [torch.optim.Adam(trained, 0.01), torch.optim.SGD(beside, 0.01, momentum=0.9)]
        else:
            self.optimizers = [torch.optim.AdamW([{"params": beside, "lr": 0.02}, {"params": trained}], 0.01)]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.9)
        given = {"scheme": "lossless", "every": 2, "busy": "wait", **options}
        self.checkpointer = Checkpointer(
            url, self.model, self.optimizers, **grouped(scheduler=self.scheduler, **given)
        )

    def run(self, until):
        first = self.checkpointer.resume()
        for step in range(first, until):
            if step == self.unfreeze_at:
                self.model[0].requires_grad_(True)
                self.model[1].track_running_stats = True
                more = [*self.model[0].parameters(), *self.model[1].parameters()]
                self.optimizers[0].add_param_group({"params": more, "lr": 0.003})
            generator = torch.Generator().manual_seed(step)
            out = self.model(torch.randn(4, 5, generator=generator))
            loss = self.loss(out, torch.randint(3, (4,), generator=generator)) * self.scale
            for head in self.heads:
                loss = loss + head(out).square().mean()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()
            self.checkpointer.step(step + 1)
        self.checkpointer.close()
        return self.values()

    def values(self):
        parts = [self.model, self.loss, *self.heads]
        tensors = [value for part in parts for value in part.state_dict().values()]
        return [*tensors, self.scale.detach()]

    def moments(self):
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return [value for state in states for entry in state.values() for value in entry.values()]


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@beside
@pytest.mark.parametrize("several", [False, True])
def test_parameters_that_no_object_stores_go_on_bit_by_bit(tmp_path, several):
    whole = Training(tmp_path / "whole", several=several)
    values = whole.run(8)
    Training(tmp_path / "parts", several=several).run(5)
    again = Training(tmp_path / "parts", several=several)
    assert equal(again.run(8), values)
    assert equal(again.moments(), whole.moments())
    assert list(shrinkpoint.load_weights(tmp_path / "parts")) == list(again.model.state_dict())


@beside
def test_their_moments_are_coded_and_they_themselves_exact(tmp_path):
    def made():
        torch.manual_seed(0)
        model, head = nn.Linear(64, 64), nn.Linear(64, 64)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3)
        data = torch.randn(256, 64)

        def evaluate():
            return [float(head(model(part)).square().mean()) for part in data.split(64)]

        return model, head, optimizer, data, evaluate

    model, head, optimizer, data, evaluate = made()
    checkpointer = Checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, every=20, advanced=Advanced(busy="wait")
    )
    for step in range(40):
        head(model(data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step + 1)
    checkpointer.close()
    again, other, optimizer, _, _ = made()
    assert Checkpointer(tmp_path, again, optimizer).resume() == 40
    assert equal(list(other.parameters()), list(head.parameters()))
    report = checkpointer.reports()[-1]
    size = 4 * sum(p.numel() for p in (*model.parameters(), *head.parameters()))
    for role in ("exp_avg", "exp_avg_sq"):
        assert report.raw_sections[role] == size
        assert report.sections[role] < size / 4


def test_what_another_object_stores_is_stored_once(tmp_path):
    def made(**more):
        torch.manual_seed(1)
        model, head = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
        return Checkpointer(tmp_path, model, optimizer, scheme="lossless", head=head), head

    checkpointer, head = made()
    checkpointer.save(1, wait=True)
    state = shrinkpoint.load(tmp_path)
    found = []

    def look(node):
        if torch.is_tensor(node):
            found.append(node)
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            look(child)

    look(state)
    assert sum(one.shape == (3, 3) and torch.equal(one, head.weight) for one in found) == 1


@beside
def test_another_optimizer_beside_the_model_is_refused(tmp_path):
    def made(*shapes):
        model = nn.Linear(3, 3)
        more = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = torch.optim.SGD([*model.parameters(), *more])
        return Checkpointer(tmp_path, model, optimizer, scheme="lossless")

    checkpointer = made((2,), (4,))
    checkpointer.save(1, wait=True)
    checkpointer.close()
    for shapes in (((2,),), ((4,), (2,)), ()):
        with pytest.raises(StateMismatchError):
            made(*shapes).resume()
    assert made((2,), (4,)).resume() == 1


@pytest.mark.filterwarnings("default::shrinkpoint.errors.ShrinkpointWarning")
@pytest.mark.parametrize("killed", [2, 5, 6])
def test_parts_that_were_unfrozen_and_added_to_the_optimizer_go_on_so(tmp_path, killed):
    whole = Training(tmp_path / "whole", unfreeze_at=3)
    values = whole.run(10)
    Training(tmp_path / "parts", unfreeze_at=3).run(killed)
    again = Training(tmp_path / "parts", unfreeze_at=3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert equal(again.run(10), values)
    assert equal(again.moments(), whole.moments())
    messages = [str(one.message) for one in told]
    unfrozen = [message for message in messages if "requires_grad" in message]
    assert len(unfrozen) == (killed > 3)
    assert all("0.weight" in message for message in unfrozen)
    assert sum("parameters that the run had added to it" in message for message in messages) == (killed > 3)


def test_buffers_beside_the_model_are_told(tmp_path):
    model, other = nn.Linear(3, 3), nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()])
    checkpointer = Checkpointer(tmp_path, model, optimizer, scheme="lossless")
    with pytest.warns(
        ShrinkpointWarning, match=r"trains 2 parameters .* of shapes \(3,\), \(3,\): .* BatchNorm"
    ) as told:
        checkpointer.save(1, wait=True)
    assert len(told) == 1
    checkpointer.save(2, wait=True)


def test_a_head_given_by_name_is_frozen_again(tmp_path):
    def made():
        model, head = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
        return head, model, Checkpointer(tmp_path, model, optimizer, head=head, scheme="lossless")

    head, model, checkpointer = made()
    head.weight.requires_grad_(False)
    checkpointer.save(1, wait=True)
    checkpointer.close()
    head, model, checkpointer = made()
    with pytest.warns(ShrinkpointWarning, match=r"requires_grad of head\.weight is the checkpoint's"):
        checkpointer.resume()
    assert [p.requires_grad for p in (*head.parameters(), *model.parameters())] == [False, True, True, True]


def _resumed(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(folder, model, optimizer, scheme="lossless")
    checkpointer.resume()
    return model, optimizer, checkpointer


def _new_head(model, optimizer):
    model[1] = nn.Linear(3, 2)


def _tied(model, optimizer):
    model[0].bias = model[1].bias = nn.Parameter(torch.zeros(3))


def _adapters(model, optimizer):
    model.requires_grad_(False)
    model.add_module("adapter", nn.Linear(2, 2, bias=False))


def _converted(model, optimizer):
    for module in model:
        module.weight = nn.Parameter(module.weight.detach().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "name"), [(_new_head, "1.weight"), (_tied, "0.bias"), (_adapters, "adapter.weight"), (_converted, "0.weight")]
)  # fmt: skip
def test_a_model_of_which_other_parameters_are_trained_than_saved_is_an_error(tmp_path, change, name):
    model, optimizer, checkpointer = _resumed(tmp_path)
    checkpointer.save(1, wait=True)
    change(model, optimizer)
    with pytest.raises(StateMismatchError, match=name):
        checkpointer.save(2, wait=True)
    assert [report.step for report in checkpointer.reports()] == [1]
    model, optimizer, checkpointer = _resumed(tmp_path)
    change(model, optimizer)
    with pytest.raises(StateMismatchError):
        checkpointer.resume()


def _cast(model, optimizer):
    model.to(torch.bfloat16)
    return "0.weight.*float32.*bfloat16"


def _grown(model, optimizer):
    model.add_module("head", nn.Linear(2, 2))
    optimizer.add_param_group({"params": model.head.parameters()})
    return "other parameters .head.weight, head.bias"


def _replaced_in_both(model, optimizer):
    model[1] = nn.Linear(3, 2)
    [group] = optimizer.param_groups
    group["params"][2:] = model[1].parameters()
    return "other parameters .1.weight, 1.bias"


def _snapshot(model, optimizer):
    model.add_module("best", nn.Linear(2, 2))
    return "best.weight, best.bias, which no optimizer here trains"


@pytest.mark.parametrize("change", [_cast, _grown, _replaced_in_both, _snapshot])
def test_a_model_that_was_changed_after_it_was_given_is_told_once(tmp_path, change):
    model, optimizer, checkpointer = _resumed(tmp_path)
    expected = change(model, optimizer)
    with pytest.warns(ShrinkpointWarning, match=expected) as told:
        checkpointer.save(1, wait=True)
    assert len(told) == 1
    checkpointer.save(2, wait=True)
    assert equal(list(shrinkpoint.load_weights(tmp_path).values()), list(model.state_dict().values()))


def _pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.5)
    return [
        "parameters under other names .0.weight_orig",
        "made or resized the model's buffers 0.weight_mask",
    ]


def _moved(model):
    model.add_module("first", model._modules.pop("0"))
    return ["parameters under other names .first.weight, first.bias"]


@pytest.mark.parametrize("change", [_pruned, _moved])
def test_parameters_that_get_other_names_are_told(tmp_path, change):
    model, _, checkpointer = _resumed(tmp_path)
    checkpointer.save(1, wait=True)
    expected = change(model)
    with pytest.warns(ShrinkpointWarning) as told:
        checkpointer.save(2, wait=True)
    lines = [str(line.message) for line in told]
    assert [any(re.search(each, line) for line in lines) for each in expected] == [True] * len(expected)
    checkpointer.close()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    change(model)
    again = Checkpointer(tmp_path, model, optimizer, scheme="lossless")
    assert again.resume() == 2


def test_moves_and_wrappers_that_keep_parameters_are_not_told(tmp_path):
    model, _, checkpointer = _resumed(tmp_path)
    nn.Sequential(model).double().float()
    torch.compile(model)
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()
    checkpointer.save(1, wait=True)


class Annealed(nn.Linear):
    """Has a temperature that falls at each step, a counter in its extra state, and numbers that stay."""

    def __init__(self):
        super().__init__(5, 1)
        self.temperature, self.width, self.inner = 1.0, 5, Counted(1, 1)

    def forward(self, x):
        self.temperature *= 0.9
        return self.inner(super().forward(x)) / self.temperature


class Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def test_a_number_that_changes_and_no_state_has_is_told_once(tmp_path):
    model = Annealed()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = grouped(every=1, scheme="lossless", busy="wait")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(str(tmp_path), model, optimizer, **options) as checkpointer:
            for step in range(4):
                model(torch.ones(2, 5)).sum().backward()
                optimizer.step()
                checkpointer.step(step + 1)
    [said] = [str(each.message) for each in caught if "which training changes" in str(each.message)]
    assert said.startswith("no state of the model has temperature, which")


class Counter:
    def __init__(self):
        self.count = 0


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


def count(counter):
    counter.count += 1


def calls():
    made = 0

    def call():
        nonlocal made
        made += 1

    return call


class Remembering(nn.Linear):
    """Keeps something apart from its state, which it changes at each call."""

    def __init__(self, kept, change):
        super().__init__(5, 5)
        self.kept, self.change, self.drop = kept, change, nn.Dropout(0.5)

    def forward(self, x):
        self.change(self.kept)
        return self.drop(super().forward(x))


def ahead(modules):
    with torch.no_grad():
        modules[0].weight.mul_(2)


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (deque(maxlen=2), lambda kept: kept.append(torch.ones(3))),
        ([torch.zeros(3)], lambda kept: kept[0].add_(1)),
        ({"calls": 0}, lambda kept: kept.update(calls=kept["calls"] + 1)),
        (np.zeros(3), lambda kept: kept.__iadd__(1)),
        (itertools.count(), next),
        (Counter(), count),
        ([nn.Linear(2, 2)], ahead),
        (Slots(), count),
        (UserDict(calls=0), lambda kept: kept.update(calls=kept["calls"] + 1)),
        ((number for number in range(100)), next),
        (calls(), lambda kept: kept()),
        (partial(count, Counter()), lambda kept: kept()),
        ([1.0], lambda kept: kept.__setitem__(0, kept[0] * 0.9)),
        ([0, 0], lambda kept: (kept.append(kept[-1] + 1), kept.pop(0))),
    ],
)
def test_what_a_module_keeps_apart_from_its_state_is_told_where_it_changes(tmp_path, kept, change):
    def told(kept, change):
        model = Remembering(kept, change)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Checkpointer(
                str(tmp_path),
                model,
                optimizer,
                resume="never",
                **grouped(every=1, scheme="lossless", busy="wait"),
            ) as checkpointer:
                for step in range(8):
                    model.drop.p = 0.5 if step < 6 else 0.1
                    model(torch.ones(2, 5)).sum().backward()
                    optimizer.step()
                    checkpointer.step(step + 1)
        return [
            str(each.message).split(",")[0]
            for each in caught
            if "which training changes" in str(each.message)
        ]

    late = "no state of the model has drop.p"
    assert told(kept, change) == ["no state of the model has kept", late]
    assert told(None, bool) == [late]


class Lazy(nn.Linear):
    """Makes what it keeps when it is called."""

    def forward(self, x):
        self.kept = getattr(self, "kept", 0) + 1
        return super().forward(x) / self.kept


def scaled(by):
    def scale(*given):
        by["factor"] *= 0.9

    return scale


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("late", "kept"),
        ("named", "loss.temperature"),
        ("scheduler", "schedule.lr_lambdas"),
        ("in a scheduler", "schedule.0.lr_lambdas"),
        ("optimizer", "optimizer 0._optimizer_step_pre_hooks"),
        ("hook", "_forward_hooks"),
    ],
)
def test_what_changes_beside_all_states_is_told_wherever_it_is(tmp_path, place, name):
    model, loss, by = (Lazy if place == "late" else nn.Linear)(5, 5), Annealed(), {"factor": 1.0}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: by["factor"])
    named = {"loss": loss} if place == "named" else {}
    if place == "scheduler":
        named["schedule"] = schedule
    elif place == "in a scheduler":
        named["schedule"] = torch.optim.lr_scheduler.ChainedScheduler([schedule])
    elif place == "optimizer":
        optimizer.register_step_pre_hook(scaled(by))
    elif place == "hook":
        model.register_forward_hook(scaled(by))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = grouped(every=1, scheme="lossless", busy="wait", **named)
        with Checkpointer(str(tmp_path), model, optimizer, **given) as checkpointer:
            for step in range(4):
                loss(model(torch.ones(2, 5))).sum().backward()
                optimizer.step()
                scaled(by)()
                checkpointer.step(step + 1)
    said = [
        str(each.message).split(",")[0] for each in caught if "which training changes" in str(each.message)
    ]
    assert said == [f"no state of the model has {name}"]


class Forgetful:
    """Gives a state, and takes half of it."""

    def __init__(self):
        self.level, self.best = 0, [0]

    def state_dict(self):
        return {"level": self.level, "best": self.best}

    def load_state_dict(self, state):
        self.level = state["level"]


@pytest.mark.parametrize("grown", [False, True])
def test_what_an_object_has_not_taken_is_told(tmp_path, grown):
    def made():
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    model, optimizer, schedule = made()
    given = Forgetful()
    if grown:
        optimizer.add_param_group({"params": [*model[1].parameters()], "initial_lr": 0.1})
        schedule.base_lrs.append(0.1)
        schedule.lr_lambdas.append(lambda step: 0.8**step)
    else:
        given.level, given.best = 3, [1]
    with Checkpointer(str(tmp_path), model, optimizer, schedule=schedule, given=given) as checkpointer:
        checkpointer.save(1, wait=True)
    model, optimizer, schedule = made()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Checkpointer(str(tmp_path), model, optimizer, schedule=schedule, given=Forgetful()).resume()
    said = [
        str(each.message).split(",")[:2] for each in caught if "has not the checkpoint's" in str(each.message)
    ]
    wanted = ["resume: schedule", " a LambdaLR"] if grown else ["resume: given", " a Forgetful"]
    assert said == [wanted]


def test_a_metric_that_is_given_by_name_goes_on(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")

    def made():
        model, metric = nn.Linear(5, 1), torchmetrics.MeanMetric()
        return Checkpointer(
            str(tmp_path), model, torch.optim.SGD(model.parameters(), 0.1), metric=metric
        ), metric

    checkpointer, metric = made()
    metric.update(torch.tensor(3.0))
    checkpointer.save(1, wait=True)
    checkpointer.close()
    again, other = made()
    again.resume()
    assert other.compute() == 3


def test_an_optimizer_that_was_not_given_is_told(tmp_path):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))
    one, other, given = (torch.optim.Adam(part.parameters(), 0.01) for part in model)
    with Checkpointer(str(tmp_path), model, one, other=other, **grouped(scheme="lossless")) as checkpointer:
        checkpointer.resume()
        model(torch.ones(2, 5)).sum().backward()
        for optimizer in (one, other, given):
            optimizer.step()
        checkpointer.step(1)
        with pytest.warns(ShrinkpointWarning, match=r"no optimizer here trains 2\.weight, 2\.bias, and"):
            checkpointer.save(1, wait=True)


def test_optimizers_that_step_in_the_backward_pass_and_were_not_given_are_told(tmp_path):
    model = nn.Linear(5, 1)
    for parameter in model.parameters():
        optimizer = torch.optim.Adam([parameter], 0.01)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with Checkpointer(str(tmp_path), model, [], **grouped(scheme="lossless")) as checkpointer:
        model(torch.ones(2, 5)).sum().backward()
        with pytest.warns(ShrinkpointWarning, match="no optimizer here trains weight, bias, and"):
            checkpointer.save(1, wait=True)


@pytest.mark.parametrize(("given", "enabled"), [(True, True), (False, True), (False, False)])
def test_a_gradient_scaler_that_scales_and_was_not_given_is_told(tmp_path, given, enabled, recwarn):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    objects = {"scaler": scaler} if given else {}
    with Checkpointer(str(tmp_path), model, optimizer, scheme="lossless", **objects) as checkpointer:
        scaler.scale(model(torch.ones(2, 5)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        checkpointer.save(1, wait=True)
    told = any("GradScaler that was not given" in str(one.message) for one in recwarn)
    assert told == (enabled and not given)


def test_a_scheduler_that_was_not_given_is_told(tmp_path):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with Checkpointer(str(tmp_path / "given"), model, optimizer, schedule=schedule) as checkpointer:
        checkpointer.save(1, wait=True)
    with (
        Checkpointer(str(tmp_path / "not"), model, optimizer) as checkpointer,
        pytest.warns(ShrinkpointWarning, match="scheduler that was not given to the Checkpointer"),
    ):
        checkpointer.save(1, wait=True)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("saved", [1, 2, 5, 6, 7])
def test_accumulated_gradients_go_on(tmp_path, saved, zeros):
    def train(until, url=None):
        torch.manual_seed(0 if url is None or until == saved else 1)
        model = nn.Linear(5, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        given = grouped(every=1, scheme="lossless", busy="wait")
        checkpointer = None if url is None else Checkpointer(str(url), model, optimizer, **given)
        for step in range(0 if checkpointer is None else checkpointer.resume(), until):
            model(torch.randn(2, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=zeros)
            if checkpointer is not None:
                checkpointer.step(step + 1)
        if checkpointer is not None:
            checkpointer.close()
        return [value.clone() for value in model.state_dict().values()]

    train(saved, tmp_path)
    assert equal(train(9, tmp_path), train(9))
    has = "gradients" in shrinkpoint.load(f"{tmp_path}#step={saved}")
    assert has == (saved % 4 != 0)


def test_gradients_that_a_step_has_used_are_not_saved(tmp_path):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with Checkpointer(str(tmp_path), model, optimizer, **grouped(every=1, scheme="lossless")) as checkpointer:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        checkpointer.step(1)
    assert "gradients" not in shrinkpoint.load(str(tmp_path))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("saved", [5, 6])
def test_gradients_of_an_optimizer_whose_turn_comes_next_go_on(tmp_path, saved, zeros):
    def train(until, url=None):
        torch.manual_seed(0 if url is None or until == saved else 1)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
        optimizers = [torch.optim.Adam(part.parameters(), 0.01) for part in model]
        given = grouped(every=1, scheme="lossless", busy="wait")
        checkpointer = None if url is None else Checkpointer(str(url), model, optimizers, **given)
        for step in range(0 if checkpointer is None else checkpointer.resume(), until):
            model(torch.randn(2, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizers[step % 2].step()
            for optimizer in optimizers if step % 2 else ():
                optimizer.zero_grad(set_to_none=not zeros)
            if checkpointer is not None:
                checkpointer.step(step + 1)
        if checkpointer is not None:
            checkpointer.close()
        return [value.clone() for value in model.state_dict().values()]

    train(saved, tmp_path)
    assert equal(train(9, tmp_path), train(9))
    assert len(shrinkpoint.load(f"{tmp_path}#step={saved}").get("gradients", {})) == saved % 2 * 2


def test_gradients_that_a_generator_adds_to_used_ones_are_not_saved(tmp_path):
    made, judge = nn.Linear(5, 4), nn.Linear(4, 1)
    model, first = nn.ModuleList([made, judge]), torch.optim.Adam(judge.parameters(), 0.01)
    second = torch.optim.Adam(made.parameters(), 0.01)
    given = grouped(every=1, scheme="lossless", busy="wait")
    with Checkpointer(str(tmp_path), model, [first, second], **given) as checkpointer:
        for step in range(3):
            for optimizer in (first, second):
                optimizer.zero_grad()
                judge(made(torch.ones(2, 5))).sum().backward()
                optimizer.step()
            checkpointer.step(step + 1)
    assert "gradients" not in shrinkpoint.load(str(tmp_path))


def test_an_optimizer_that_another_one_has_replaced_is_told(tmp_path):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    checkpointer = Checkpointer(
        str(tmp_path), model, optimizer, **grouped(every=1, scheme="lossless", busy="wait")
    )
    for step in range(2):
        optimizer.step()
        checkpointer.step(step + 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with pytest.warns(ShrinkpointWarning, match="given to the Checkpointer has made no step"):
        checkpointer.step(3)
    checkpointer.close()


def test_frozen_scripts_and_feeders_of_data_are_no_hindrance(tmp_path):
    class Feeder:
        dataset, state = [1, 2], 0

        def state_dict(self):
            return {"state": self.state}

        def load_state_dict(self, state):
            self.state = state["state"]

    script = torch.jit.freeze(torch.jit.script(nn.Linear(5, 5).eval()))
    model, feeder = nn.Sequential(script, nn.Linear(5, 1)), Feeder()
    optimizer = torch.optim.SGD(model[1].parameters(), 0.01)
    options = grouped(every=1, scheme="lossless", feeder=feeder)
    with Checkpointer(str(tmp_path), model, optimizer, **options) as checkpointer:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        feeder.state = 7
        checkpointer.step(1)
    feeder.state = 0
    model.eval()
    with Checkpointer(str(tmp_path), model, optimizer, **options) as checkpointer:
        assert checkpointer.resume() == 1
    assert feeder.state == 7
    assert not model.training  # as the script has set it: to test the model, say
