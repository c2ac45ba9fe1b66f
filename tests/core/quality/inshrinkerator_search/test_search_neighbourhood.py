"""The local searches keep, switch, move or give up as they should."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search_instances import NOT_FINITE, SMALL, harshness, random_problem, run, steep_size

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.inshrinkerator_search.neighbourhood import delta_neighbourhood, reprobe
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

SPACE = ConfigurationSpace()
INCUMBENT = SPACE.at("sensitivity", (2, 2, 1, 0))
TWIN = SPACE.at("magnitude", (2, 2, 1, 0))
SIZE = steep_size(SPACE)


def test_feasible_incumbent_stays_after_two_evaluations() -> None:
    outcome = run(delta_neighbourhood(SPACE, SIZE, INCUMBENT, 0.01), lambda _: 0.005)
    assert [e.configuration for e in outcome.evaluations] == [INCUMBENT, TWIN]
    assert outcome.chosen == INCUMBENT
    assert outcome.degradation == 0.005
    assert outcome.kind == "neighbourhood"


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
    outcome = run(delta_neighbourhood(SPACE, SIZE, INCUMBENT, 0.01), answers.__getitem__)
    assert outcome.chosen == (TWIN if switches else INCUMBENT)
    assert ("by magnitude was better" in outcome.reason) is switches


def test_moves_to_the_smallest_milder_neighbour_that_holds() -> None:
    target = SPACE.at("sensitivity", (3, 2, 2, 0))

    def degradation(c: Configuration) -> float:
        return 0.001 if SPACE.at_least_as_mild(c, target) else 0.02

    outcome = run(delta_neighbourhood(SPACE, SIZE, INCUMBENT, 0.01), degradation)
    assert outcome.chosen == target
    sizes = [e.predicted_bytes for e in outcome.evaluations[2:]]
    assert sizes == sorted(sizes)


def test_milder_and_smaller_neighbour_is_preferred_to_the_incumbent() -> None:
    smaller = SPACE.at("sensitivity", (2, 3, 1, 0))
    outcome = run(
        delta_neighbourhood(SPACE, lambda c: 1.0 if c == smaller else SIZE(c), INCUMBENT, 0.01), lambda _: 0.0
    )
    assert outcome.chosen == smaller


@pytest.mark.parametrize("answer", [*NOT_FINITE, 0.02])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
def test_gives_up_within_its_limit(answer: float, group: int) -> None:
    outcome = run(delta_neighbourhood(SPACE, SIZE, INCUMBENT, 0.01, group=group), lambda _: answer)
    assert outcome.chosen is None
    assert len(outcome.evaluations) == group
    assert "exhaustive" in outcome.reason


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from(SMALL.configurations))
def test_never_becomes_harsher_and_never_exceeds_the_bound(seed: int, incumbent: Configuration) -> None:
    problem = random_problem(seed, SMALL)
    outcome = run(
        delta_neighbourhood(SMALL, problem.size.__getitem__, incumbent, problem.bound),
        problem.degradation.__getitem__,
    )
    assert outcome.evaluations[0].configuration == incumbent
    assert len(outcome.evaluations) <= 8
    if problem.degradation[incumbent] <= problem.bound:
        assert outcome.chosen is not None
    if outcome.chosen is not None:
        assert problem.degradation[outcome.chosen] <= problem.bound
        assert harshness(SMALL, outcome.chosen) <= harshness(SMALL, incumbent)


def test_reprobe_becomes_harsher_by_one_step() -> None:
    target = SPACE.at("sensitivity", (1, 2, 0, 0))

    def degradation(c: Configuration) -> float:
        return 0.001 if SPACE.at_least_as_mild(c, target) else 0.02

    outcome = run(reprobe(SPACE, SIZE, INCUMBENT, 0.01, max_evaluations=20), degradation)
    assert outcome.chosen == target
    assert outcome.kind == "reprobe"


def test_reprobe_keeps_the_incumbent_when_nothing_smaller_holds() -> None:
    outcome = run(reprobe(SPACE, SIZE, INCUMBENT, 0.01), lambda c: 0.0 if c == INCUMBENT else 1.0)
    assert outcome.chosen == INCUMBENT
    assert len(outcome.evaluations) <= 8


def test_reprobe_stops_at_an_infeasible_incumbent() -> None:
    outcome = run(reprobe(SPACE, SIZE, INCUMBENT, 0.01), lambda _: math.nan)
    assert outcome.chosen is None
    assert len(outcome.evaluations) == 1


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from(SMALL.configurations))
def test_reprobe_is_exact_in_its_box(seed: int, incumbent: Configuration) -> None:
    problem = random_problem(seed, SMALL)
    outcome = run(
        reprobe(SMALL, problem.size.__getitem__, incumbent, problem.bound, max_evaluations=1000),
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


def test_foreign_incumbent_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="not in the space"):
        delta_neighbourhood(SMALL, SIZE, INCUMBENT, 0.01)
    with pytest.raises(ConfigError, match="not in the space"):
        reprobe(SMALL, SIZE, INCUMBENT, 0.01)
