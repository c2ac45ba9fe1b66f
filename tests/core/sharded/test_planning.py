"""One plan for all ranks, which are threads here: the first one chooses, by what all of them have."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import support.baseline_schemes  # noqa: F401 - for a scheme of theirs
import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.ranks import Ranks
from shrinkpoint.errors import StoreError
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.optimizers.updates import OptimizerKind, Updates
from shrinkpoint.quality.evaluation import EvaluationUnavailableError
from shrinkpoint.quality.guards import Verdict
from shrinkpoint.quality.plan import Plan
from shrinkpoint.quality.planner import Planner
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.inshrinkerator.partition import added_scores
from shrinkpoint.schemes.inshrinkerator.scheme import weights_of
from shrinkpoint.state.training import LayerType, Role, Tag, TensorSpec, TrainingState

CONFIG = SaverConfig(scheme="uniform", options={"bits": 8}, commit_timeout_s=5)


class Messages(Mailbox):
    """A mailbox of threads."""

    def __init__(self, kept: dict[str, Any], rank: int, size: int) -> None:
        self._kept, self.rank, self.size = kept, rank, size

    def post(self, key: str, value: Mapping[str, Any]) -> None:
        self._kept[key] = json.dumps(value)

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while key not in self._kept:
            if time.monotonic() > deadline:
                raise StoreError(f"{key} was not there in time")
            time.sleep(0.001)
        return dict(json.loads(self._kept[key]))


class Losses:
    """Losses of all threads' weights: the squares of how far these are from the true ones."""

    def __init__(self, world: int, true: Mapping[str, torch.Tensor], steepness: float) -> None:
        self._barrier = threading.Barrier(world, timeout=10)
        self._parts: dict[int, float] = {}
        self._true, self._steepness = true, steepness
        self.seen: list[float] = []

    def measure(self, rank: int, weights: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        self._parts[rank] = sum(
            float((value - self._true[name]).square().nansum()) for name, value in weights.items()
        )
        self._barrier.wait()
        loss = 1.0 + self._steepness * sum(self._parts.values())
        if rank == 0:
            self.seen.append(loss)
        self._barrier.wait()
        return (loss, loss)


class Refusing:
    """A guard that gives one answer."""

    kinds: Sequence[OptimizerKind] = ()

    def __init__(self, reason: str | None) -> None:
        self._reason = reason

    def __call__(self, save_context: SaveContext, scheme: Scheme) -> Verdict:
        updates = Updates(error=0.0, length=1.0, lost_steps=0.0)
        return Verdict(self._reason, updates=updates)


def context(rank: int, *, broken: bool = False) -> SaveContext:
    """A rank's own part: one matrix."""
    name = f"w{rank}"
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(rank))
    if broken:
        tensor[0, 0] = float("nan")
    tag = Tag(role=Role.WEIGHT, layer_type=LayerType.LINEAR, parameter=name)
    spec = TensorSpec(name=name, dtype=tensor.dtype, shape=(64, 64), tag=tag)
    return SaveContext(state=TrainingState(None, {name: tensor}, {name: spec}), step=1)


def planned(
    steepness: float,
    *,
    refuses: int | None = None,
    action: Callable[[int], None] = lambda rank: None,
    broken: int | None = None,
    config: SaverConfig = CONFIG,
    prepare: Callable[[int, Planner], None] = lambda rank, planner: None,
    measures: bool = True,
) -> list[Any]:
    """What each rank has planned, or its error; and the losses that were measured.

    Args:
        steepness: of the loss.
        refuses: a rank whose guard refuses.
        action: of a rank before it makes its part.
        broken: a rank with a weight that is no number.
        config: of all ranks.
        prepare: gets a rank's planner before it plans.
        measures: whether there is a loss.
    """
    world, kept = 2, {}
    contexts = [context(rank, broken=rank == broken) for rank in range(world)]
    if config.scheme == "inshrinkerator":
        own = [weights_of(one, config.scheme_options).sketches.to_json() for one in contexts]
        scores = added_scores(own)
        contexts = [replace(one, scores=scores) for one in contexts]
    true = {name: tensor for one in contexts for name, tensor in one.state.tensors.items()}
    losses = Losses(world, true, steepness)
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        planner = Planner(config, lambda: 0.0, clock=lambda: 0.0, warns=False)
        prepare(rank, planner)
        guard: Any = Refusing(f"rank {rank} refuses" if rank == refuses else None)
        messages = Messages(kept, rank, world)
        ranks = Ranks(messages, config, bool, lambda number: [], lambda state: state)  # type: ignore[arg-type]
        ranks.connect(messages, "")

        def measure(weights: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
            action(rank)
            return losses.measure(rank, weights)

        try:
            way, given = SimpleNamespace(exact=False), measure if measures else None
            job: Any = SimpleNamespace(way=way, measure=given, resume=None)
            found[rank] = ranks.plan(planner, contexts[rank], job, guard)
        except Exception as error:  # noqa: BLE001 - compared
            ranks.fail(error)
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return [*found, losses.seen]


def test_the_losses_are_those_of_all_parts() -> None:
    first, second, seen = planned(1e-9)
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert (first.measured, first.configuration, second.configuration) == ("measured", "as given", "as given")
    assert first.scheme.describe() == second.scheme.describe()
    assert first.reason == second.reason
    true, noise, plus, minus = seen
    assert true == 1.0
    assert noise > plus > 1.0
    assert plus == pytest.approx(minus)
    assert first.rise is not None
    assert first.rise.mean == pytest.approx(plus / 2 + minus / 2 - 1)
    assert first.rise.distance**2 == pytest.approx((plus - 1) / 1e-9, rel=1e-3)


def test_all_ranks_take_the_scale_that_was_chosen() -> None:
    config = SaverConfig(scheme="auto", commit_timeout_s=5)
    first, second, seen = planned(1e-4, config=config)
    assert first.measured == "measured"
    assert len(seen) >= 4
    assert isinstance(first.scheme, Auto)
    assert first.scheme.scale is not None
    assert first.scheme.describe() == second.scheme.describe()
    assert second.configuration == first.configuration


@pytest.mark.parametrize("steepness", [1e-8, 3e-7, 1e-6])
def test_the_search_of_inshrinkerator_is_that_of_one_process(steepness: float) -> None:
    """The same thresholds from the sketches of all, the same order of sizes, and so the same candidates and choice."""
    config = SaverConfig(scheme="inshrinkerator", commit_timeout_s=5, search_overhead=math.inf)
    first, second, seen = planned(steepness, config=config)
    assert first.measured == "measured"
    assert first.scheme.describe() == second.scheme.describe()
    assert second.configuration == first.configuration

    parts = [context(rank).state for rank in range(2)]
    whole = TrainingState(
        None,
        {name: tensor for part in parts for name, tensor in part.tensors.items()},
        {name: spec for part in parts for name, spec in part.specs.items()},
    )
    losses = Losses(1, whole.tensors, steepness)
    planner = Planner(config, lambda: 0.0, warns=False)
    alone = planner.plan(SaveContext(state=whole, step=1), lambda weights: losses.measure(0, weights))
    assert alone.configuration == first.configuration
    noise = 1  # is drawn for each rank
    assert losses.seen[:noise] + losses.seen[noise + 1 :] == pytest.approx(seen[:noise] + seen[noise + 1 :])
    for name, tensor in whole.tensors.items():
        plan = first if name in parts[0].tensors else second
        restored = plan.scheme.weights.restored(plan.scheme.configuration)[name]
        assert torch.equal(restored, alone.scheme.weights.restored(alone.scheme.configuration)[name])
        assert not torch.equal(restored, tensor)


def test_what_breaks_the_bound_is_exact_on_all() -> None:
    first, second, seen = planned(1.0)
    assert len(seen) == 4
    assert first.is_exact
    assert second.is_exact
    assert "stored exactly" in second.reason


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_guard_that_refuses_does_so_for_all(rank: int, measures: bool) -> None:
    first, second, _ = planned(1e-9, refuses=rank, measures=measures)
    assert first.is_exact
    assert second.is_exact
    assert second.reason == f"rank {rank} refuses: stored exactly"


def test_one_rank_without_finite_weights_is_no_reason_for_the_others() -> None:
    first, second, _ = planned(1e-9, broken=0)
    assert not first.is_exact
    assert not second.is_exact


def test_a_rank_that_fails_fails_the_save_on_all() -> None:
    def refuse(self: Any, *arguments: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    def prepare(rank: int, planner: Planner) -> None:
        if rank == 1:
            planner.plan = refuse  # type: ignore[method-assign]

    first, second, _ = planned(1e-9, prepare=prepare)
    assert isinstance(first, StoreError)
    assert "on rank 1: no room" in str(first)
    assert isinstance(second, MemoryError)


def test_evaluations_that_cannot_be_had_store_exactly() -> None:
    def leave(rank: int) -> None:
        raise EvaluationUnavailableError("training has ended")

    first, second, seen = planned(1e-9, action=leave)
    assert first.is_exact
    assert second.is_exact
    assert "could not be measured" in second.reason
    assert not seen


def test_one_rank_that_cannot_measure_stores_exactly_on_all() -> None:
    def leave(rank: int) -> None:
        if rank == 1:
            raise EvaluationUnavailableError("training has ended")
        time.sleep(0.2)
        raise EvaluationUnavailableError("another rank does not plan this save any more")

    first, second, _ = planned(1e-9, action=leave)
    assert first.is_exact
    assert second.is_exact


def test_planners_that_have_come_apart_go_on_together() -> None:
    """As after a save that failed on one rank alone."""

    def prepare(rank: int, planner: Planner) -> None:
        if rank == 1:
            state = planner.state_dict()
            planner.load_state_dict({**state, "baseline": [1, 2.0], "restores": None})

    planners: list[Planner] = []
    first, second, _ = planned(
        1e-9, prepare=lambda rank, planner: (prepare(rank, planner), planners.append(planner))[0]
    )
    assert not first.is_exact
    assert first.reason == second.reason
    states = [planner.state_dict() for planner in planners]
    assert states[0] == states[1]
