"""The driver: verified choices, a kept budget, and a search that survives waiting and restarts."""

import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search_instances import NOT_FINITE, SMALL, random_problem, steep_size

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.inshrinkerator.search import ConfigurationChoice, ConfigurationSearch
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

SIZE = steep_size(SMALL)
COST = 2.0
TARGET = SMALL.at("sensitivity", (1, 1, 0, 0))


def holds_from(*targets: Configuration) -> Callable[[Configuration], float]:
    """Degradation within 1 % exactly for what is at least as mild as one of the targets."""
    return lambda c: 0.002 if any(SMALL.at_least_as_mild(c, t) for t in targets) else 0.5


class Training:
    """A trainer on a fake clock: training and evaluations take time, nothing else does."""

    def __init__(
        self, degradation: Callable[[Configuration], float], *, overhead: float, reprobe_every: int = 0
    ) -> None:
        self.now = 0.0
        self.degradation, self.overhead, self.reprobe_every = degradation, overhead, reprobe_every
        self.measured: list[Configuration] = []
        self.search = self.made()

    def made(self) -> ConfigurationSearch:
        return ConfigurationSearch(
            self.overhead, lambda: self.now, space=SMALL, reprobe_every=self.reprobe_every
        )

    def evaluate(self, configuration: Configuration) -> float:
        self.now += COST
        self.measured.append(configuration)
        return self.degradation(configuration)

    def save(self, seconds: float = 100.0) -> ConfigurationChoice:
        self.now += seconds
        self.measured = []
        return self.search.choose(SIZE, self.evaluate, 0.01)

    def restart(self) -> None:
        state = json.loads(json.dumps(self.search.state_dict(), allow_nan=False))
        self.search = self.made()
        self.search.load_state_dict(state)


def test_unlimited_overhead_searches_at_once() -> None:
    training = Training(holds_from(TARGET), overhead=math.inf)
    choice = training.save()
    assert choice.configuration == TARGET
    assert choice.finished == "exhaustive"
    assert len(training.measured) == len(set(training.measured))
    second = training.save()
    assert second.configuration == TARGET
    assert training.measured == [TARGET, *SMALL.twins(TARGET)]
    assert second.finished == "neighbourhood"


def test_no_overhead_makes_the_mandatory_evaluations_only() -> None:
    training = Training(holds_from(TARGET), overhead=0.0)
    for _ in range(5):
        choice = training.save()
        assert training.measured == [SMALL.mildest]
        assert choice.configuration == SMALL.mildest
        assert choice.finished is None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from([0.0, 0.005, 0.02, 0.1, math.inf]), st.data())
def test_every_choice_is_measured_on_its_own_save(seed: int, overhead: float, data: st.DataObject) -> None:
    """Degradations change from save to save at will; what is chosen is always within the bound at that save."""
    training = Training(lambda _: 0.0, overhead=overhead, reprobe_every=3)
    spent_on_search = 0.0
    for save in range(12):
        problem = random_problem(seed + save, SMALL)
        shift = data.draw(st.sampled_from([0.0, 0.0, 0.0, math.nan, 1.0]))
        training.degradation = lambda c, p=problem, s=shift: 0.01 + p.degradation[c] - p.bound + s
        choice = training.save(seconds=200.0)
        if choice.configuration is not None:
            assert choice.configuration in training.measured
            assert training.degradation(choice.configuration) <= 0.01
        spent_on_search += max(0, len(training.measured) - 4) * COST
        assert math.isinf(overhead) or spent_on_search <= overhead * 200.0 * (save + 1)
        if data.draw(st.booleans()):
            training.restart()


def test_only_what_evaluations_take_from_training_is_charged() -> None:
    """Beside the training an evaluation lasts 50 s, of which training stands still for 1 s."""
    now = cost = 0.0

    def evaluate(configuration: Configuration) -> float:
        nonlocal now, cost
        now += 50.0
        cost += 1.0
        return holds_from(TARGET)(configuration)

    search = ConfigurationSearch(0.02, lambda: now, lambda: cost, space=SMALL)
    saves = 0
    while True:
        saves += 1
        choice = search.choose(SIZE, evaluate, 0.01)
        state = search.state_dict()
        assert state["trained"] == now - cost
        # A search may be charged for what is then stored, which would have had to be measured in any case.
        assert cost - saves <= state["spent"] <= cost  # type: ignore[operator]
        assert state["spent"] <= 0.02 * state["trained"]  # type: ignore[operator]
        if choice.finished is not None:
            break
    assert choice.configuration == TARGET


def test_falls_to_verified_then_mildest_then_exact() -> None:
    training = Training(holds_from(TARGET), overhead=math.inf)
    training.save()
    verified = {
        c for c in SMALL.configurations if c in training.measured and SMALL.at_least_as_mild(c, TARGET)
    }
    training.overhead = 0.0
    training.restart()
    middle = min(verified - {TARGET, SMALL.mildest}, key=SIZE)

    training.degradation = holds_from(middle)
    assert training.save().configuration == middle
    assert training.measured == [TARGET, middle]

    training.degradation = holds_from(SMALL.mildest)
    choice = training.save()
    assert choice.configuration == SMALL.mildest
    assert training.measured == [TARGET, middle, SMALL.mildest]

    training.degradation = lambda _: 0.5
    choice = training.save()
    assert choice.configuration is None
    assert "stored exactly" in choice.reason
    assert len(training.measured) <= 4

    training.degradation = holds_from(TARGET)
    assert training.save().configuration == TARGET


def test_nothing_feasible_is_exact_until_the_reprobe() -> None:
    training = Training(lambda _: 0.5, overhead=math.inf, reprobe_every=3)
    first = training.save()
    assert first.configuration is None
    assert first.finished is not None
    for _ in range(2):
        assert training.save().finished is None
        assert not training.measured
    training.degradation = holds_from(TARGET)
    assert training.save().configuration == TARGET


@pytest.mark.parametrize("rise", NOT_FINITE)
def test_rises_that_are_not_finite_are_stored_exactly(rise: float) -> None:
    training = Training(lambda _: rise, overhead=math.inf)
    assert training.save().configuration is None
    training.degradation = holds_from(TARGET)
    training.restart()
    training.save()
    assert len(training.measured) <= 1  # until the next search is due


def test_restart_keeps_the_answers_of_a_search_under_way() -> None:
    training = Training(holds_from(TARGET), overhead=0.02)
    for _ in range(4):
        training.save()
    asked = training.search.state_dict()["answers"]
    assert isinstance(asked, list)
    assert asked
    training.restart()
    assert training.search.state_dict()["answers"] == asked
    known = {Configuration.from_json(c) for c, _ in asked}
    while (choice := training.save()).finished is None:
        assert known <= {Configuration.from_json(c) for c, _ in training.search.state_dict()["answers"]}  # type: ignore[attr-defined]
        assert choice.configuration in known | {SMALL.mildest} | set(training.measured)
    assert choice.configuration == TARGET


def test_restart_with_another_space_starts_over() -> None:
    training = Training(holds_from(TARGET), overhead=math.inf)
    training.save()
    search = ConfigurationSearch(0.01, lambda: 0.0, space=ConfigurationSpace(bins=(32, 64)))
    search.load_state_dict(training.search.state_dict())
    state = search.state_dict()
    assert (state["phase"], state["incumbent"]) == ("exhaustive", None)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"phase": "steady"},
        {"phase": "asleep"},
        {"incumbent": {}},
        {"verified": 3},
        {"answers": [1]},
        {"answers": [[{}, 0.0]]},
        {"trained": None},
    ],
)
def test_malformed_state_is_refused(change: dict[str, object]) -> None:
    search = ConfigurationSearch(0.01, lambda: 0.0)
    state = search.state_dict()
    with pytest.raises(ConfigError, match="start a new search"):
        search.load_state_dict({**state, **change})
    assert search.state_dict() == state


def test_error_of_an_evaluation_passes_and_the_next_save_goes_on() -> None:
    training = Training(holds_from(TARGET), overhead=math.inf)
    calls = 0

    def breaks(configuration: Configuration) -> float:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")
        return training.evaluate(configuration)

    with pytest.raises(RuntimeError, match="out of memory"):
        training.search.choose(SIZE, breaks, 0.01)
    assert training.save().configuration == TARGET
