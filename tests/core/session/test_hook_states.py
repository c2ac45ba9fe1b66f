"""The states of DDP's communication hooks: what is found, what is stored, and what is refused. Several processes:
tests/callbacks/test_lightning_ddp.py."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.constant import Constant
from support.options import grouped
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from shrinkpoint.errors import ConfigError
from shrinkpoint.session.ddp import HookStates, hidden_state, restore_hook_states
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.state.training import TrainingState


def session(scheme: str, **given: Any) -> TrainingSession:
    settings = RunSettings.build(url="memory://hooks/run", scheme=scheme, **grouped(**given))
    return TrainingSession(settings, Constant())


def check_hooks(run: TrainingSession, model: nn.Module) -> None:
    log = run.settings.step_log
    run.warn_once(run.hooks.left_out(model, exact_log=log is not None and log.kind == "exact"))


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """Trained by one process with DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()


def told_of(run: TrainingSession, model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_hooks(run, model)
        check_hooks(run, model)
    return [str(warning.message) for warning in told]


def hook(state, bucket): ...  # unannotated: DDP wants its own types


def test_the_state_of_a_communication_hook_is_missed_once(model: Any) -> None:
    assert told_of(session("auto"), model) == []
    model.register_comm_hook(power.PowerSGDState(None), hook)
    [message] = told_of(session("auto"), model)
    assert "PowerSGDState" in message
    assert "With scheme='lossless' it is stored" in message
    assert told_of(session("lossless"), model) == []


def test_a_hook_that_hides_its_state(model: Any, tmp_path: Path) -> None:
    errors: dict[int, torch.Tensor] = {}

    def feeding_back(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        errors.clear()

    model.register_comm_hook(None, feeding_back)
    [message] = told_of(session("lossless"), model)
    assert re.search(r"feeding_back keeps a state of its own \('errors', a dict\)", message)
    logs = session("lossless", step_log="exact", log_url=f"{tmp_path}/log")
    with pytest.raises(ConfigError, match=r"step_log='exact' cannot continue .*feeding_back keeps a state"):
        check_hooks(logs, model)


class Called:
    def __call__(self, state: object, bucket: object) -> None: ...

    def method(self, state: object, bucket: object) -> None: ...


def scaled(state: object, bucket: object, by: object) -> None: ...


def around(inner: Any) -> Any:
    return lambda state, bucket: inner(state, bucket)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (Called(), "its object, a Called"),
        (Called().method, "its object, a Called"),
        (partial(scaled, by={}), "argument, a dict"),
        (around(Called()), "its object, a Called"),
        (around(around(partial(scaled, by=[]))), "argument, a list"),
        (partial(scaled, by=0.5), None),
        (around(around(hook)), None),
        (hook, None),
    ],
)
def test_what_a_hook_keeps(given: Any, found: str | None, model: Any) -> None:
    model._comm_hooks[:] = [(given, None)]
    told = hidden_state(model)
    assert told is None if found is None else found in told.replace("'", "")


def test_a_state_that_cannot_be_stored(model: Any, tmp_path: Path) -> None:
    model.register_comm_hook({"errors": [torch.ones(2), iter([])]}, hook)
    logs = session("lossless", step_log="exact", log_url=f"{tmp_path}/log")
    with pytest.raises(ConfigError, match=r"a dict, errors/1 is a builtins.list_iterator: it cannot"):
        check_hooks(logs, model)


class Counted:
    """A state with slots, generators, settings and containers."""

    __slots__ = ("count", "errors", "function", "group", "order", "random", "torch_random")

    def __init__(self, seed: int) -> None:
        self.count, self.group, self.function = seed, None, len
        self.errors: Any = defaultdict(list, {seed: [torch.full((3,), float(seed))]})
        self.order = (seed, "x")
        self.random = np.random.RandomState(seed)
        self.torch_random = torch.Generator().manual_seed(seed)

    def drawn(self) -> tuple[float, float]:
        return float(self.random.rand()), float(torch.rand(1, generator=self.torch_random))


class Own:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def stored(model: nn.Module) -> Any:
    """As a checkpoint or a log gives it back."""
    return TrainingState.capture(HookStates(wanted=True).capture(model)).to_object()


def test_an_object_s_values_are_stored(model: Any) -> None:
    state = Counted(1)
    model.register_comm_hook(state, hook)
    state.drawn()
    kept = stored(model)
    drawn = state.drawn()
    other = Counted(2)
    model._comm_hooks[:] = [(hook, other)]
    restore_hook_states(model, kept)
    assert (other.count, other.order, other.function) == (1, (1, "x"), len)
    assert other.errors.keys() == {1}
    assert other.errors[7] == []  # a defaultdict stays one
    assert torch.equal(other.errors[1][0], torch.ones(3))
    assert other.drawn() == drawn


def test_a_dict_and_an_object_that_stores_itself(model: Any) -> None:
    model._comm_hooks[:] = [(hook, {0: torch.ones(2), "kept": len}), (hook, Own(3))]
    kept = stored(model)
    items, own = {1: torch.zeros(1), "kept": max}, Own(4)
    model._comm_hooks[:] = [(hook, items), (hook, own)]
    restore_hook_states(model, kept)
    assert items.keys() == {0, "kept"}
    assert items["kept"] is max  # a setting of the program's
    assert torch.equal(items[0], torch.ones(2))  # type: ignore[arg-type]
    assert own.value == 3


def test_the_bytes_are_counted(model: Any) -> None:
    model.register_comm_hook({0: torch.ones(5), "more": [torch.ones(3)]}, hook)
    states = HookStates(wanted=True)
    states.capture(model)
    assert states.nbytes == 32
    assert HookStates(wanted=False).capture(model) == []


def test_another_hook_starts_afresh_with_a_warning(model: Any) -> None:
    model.register_comm_hook({0: torch.ones(2)}, hook)
    kept = stored(model)
    own = Own(4)
    model._comm_hooks[:] = [(hook, own)]
    with pytest.warns(UserWarning, match=r"has the states .*\['dict'\], and this training has \['Own'\]"):
        restore_hook_states(model, kept)
    assert own.value == 4


def test_no_hook_of_a_plain_model() -> None:
    assert HookStates(wanted=True).capture(nn.Linear(2, 2)) == []
    restore_hook_states(nn.Linear(2, 2), [])
