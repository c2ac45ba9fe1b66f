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
    assert SPACE.size == 2 * 216
    assert len(SPACE.configurations) == len(set(SPACE.configurations)) == 432 - 36
    assert SPACE.mildest == configuration(bins=32, prune=0.0, protect=0.01, embedding_bins=32)


@given(ANY)
def test_configuration_survives_json(c: Configuration) -> None:
    assert Configuration.from_json(json.loads(json.dumps(c.to_json()))) == c


@pytest.mark.parametrize(
    "changes",
    [
        {"bins": 1},
        {"bins": 8.0},
        {"bins": True},
        {"embedding_bins": 0},
        {"prune": 1.0},
        {"prune": -0.1},
        {"prune": float("nan")},
        {"protect": "0.1"},
        {"metric": "taylor"},
        {"metric": []},
    ],
)
def test_configuration_rejects_values_out_of_range(changes: dict[str, object]) -> None:
    (field,) = changes
    with pytest.raises(ConfigError, match=field):
        configuration(**changes)


@pytest.mark.parametrize("data", [None, [], {}, {**configuration().to_json(), "more": 1}])
def test_configuration_rejects_foreign_json(data: object) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        Configuration.from_json(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bins": ()}, "bins=.* at least one"),
        ({"bins": (8, 4)}, "bins=.* ascending"),
        ({"prune": (0.0, 0.5)}, "prune=.* descending"),
        ({"protect": (0.01, 0.01)}, "protect=.* repeat"),
        ({"embedding_bins": (1, 2)}, "embedding_bins=1 "),
        ({"metrics": ("entropy",)}, "metrics='entropy'"),
    ],
)
def test_space_rejects_bad_axes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConfigurationSpace(**changes)  # type: ignore[arg-type]


def test_space_takes_lists_and_stays_hashable() -> None:
    space = ConfigurationSpace(bins=[4, 8])  # type: ignore[arg-type]
    assert space.bins == (4, 8)
    assert hash(space) == hash(ConfigurationSpace(bins=(4, 8)))


def test_unpruned_configurations_of_all_metrics_are_one() -> None:
    unpruned = configuration(prune=0.0, metric="magnitude")
    assert SPACE.canonical(unpruned) == configuration(prune=0.0)
    assert SPACE.twins(unpruned) == ()
    assert SPACE.twins(configuration()) == (configuration(metric="magnitude"),)


def test_configuration_of_another_space_is_refused() -> None:
    assert configuration(bins=5) not in SPACE
    with pytest.raises(ConfigError, match="not in the space"):
        SPACE.steps(configuration(bins=5))


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
