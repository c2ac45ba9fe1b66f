"""Optimal clustering against brute force, and the nearest-centroid assignment."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shrinkpoint.arrays import Float64s
from shrinkpoint.quantize import clustering
from shrinkpoint.quantize.clustering import (
    assign,
    optimal_codebooks,
    sample_weights,
)
from shrinkpoint.quantize.sketch import Histogram

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-4, 4, width=32)


@st.composite
def buckets(
    draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOAT32, max_size: int = 40
) -> tuple[Float64s, Float64s]:
    values = sorted(draw(st.sets(elements, max_size=max_size)))
    weights = [draw(st.floats(0.0, 1.0, exclude_min=True)) for _ in values]
    return np.array(values, dtype=np.float64), np.array(weights, dtype=np.float64)


@st.composite
def codebooks(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOAT32) -> torch.Tensor:
    values = sorted(draw(st.sets(elements, min_size=1, max_size=40)))
    return torch.tensor(values, dtype=torch.float32)


def distortion(values: Float64s, weights: Float64s, codebook: torch.Tensor) -> float:
    """The weighted sum of squared distances of the values to their nearest centroid."""
    if not len(values):
        return 0.0
    return float(weights @ ((values[:, None] - codebook.double().numpy()) ** 2).min(axis=1))


def brute_force(values: Float64s, weights: Float64s, k: int) -> float:
    """The least error over every way to cut the values into at most k ranges."""
    best = math.inf
    for cuts in itertools.combinations(range(1, len(values)), min(k, len(values)) - 1):
        error = 0.0
        for start, end in itertools.pairwise((0, *cuts, len(values))):
            v, w = values[start:end], weights[start:end]
            error += float(w @ (v - v @ w / w.sum()) ** 2)
        best = min(best, error)
    return best


@settings(max_examples=60, deadline=None)
@given(buckets(MODERATE, max_size=9), st.integers(1, 5))
def test_the_optimum_is_that_of_brute_force(data: tuple[Float64s, Float64s], k: int) -> None:
    values, weights = data
    weights = weights + 0.01
    codebook = optimal_codebooks(values, weights, [k])[k]
    if len(values):
        assert distortion(values, weights, codebook) <= brute_force(values, weights, k) * (1 + 1e-5) + 1e-9


@settings(deadline=None)
@given(buckets(), st.integers(1, 40))
@example((np.array([0.7]), np.array([5e-324])), 1)  # a product with the least weight rounds to that weight
def test_codebooks_ascend_and_have_at_most_k_entries(data: tuple[Float64s, Float64s], k: int) -> None:
    values, weights = data
    codebook = optimal_codebooks(values, weights, [k])[k]
    assert codebook.dtype == torch.float32
    assert codebook.shape == (len(codebook),)
    assert len(codebook) <= min(k, len(values))
    assert bool((codebook.diff() > 0).all())
    if len(values):
        assert len(codebook) >= 1
        margin = 1e-6 * float(np.abs(values).max()) + 1e-44
        assert values[0] - margin <= codebook[0].item()
        assert codebook[-1].item() <= values[-1] + margin


def test_weights_lost_in_rounding_do_no_harm() -> None:
    values = np.arange(6, dtype=np.float64)
    weights = np.array([1.0, 1e-300, 1e-300, 1.0, 1e-300, 1e-300])
    codebook = optimal_codebooks(values, weights, [4])[4]
    assert bool(codebook.isfinite().all())
    assert distortion(values, weights, codebook) < 1e-12


def test_nothing_to_cluster() -> None:
    empty = np.empty(0)
    assert len(optimal_codebooks(empty, empty, [8])[8]) == 0
    assert distortion(empty, empty, torch.empty(0)) == 0.0
    assert optimal_codebooks(empty, empty, []) == {}


def test_sample_weights_by_hand() -> None:
    histogram = Histogram(values=np.array([-1.0, 0.0, 3.0]), counts=np.array([1, 2, 1]))
    assert sample_weights(histogram, 0.0).tolist() == [0.25, 0.5, 0.25]
    assert sample_weights(histogram, 1.0).tolist() == [0.25, 0.0, 0.75]
    assert sample_weights(histogram, 0.2) == pytest.approx([0.25, 0.4, 0.35])
    zeros = Histogram(values=np.zeros(1), counts=np.array([9]))
    assert sample_weights(zeros).tolist() == [1.0]


@settings(deadline=None)
@given(codebooks(), st.lists(FLOAT32, max_size=30), st.sampled_from(DTYPES), st.booleans())
def test_assign_picks_a_nearest_centroid(
    codebook: torch.Tensor, xs: list[float], dtype: torch.dtype, table: bool
) -> None:
    limit = torch.finfo(dtype).max
    x = torch.cat([torch.tensor(xs), codebook, codebook.nextafter(torch.tensor(0.0))])
    x = x.clamp(-limit, limit).to(dtype).clamp(-limit, limit).reshape(1, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustering, "_TABLE_PAYS", 0 if table else math.inf)
        patch.setattr(clustering, "_CHUNK", 16)
        indices = assign(x, codebook)
        restored = codebook[indices.int()]
    assert indices.dtype == torch.uint8
    assert indices.shape == restored.shape == x.shape
    assert restored.dtype == torch.float32
    distance = (x.double() - restored.double()).abs()
    nearest = (x.double().reshape(-1, 1) - codebook.double()).abs().min(dim=1).values
    assert bool((distance.flatten() <= nearest * (1 + 1e-15)).all())


@settings(deadline=None)
@given(codebooks(MODERATE), st.integers(0, 2**32 - 1))
def test_lookup_and_search_agree(codebook: torch.Tensor, seed: int) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(seed))
    x = torch.cat([x, codebook, (codebook[:-1] + codebook[1:]) / 2, torch.tensor([0.0, -0.0, 1e-45, -1e-45])])
    searched = assign(x, codebook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustering, "_TABLE_PAYS", 0)
        assert torch.equal(assign(x, codebook), searched)


def test_assign_of_large_strided_and_empty_tensors() -> None:
    x = torch.randn(700, 400, generator=torch.Generator().manual_seed(0)).t()
    codebook = torch.linspace(-2, 2, 256)
    assert torch.equal(assign(x, codebook), torch.stack([assign(row, codebook) for row in x]))
    assert assign(torch.empty(0, 3), codebook).shape == (0, 3)
    assert assign(torch.empty(0), torch.empty(0)).shape == (0,)
    assert assign(torch.tensor(3.0), torch.tensor([1.0])).item() == 0


def test_importing_does_not_import_numba() -> None:
    script = "import sys, shrinkpoint.quantize.clustering, shrinkpoint.schemes.inshrinkerator.partition; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
