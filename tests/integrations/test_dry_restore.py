"""What could not be continued is refused after the first step, long before a save is due."""

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.options import grouped
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, Adam, lr_scheduler

import shrinkpoint
from shrinkpoint.errors import CannotRepresentError, StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore")
INPUTS = torch.linspace(-1, 1, 24).view(8, 3)
NEVER = 1000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(torch.tanh(self.one(x)))


class Both:
    """Two optimizers as one, whose state is in no form of torch's."""

    def __init__(self, model: Net) -> None:
        self.inner = [Adam(model.one.parameters(), 0.01), SGD(model.two.parameters(), 0.1, momentum=0.9)]

    @property
    def param_groups(self) -> Any:
        return [group for one in self.inner for group in one.param_groups]

    def zero_grad(self) -> None:
        for one in self.inner:
            one.zero_grad()

    def step(self) -> None:
        for one in self.inner:
            one.step()

    def state_dict(self) -> Any:
        return [one.state_dict() for one in self.inner]

    def load_state_dict(self, state: Any) -> None:
        for one, part in zip(self.inner, state, strict=True):
            one.load_state_dict(part)


class Hidden(torch.optim.Optimizer):
    """As the SAM that is in use: its state is not the inner optimizer's."""

    def __init__(self, model: Net) -> None:
        super().__init__(model.parameters(), {})
        self.base_optimizer = SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base_optimizer.step()


class ByTensor(SGD):
    def state_dict(self) -> Any:
        return super().state_dict() | {"seen": dict.fromkeys(self.param_groups[0]["params"], 1)}


class Later(ByTensor):
    def state_dict(self) -> Any:
        return super().state_dict() if len(self.param_groups) > 1 else SGD.state_dict(self)


class OneWay(SGD):
    def state_dict(self) -> Any:
        return {"mine": super().state_dict()}


def lookahead(model: Net) -> Any:
    optimizers = pytest.importorskip("pytorch_optimizer")
    return optimizers.Lookahead(Adam(model.parameters(), 0.01), k=2)


def schedule_free(model: Net) -> Any:
    optimizers = pytest.importorskip("schedulefree")
    return optimizers.ScheduleFreeWrapper(SGD(model.parameters(), 0.01), momentum=0.9)


def trained(url: Path, model: Net, optimizer: Any, steps: int, every: int, **more: Any) -> Net:
    with shrinkpoint.Checkpointer(
        str(url), model, optimizer, **grouped(every=every, scheme="lossless", busy="wait", **more)
    ) as checkpointer:
        if hasattr(optimizer, "train"):
            optimizer.train()
        for step in range(checkpointer.resume(), steps):
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()
            checkpointer.step(step + 1)
    return model


def test_a_structure_that_changes_is_tried_again_at_the_next_step(tmp_path: Path) -> None:
    model = Net()
    optimizer = Later(model.one.parameters(), 0.1)
    checkpointer = shrinkpoint.Checkpointer(
        str(tmp_path), model, optimizer, **grouped(every=NEVER, scheme="lossless")
    )
    checkpointer.resume()
    for step in (1, 2):
        model(INPUTS).square().mean().backward()
        optimizer.step()
        checkpointer.step(step)
    optimizer.add_param_group({"params": model.two.parameters()})
    with pytest.raises(CannotRepresentError, match="seen"):
        checkpointer.step(3)
    checkpointer.saver.close()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def zero(model: Net) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [Both, lookahead, schedule_free, zero])
def test_optimizers_of_other_forms_are_continued(tmp_path: Path, make: Any) -> None:
    for url, steps in (("run", 3), ("run", 6), ("whole", 6)):
        model = Net()
        trained(tmp_path / url, model, make(model), steps, every=3)
    run, whole = (shrinkpoint.load_weights(str(tmp_path / url)) for url in ("run", "whole"))
    assert all(torch.equal(run[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("kind", "make", "match"),
    [
        (Net, Hidden, "Hidden has an optimizer inside, a SGD, whose state is not in"),
        (
            Net,
            lambda model: ByTensor(model.parameters(), 0.1),
            "optimizers/0/seen is a dict whose keys are tensors",
        ),
        (Net, lambda model: OneWay(model.parameters(), 0.1), "OneWay.load_state_dict.* does not take"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path: Path, kind: Any, make: Any, match: str) -> None:
    model = kind()
    with pytest.raises((CannotRepresentError, StateMismatchError), match=match):
        trained(tmp_path / "run", model, make(model), 1, every=NEVER)


class Odd:
    def __init__(self) -> None:
        self.value: object = object()
        self.loads = 0

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.loads += 1


def test_an_object_that_cannot_be_stored(tmp_path: Path) -> None:
    model, odd = Net(), Odd()
    options: dict[str, Any] = {"every": NEVER, "odd": odd}
    with pytest.raises(CannotRepresentError, match=r"stateful/odd/value is a builtins.object"):
        trained(tmp_path / "run", model, SGD(model.parameters(), 0.1), 1, **options)


class Quantized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Quantized, r"model/frozen.0._packed_params.dtype is torch.qint8.*before torch.ao quantizes it"),
        (lambda: Net().to("meta"), r"model/one.weight is a meta tensor.*ParameterDict, that has them"),
    ],
)
def test_models_without_values_of_their_own(tmp_path: Path, make: Any, match: str) -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], 0.1)
    checkpointer = shrinkpoint.Checkpointer(str(tmp_path), make(), optimizer, every=NEVER)
    with pytest.raises(CannotRepresentError, match=match), checkpointer:
        checkpointer.step(1)


class Tracker:
    """Its state has another name for what it loads."""

    def __init__(self, key: str = "best", **shared: Any) -> None:
        self.best, self.key, self.shared = torch.ones(2), key, shared

    def state_dict(self) -> Any:
        return {"best": self.best}

    def load_state_dict(self, state: Any) -> None:
        self.shared["loaded"] = True
        self.best = state[self.key]


def test_an_object_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), 0.1)
    with pytest.raises(StateMismatchError, match=r"tracker: .*Tracker.load_state_dict.*KeyError: 'other'"):
        trained(tmp_path / "run", model, optimizer, 1, every=NEVER, tracker=Tracker("other"))
    # one with parts that have no copies, and might be changed, is not tried
    shared = Tracker("other", lock=threading.Lock())
    trained(tmp_path / "late", model, optimizer, 2, every=2, tracker=shared)
    assert "loaded" not in shared.shared
    with pytest.raises(
        StateMismatchError, match=r"tracker: .*Tracker.load_state_dict.*KeyError.*begin again"
    ):
        trained(tmp_path / "late", model, optimizer, 3, every=2, tracker=shared)


class Broken(Tracker):
    def state_dict(self) -> Any:
        raise ValueError("no")


def test_an_object_without_a_state_is_named(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(CannotRepresentError, match=r"the state of the .*Broken cannot.* ValueError: no"):
        trained(tmp_path, model, SGD(model.parameters(), 0.1), 1, every=NEVER, broken=Broken())


def schedulers(optimizer: Any) -> dict[str, Any]:
    return {
        "each": lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.MultiStepLR(optimizer, [1]), lr_scheduler.LambdaLR(optimizer, Rising())],
            [2],
        ),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer),
        "scaler": torch.amp.GradScaler("cpu"),
    }


class Rising:
    def __init__(self) -> None:
        self.seen = [0]

    def __call__(self, epoch: int) -> float:
        return 1.0 + epoch


class ByData(Tracker):
    """Puts another tensor into its own, which one without elements does not take."""

    def load_state_dict(self, state: Any) -> None:
        self.best.data = state["best"]


def test_objects_that_take_their_state_are_as_before(tmp_path: Path) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), 0.1)
    objects = schedulers(optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    given = objects["each"]._schedulers[1].lr_lambdas[0]
    seen = given.seen
    trained(tmp_path, model, optimizer, 1, every=NEVER, average=average, own=ByData(), **objects)
    assert given.seen is seen
    assert not next(average.parameters()).is_meta
    assert objects["each"]._schedulers[1].optimizer is optimizer


def test_nothing_is_changed(tmp_path: Path) -> None:
    model, odd = Net().eval(), Odd()
    odd.value = 1
    optimizer = Both(model)
    before = torch.get_rng_state()
    state = copy.deepcopy(optimizer.state_dict())
    with shrinkpoint.Checkpointer(str(tmp_path), model, optimizer, every=NEVER, odd=odd) as checkpointer:
        checkpointer.step(1)
    assert torch.equal(before, torch.get_rng_state())
    assert not model.training
    assert odd.loads == 0
    assert all(p.grad is None and not p.is_meta for p in model.parameters())
    assert str(state) == str(optimizer.state_dict())
    assert optimizer.inner[0].param_groups[0]["params"][0] is model.one.weight
