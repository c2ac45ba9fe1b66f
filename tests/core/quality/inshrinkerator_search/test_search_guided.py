"""The exhaustive search finds the true optimum, or says that it may not have."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search_instances import NOT_FINITE, SMALL, harshness, random_problem, run, steep_size

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.inshrinkerator_search.guided import guided_exhaustive
from shrinkpoint.quality.inshrinkerator_search.outcome import significantly_lower
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

SPACE = ConfigurationSpace()
UNLIMITED = 10_000


@settings(max_examples=2500, deadline=None)
@given(st.integers(0, 2**63))
def test_exact_on_random_monotone_problems(seed: int) -> None:
    problem = random_problem(seed, SMALL)
    outcome = run(
        guided_exhaustive(SMALL, problem.size.__getitem__, problem.bound, max_evaluations=UNLIMITED),
        problem.degradation.__getitem__,
    )
    found = None if outcome.chosen is None else problem.size[outcome.chosen]
    assert found == problem.smallest
    measured = [e.configuration for e in outcome.evaluations]
    assert len(measured) == len(set(measured))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63))
def test_default_limit_suffices_in_the_full_space(seed: int) -> None:
    problem = random_problem(seed, SPACE)
    outcome = run(
        guided_exhaustive(SPACE, problem.size.__getitem__, problem.bound), problem.degradation.__getitem__
    )
    found = None if outcome.chosen is None else problem.size[outcome.chosen]
    assert len(outcome.evaluations) <= 45
    assert "limit" in outcome.reason or found == problem.smallest


def test_size_is_asked_once_per_configuration() -> None:
    asked: list[Configuration] = []

    def predict(c: Configuration) -> float:
        asked.append(c)
        return 1.0

    outcome = run(guided_exhaustive(SPACE, predict, 0.01), lambda _: 0.0)
    assert sorted(map(str, asked)) == sorted(map(str, SPACE.configurations))
    # All are equally large, so that only the mildest can be worth a measurement.
    assert [e.configuration for e in outcome.evaluations] == [SPACE.mildest]


@pytest.mark.parametrize("answer", [*NOT_FINITE, 0.02])
def test_nothing_feasible(answer: float) -> None:
    outcome = run(guided_exhaustive(SPACE, steep_size(SPACE), 0.01), lambda _: answer)
    assert outcome.chosen is None
    assert outcome.degradation is None
    assert outcome.kind == "exhaustive"
    assert "no configuration" in outcome.reason
    assert all(not e.feasible and e.degradation in (math.inf, 0.02) for e in outcome.evaluations)


@pytest.mark.parametrize("limit", [1, 2, 5, 20])
def test_limit_holds_and_is_told(limit: int) -> None:
    # The boundary of the feasible half crosses the widest part of the order: the worst case for any search.
    middle = 7
    outcome = run(
        guided_exhaustive(SPACE, steep_size(SPACE), 0.01, max_evaluations=limit),
        lambda c: 0.001 * harshness(SPACE, c) / middle if harshness(SPACE, c) <= middle else 1.0,
    )
    assert len(outcome.evaluations) == limit
    assert "limit" in outcome.reason
    assert outcome.chosen is not None
    assert outcome.degradation is not None
    assert outcome.degradation <= 0.01


def test_last_evaluation_goes_to_the_mildest() -> None:
    outcome = run(
        guided_exhaustive(SPACE, steep_size(SPACE), 0.01, max_evaluations=3),
        lambda c: 0.0 if c == SPACE.mildest else 1.0,
    )
    assert outcome.chosen == SPACE.mildest


@pytest.mark.parametrize("limit", [12, UNLIMITED])
def test_contradiction_is_told_and_neighbours_are_measured(limit: int) -> None:
    """Qualities without any order: what inference ruled out next to the winner is measured after all."""
    size = steep_size(SMALL)
    moves = (-1, 0, 1)
    contradictions = improvements = 0
    for seed in range(400):
        rng = random.Random(seed)
        answers = {c: rng.choice((0.002, 0.02, 0.2)) for c in SMALL.configurations}
        outcome = run(guided_exhaustive(SMALL, size, 0.01, max_evaluations=limit), answers.__getitem__)
        assert len(outcome.evaluations) <= limit
        if outcome.chosen is None or "contradict" not in outcome.reason:
            continue
        contradictions += 1
        improvements += outcome.evaluations[-1].configuration == outcome.chosen
        measured = {e.configuration for e in outcome.evaluations}
        assert outcome.chosen == min((c for c in measured if answers[c] <= 0.01), key=size)
        if limit == UNLIMITED and outcome.evaluations[-1].configuration != outcome.chosen:
            around = SMALL.around(outcome.chosen, moves, embedding_moves=moves)
            assert {c for c in around if size(c) < size(outcome.chosen)} <= measured
    assert contradictions > 10
    assert improvements > 3


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63), st.floats(0.0, 0.5))
def test_noisy_measurements_never_yield_what_measured_infeasible(seed: int, noise: float) -> None:
    problem = random_problem(seed, SMALL)
    answers = {
        c: d + noise * math.sin(seed % 997 + 13 * n) for n, (c, d) in enumerate(problem.degradation.items())
    }
    outcome = run(
        guided_exhaustive(SMALL, problem.size.__getitem__, problem.bound, noise=noise), answers.__getitem__
    )
    assert len(outcome.evaluations) <= 45
    feasible = [e.predicted_bytes for e in outcome.evaluations if e.feasible]
    if outcome.chosen is None:
        assert not feasible
    else:
        assert answers[outcome.chosen] <= problem.bound
        assert problem.size[outcome.chosen] == min(feasible)


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="max_evaluations=0"):
        guided_exhaustive(SPACE, lambda _: 1.0, 0.01, max_evaluations=0)
    with pytest.raises(ConfigError, match="NaN"):
        next(guided_exhaustive(SPACE, lambda _: math.nan, 0.01))


@pytest.mark.parametrize(
    ("low", "high", "noise", "expected"),
    [
        (0.005, 0.01, 0.0005, True),
        (0.0095, 0.01, 0.0, False),  # within 10 %
        (0.0, 0.001, 0.0005, False),  # within twice the noise
        (-0.02, -0.01, 0.0005, True),
        (0.01, math.inf, 0.0005, True),
        (math.inf, math.inf, 0.0005, False),
        (math.inf, 0.01, 0.0005, False),
    ],
)
def test_significance(low: float, high: float, noise: float, expected: bool) -> None:
    assert significantly_lower(low, high, noise) is expected
