"""The grid of configurations and its order."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search_instances import SMALL

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

SPACE = ConfigurationSpace()
ANY = st.sampled_from(SPACE.configurations)


def configuration(**changes: object) -> Configuration:
    values = {"bins": 8, "prune": 0.2, "protect": 0.005, "metric": "sensitivity", "embedding_bins": 16}
    return Configuration(**{**values, **changes})  # type: ignore[arg-type]


def test_default_space_is_the_tables_of_the_paper() -> None:
    assert len(SPACE.configurations) == len(set(SPACE.configurations)) == 432 - 36
    assert SPACE.mildest == configuration(bins=32, prune=0.0, protect=0.01, embedding_bins=32)


@given(ANY)
def test_configuration_survives_json(c: Configuration) -> None:
    assert Configuration.from_json(json.loads(json.dumps(c.to_json()))) == c


@pytest.mark.parametrize("data", [None, [], {}, {**configuration().to_json(), "more": 1}])
def test_configuration_rejects_foreign_json(data: object) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        Configuration.from_json(data)


def test_unpruned_configurations_of_all_metrics_are_one() -> None:
    unpruned = configuration(prune=0.0, metric="magnitude")
    assert SPACE.canonical(unpruned) == configuration(prune=0.0)
    assert SPACE.twins(unpruned) == ()
    assert SPACE.twins(configuration()) == (configuration(metric="magnitude"),)


def test_configuration_of_another_space_is_not_in_it() -> None:
    assert configuration(bins=5) not in SPACE


@given(ANY)
def test_mildest_is_milder_than_everything(c: Configuration) -> None:
    assert SPACE.at_least_as_mild(SPACE.mildest, c)
    assert SPACE.at(c.metric, SPACE.steps(c)) == c


@given(ANY, ANY, ANY)
def test_mildness_is_a_partial_order(a: Configuration, b: Configuration, c: Configuration) -> None:
    mild = SPACE.at_least_as_mild
    assert mild(a, a)
    assert not (mild(a, b) and mild(b, a)) or a == b
    assert not (mild(a, b) and mild(b, c)) or mild(a, c)


def test_around_stays_in_the_space_and_moves_at_most_one_step() -> None:
    corner = SMALL.at("magnitude", (0, 0, 0, 0))
    assert len(set(SMALL.around(corner, (-1, 0, 1)))) == 8
    assert set(SMALL.around(SMALL.mildest, (0, 1))) == {SMALL.mildest}
    assert len(set(SMALL.around(corner, (0, 1), embedding_moves=(0, 1)))) == 16
