"""Shares, ties, precedence and layer types of the partition."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.inshrinkerator.partition import (
    ScoreSketches,
    Thresholds,
    partition,
)
from shrinkpoint.schemes.inshrinkerator.space import Metric
from shrinkpoint.state.training import LayerType

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
METRICS = st.sampled_from(["magnitude", "sensitivity"])
VALUES = st.one_of(st.floats(-100, 100, width=16), st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5]))
SHARES = st.floats(0, 1)


def layer_type_thresholds(
    weights: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor] | None,
    layer_types: Mapping[str, str],
    metric: Metric,
    prune: float,
    protect: float,
) -> dict[str, Thresholds]:
    """Of a single configuration."""
    sketches = ScoreSketches()
    for name, weight in weights.items():
        sketches.add(weight, None if gradients is None else gradients.get(name), layer_types[name])
    return sketches.thresholds(metric, prune, protect)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight, often with ties and zeros or empty, and a gradient or none."""
    values = draw(st.lists(VALUES, max_size=40))
    weight = torch.tensor(values, dtype=torch.float32).to(draw(st.sampled_from(DTYPES))).reshape(-1, 1)
    if draw(st.booleans()):
        return weight, None
    slopes = draw(st.lists(VALUES, min_size=len(values), max_size=len(values)))
    return weight, torch.tensor(slopes, dtype=torch.float32).reshape(-1, 1)


@settings(deadline=None)
@given(st.lists(pairs(), min_size=1, max_size=3), METRICS, SHARES, SHARES)
def test_no_share_is_exceeded_and_the_masks_are_disjoint(
    data: list[tuple[torch.Tensor, torch.Tensor | None]], metric: Metric, prune: float, protect: float
) -> None:
    with_gradient = all(gradient is not None for _, gradient in data)
    sketches = ScoreSketches()
    for weight, gradient in data:
        sketches.add(weight, gradient if with_gradient else None, "linear")
    thresholds = sketches.thresholds(metric, prune, protect)["linear"]
    parts = [partition(weight, gradient if with_gradient else None, thresholds) for weight, gradient in data]
    total = sum(weight.numel() for weight, _ in data)
    assert sum(int(pruned.sum()) for _, pruned in parts) <= prune * total
    assert sum(int(protected.sum()) for protected, _ in parts) <= 2 * protect * total
    for (protected, pruned), (weight, _) in zip(parts, data, strict=True):
        assert protected.shape == pruned.shape == weight.shape
        assert protected.dtype == pruned.dtype == torch.bool
        assert not bool((protected & pruned).any())


@pytest.mark.parametrize("metric", ["magnitude", "sensitivity"])
@pytest.mark.parametrize("prune", [0.1, 0.5])
def test_shares_are_met_on_smooth_data(metric: Metric, prune: float) -> None:
    weight, gradient = noise(300, 400), noise(300, 400, seed=1)
    thresholds = layer_type_thresholds({"w": weight}, {"w": gradient}, {"w": "linear"}, metric, prune, 0.01)[
        "linear"
    ]
    protected, pruned = partition(weight, gradient, thresholds)
    assert 0.01 < protected.float().mean().item() <= 0.02
    assert 0.93 * prune - 0.01 <= pruned.float().mean().item() <= prune


def test_outliers_of_either_score_are_protected() -> None:
    weight, gradient = noise(50, 50), noise(50, 50, seed=1)
    weight[3, 4] = 40.0
    gradient[3, 4] = 0.0
    weight[5, 6], gradient[5, 6] = 1e-3, 1e6
    thresholds = layer_type_thresholds(
        {"w": weight}, {"w": gradient}, {"w": "conv"}, "magnitude", 0.5, 0.001
    )["conv"]
    protected, pruned = partition(weight, gradient, thresholds)
    assert bool(protected[3, 4])
    assert bool(protected[5, 6])
    assert not bool(pruned[5, 6])


def test_more_zeros_than_the_share_are_left_to_quantization() -> None:
    weight = torch.cat([torch.zeros(600), noise(400)])
    thresholds = layer_type_thresholds({"w": weight}, None, {"w": "linear"}, "magnitude", 0.3, 0.01)["linear"]
    assert not bool(partition(weight, None, thresholds)[1].any())


@pytest.mark.parametrize("layer_type", ["embedding", LayerType.EMBEDDING])
def test_embeddings_are_pruned_by_magnitude(layer_type: str) -> None:
    weight, gradient = noise(100, 8), noise(100, 8, seed=1)
    gradient[:50] = 0.0  # rows that no batch touched
    thresholds = layer_type_thresholds(
        {"w": weight}, {"w": gradient}, {"w": layer_type}, "sensitivity", 0.3, 0.0
    )
    _, pruned = partition(weight, gradient, thresholds["embedding"])
    assert thresholds["embedding"].metric == "magnitude"
    assert weight.abs()[pruned].max() < weight.abs()[~pruned].min()
    assert bool(pruned[50:].any())


def test_layer_types_have_thresholds_of_their_own() -> None:
    weights = {"a": noise(64, 64), "b": noise(64, 64, seed=1) * 100, "c": noise(8, 8)}
    types = {"a": "linear", "b": "conv", "c": "linear"}
    found = layer_type_thresholds(weights, None, types, "magnitude", 0.2, 0.005)
    assert set(found) == {"linear", "conv"}
    assert found["conv"].prune_magnitude > 50 * found["linear"].prune_magnitude
    for name, weight in weights.items():
        assert 0.1 < partition(weight, None, found[types[name]])[1].float().mean() < 0.35


def test_without_a_gradient_the_magnitude_decides() -> None:
    scored, unscored = noise(40, 40), noise(40, 40, seed=1)
    sketches = ScoreSketches()
    sketches.add(scored, noise(40, 40, seed=2), "linear")
    sketches.add(unscored, None, "linear")
    thresholds = sketches.thresholds("sensitivity", 0.4, 0.0)["linear"]
    assert thresholds.metric == "sensitivity"
    pruned = partition(unscored, None, thresholds)[1]
    assert torch.equal(pruned, unscored.abs() < thresholds.prune_magnitude)
    assert bool(pruned.any())


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(CannotRepresentError, match="finite"):
        ScoreSketches().add(torch.full((2, 2), math.nan), None, "linear")
