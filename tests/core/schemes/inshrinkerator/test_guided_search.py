"""The exhaustive search finds the true optimum, or says that it may not have; local ones keep, switch, move or give up as they should."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search_instances import NOT_FINITE, SMALL, harshness, random_problem, run, steep_size

from shrinkpoint.schemes.inshrinkerator.search import Search
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

SPACE = ConfigurationSpace()
UNLIMITED = 10_000


@settings(max_examples=2500, deadline=None)
@given(st.integers(0, 2**63))
def test_exact_on_random_monotone_problems(seed: int) -> None:
    problem = random_problem(seed, SMALL)
    outcome = run(
        Search("exhaustive", SMALL, problem.size.__getitem__, problem.bound, limit=UNLIMITED),
        problem.degradation.__getitem__,
    )
    found = None if outcome.chosen is None else problem.size[outcome.chosen]
    assert found == problem.smallest
    measured = outcome.measured
    assert len(measured) == len(set(measured))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63))
def test_default_limit_suffices_in_the_full_space(seed: int) -> None:
    problem = random_problem(seed, SPACE)
    outcome = run(
        Search("exhaustive", SPACE, problem.size.__getitem__, problem.bound), problem.degradation.__getitem__
    )
    found = None if outcome.chosen is None else problem.size[outcome.chosen]
    assert len(outcome.measured) <= 45
    assert "limit" in outcome.reason or found == problem.smallest


@pytest.mark.parametrize("answer", [*NOT_FINITE, 0.02])
def test_nothing_feasible(answer: float) -> None:
    outcome = run(Search("exhaustive", SPACE, steep_size(SPACE), 0.01), lambda _: answer)
    assert outcome.chosen is None
    assert outcome.degradation is None
    assert "no configuration" in outcome.reason
    assert all(degradation in (math.inf, 0.02) for degradation in outcome.answers.values())


@pytest.mark.parametrize("limit", [1, 2, 5, 20])
def test_limit_holds_and_is_told(limit: int) -> None:
    # The boundary of the feasible half crosses the widest part of the order: the worst case for any search.
    middle = 7
    outcome = run(
        Search("exhaustive", SPACE, steep_size(SPACE), 0.01, limit=limit),
        lambda c: 0.001 * harshness(SPACE, c) / middle if harshness(SPACE, c) <= middle else 1.0,
    )
    assert len(outcome.measured) == limit
    assert "limit" in outcome.reason
    assert outcome.chosen is not None
    assert outcome.degradation is not None
    assert outcome.degradation <= 0.01


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63), st.floats(0.0, 0.5))
def test_noisy_measurements_never_yield_what_measured_infeasible(seed: int, noise: float) -> None:
    problem = random_problem(seed, SMALL)
    answers = {
        c: d + noise * math.sin(seed % 997 + 13 * n) for n, (c, d) in enumerate(problem.degradation.items())
    }
    outcome = run(Search("exhaustive", SMALL, problem.size.__getitem__, problem.bound), answers.__getitem__)
    assert len(outcome.measured) <= 45
    feasible = [problem.size[c] for c, d in outcome.answers.items() if d <= problem.bound]
    if outcome.chosen is None:
        assert not feasible
    else:
        assert answers[outcome.chosen] <= problem.bound
        assert problem.size[outcome.chosen] == min(feasible)


INCUMBENT = SPACE.at("sensitivity", (2, 2, 1, 0))
TWIN = SPACE.at("magnitude", (2, 2, 1, 0))
SIZE = steep_size(SPACE)


@pytest.mark.parametrize(
    ("incumbent", "twin", "switches"),
    [
        (0.008, 0.004, True),
        (0.008, 0.0075, False),  # by less than 10 %
        (0.0008, 0.0001, False),  # by less than twice the noise
        (0.0101, 0.0099, True),  # hardly better, but within the bound
        (math.nan, 0.0, True),
        (0.0, math.nan, False),
    ],
)
def test_switches_the_metric_only_when_clearly_better(incumbent: float, twin: float, switches: bool) -> None:
    answers = {INCUMBENT: incumbent, TWIN: twin}
    outcome = run(Search("neighbourhood", SPACE, SIZE, 0.01, INCUMBENT), answers.__getitem__)
    assert outcome.chosen == (TWIN if switches else INCUMBENT)
    assert ("by magnitude was better" in outcome.reason) is switches


@pytest.mark.parametrize("answer", [*NOT_FINITE, 0.02])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
def test_gives_up_within_its_limit(answer: float, group: int) -> None:
    outcome = run(Search("neighbourhood", SPACE, SIZE, 0.01, INCUMBENT, limit=group), lambda _: answer)
    assert outcome.chosen is None
    assert len(outcome.measured) == group
    assert "exhaustive" in outcome.reason


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from(SMALL.configurations))
def test_never_becomes_harsher_and_never_exceeds_the_bound(seed: int, incumbent: Configuration) -> None:
    problem = random_problem(seed, SMALL)
    outcome = run(
        Search("neighbourhood", SMALL, problem.size.__getitem__, problem.bound, incumbent),
        problem.degradation.__getitem__,
    )
    assert outcome.measured[0] == incumbent
    assert len(outcome.measured) <= 8
    if problem.degradation[incumbent] <= problem.bound:
        assert outcome.chosen is not None
    if outcome.chosen is not None:
        assert problem.degradation[outcome.chosen] <= problem.bound
        assert harshness(SMALL, outcome.chosen) <= harshness(SMALL, incumbent)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from(SMALL.configurations))
def test_reprobe_is_exact_in_its_box(seed: int, incumbent: Configuration) -> None:
    problem = random_problem(seed, SMALL)
    outcome = run(
        Search("reprobe", SMALL, problem.size.__getitem__, problem.bound, incumbent, limit=1000),
        problem.degradation.__getitem__,
    )
    moves = (-1, 0, 1)
    box = [
        problem.size[c]
        for c in SMALL.around(incumbent, moves, embedding_moves=moves)
        if problem.degradation[c] <= problem.bound
    ]
    if problem.degradation[incumbent] <= problem.bound:
        assert outcome.chosen is not None
        assert problem.size[outcome.chosen] == min(box)
    else:
        assert outcome.chosen is None
