"""What other libraries bring to a Composer training: weights that bitsandbytes has quantized, models and optimizers with states of their own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("composer")

from composer.core import Event, State
from support import composer_models
from support.composer_callbacks import At, Make, first
from support.composer_models import Crash, Setup, Tiny, assert_continues, fit

from shrinkpoint.errors import CannotRepresentError, ConfigError, StateMismatchError

SETUP = Setup(width=64, duration="2ep", eval_interval=None)


def begin(state: State) -> None:
    """What scripts with schedule-free optimizers do."""
    for optimizer in state.optimizers:
        optimizer.trains = True


def require_continued(saving: Make) -> None:
    """A run that crashes and goes on in a model of another seed is the undisturbed one bit by bit."""
    whole = fit(At(Event.FIT_START, begin), setup=SETUP)
    fit(saving(), At(Event.FIT_START, begin), Crash(7), setup=SETUP)
    rest = fit(saving(), At(Event.FIT_START, begin), setup=SETUP, seed=9)
    assert first(rest) == 5
    assert_continues(whole, rest)


# ---- models


class Renaming(Tiny):
    """Its state has other names than its parameters."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._register_state_dict_hook(self._renamed)
        self.register_load_state_dict_pre_hook(self._named)

    @staticmethod
    def _renamed(module: Any, state: Any, prefix: str, local: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}net.4.")]:
            state[name.replace("net.4.", "head.")] = state.pop(name)

    @staticmethod
    def _named(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}head.")]:
            state[name.replace("head.", "net.4.")] = state.pop(name)


def test_a_model_whose_state_has_other_names_is_resumed_bit_by_bit(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composer_models, "Tiny", Renaming)
    require_continued(saving)


# ---- optimizers


class Careful(torch.optim.SGD):
    """Refuses to step before its ``train()``, as schedule-free optimizers do, and scales weights at each step, whatever the rate."""

    trains = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.trains:
            raise RuntimeError("call train() first")
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        return loss


class TwoSteps(torch.optim.SGD):
    """Begins with the gradients that are there, and goes on with those of the closure."""

    def first_step(self) -> None:
        super().step()

    def second_step(self) -> None:
        super().step()

    def step(self, closure: Any = None) -> Any:
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


def test_steps_that_begin_with_the_last_batchs_gradients_are_refused(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(composer_models.OPTIMIZERS, "SGD", lambda parameters: [TwoSteps(parameters, 0.01)])
    with pytest.raises(ConfigError, match=r"TwoSteps.*of the batch before"):
        fit(saving(), setup=replace(SETUP, optimizer="SGD"))


class Slow(torch.optim.Optimizer):
    """Has another optimizer inside, whose state is a part of its own, and an object for each matrix."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.Adam(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups = self.inner.param_groups


@dataclass
class Projector:
    seen: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Forgetful:
    seen = 0


class Projected(torch.optim.Optimizer):
    """Keeps an object for each parameter, as GaLore does."""

    def __init__(self, params: Any, kind: type[Projector | Forgetful]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                projector = self.state[parameter].setdefault("projector", self.kind())
                projector.seen += 1
                parameter.sub_(group["lr"] * parameter.grad / projector.seen)
        return loss


@pytest.mark.parametrize(
    "make",
    [lambda p: Careful(p, lr=0.1, momentum=0.9), Slow, lambda p: Projected(p, Projector)],
    ids=["steps with conditions", "an optimizer inside", "objects"],
)
def test_other_optimizers_are_resumed_bit_by_bit(
    saving: Make, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    monkeypatch.setitem(composer_models.OPTIMIZERS, "Adam", lambda parameters: [make(parameters)])
    require_continued(saving)


def test_what_cannot_be_stored_of_an_optimizer_is_refused_at_the_first_step(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        return [Projected(parameters, Forgetful)]

    monkeypatch.setitem(composer_models.OPTIMIZERS, "Adam", make)
    with pytest.raises(CannotRepresentError, match=r"projector is a .*Forgetful.*load_state_dict"):
        fit(saving(), Crash(2), setup=SETUP)


def test_parameters_in_other_groups_are_refused_and_in_another_order_are_found(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grouped(order: Callable[[list[Any]], list[Any]]) -> None:
        def make(parameters: Any) -> list[torch.optim.Optimizer]:
            given = order(list(parameters))
            return [torch.optim.Adam([{"params": given[:3]}, {"params": given[3:], "lr": 0.01}], 0.02)]

        monkeypatch.setitem(composer_models.OPTIMIZERS, "Adam", make)

    grouped(lambda given: given)
    whole = fit(setup=SETUP)
    fit(saving(), Crash(7), setup=SETUP)
    grouped(lambda given: [given[3], *given[1:3], given[0], *given[4:]])
    with pytest.raises(StateMismatchError, match="parameters in another order, or others"):
        fit(saving(), setup=SETUP, seed=9)
    grouped(lambda given: [given[2], *given[:2], *given[3:]])
    rest = fit(saving(), setup=SETUP, seed=9)
    assert rest.trace == whole.trace[5:]


def test_parameters_that_were_added_to_the_optimizer_are_added_again(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam([*parameters][:-1], 0.02)]

    def add(state: State) -> None:
        if int(state.timestamp.batch) == 1:
            state.optimizers[0].add_param_group({"params": [[*state.model.parameters()][-1]], "lr": 0.01})

    monkeypatch.setitem(composer_models.OPTIMIZERS, "Adam", make)
    setup = replace(SETUP, scheduler="none")
    whole = fit(At(Event.BATCH_START, add), setup=setup)
    fit(saving(), At(Event.BATCH_START, add), Crash(7), setup=setup)
    rest = fit(saving(), At(Event.BATCH_START, add), setup=setup, seed=9)
    assert first(rest) == 5
    assert_continues(whole, rest)
