"""The sketch's error bound, its exact thresholds, messages, and what it refuses."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.quantize.sketch import LEAST, Sketch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALPHAS = st.sampled_from([0.001, 0.01, 0.05, 0.5])
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw: st.DrawFn, min_size: int = 0) -> torch.Tensor:
    """Any finite values, often with heavy ties and zeros, in each dtype and some shape."""
    pool = [*draw(st.lists(FINITE, min_size=1, max_size=12)), 0.0]
    element = st.one_of(FINITE, st.sampled_from(pool))
    values = draw(st.lists(element, min_size=min_size, max_size=60))
    tensor = torch.tensor(values, dtype=torch.float32).to(draw(st.sampled_from(DTYPES)))
    limit = torch.finfo(tensor.dtype).max
    tensor = tensor.clamp(-limit, limit)
    return tensor.reshape(1, -1, 1) if draw(st.booleans()) else tensor


def close(estimate: float, exact: float, alpha: float) -> bool:
    return abs(estimate - exact) <= (LEAST if abs(exact) < LEAST else alpha * abs(exact))


def count(sketch: Sketch) -> int:
    return int(sketch.counts.sum())


@settings(deadline=None)
@given(tensors(), ALPHAS)
def test_histogram_bounds_every_element(tensor: torch.Tensor, alpha: float) -> None:
    signed = Sketch(alpha).add(tensor)
    histogram = signed.histogram()
    assert histogram.values.dtype == np.float64
    assert histogram.counts.dtype == np.int64
    assert (np.diff(histogram.values) > 0).all()
    assert (histogram.counts > 0).all()
    estimates = np.repeat(histogram.values, histogram.counts)
    exact = tensor.double().flatten().sort().values.tolist()
    assert len(estimates) == len(exact)
    assert all(close(estimate, value, alpha) for estimate, value in zip(estimates, exact, strict=True))


@settings(deadline=None)
@given(tensors(), st.floats(0, 1))
def test_thresholds_never_take_more_than_their_share(tensor: torch.Tensor, share: float) -> None:
    sketch, scores = Sketch().add(tensor), tensor.abs().float()
    below, above = sketch.threshold_below(share), sketch.threshold_above(share)
    assert int((scores < below).sum()) <= share * scores.numel()
    assert int((scores >= above).sum()) <= share * scores.numel()


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1, 0.5])
def test_thresholds_come_close_to_their_share_on_smooth_data(share: float) -> None:
    scores = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).abs()
    sketch = Sketch(0.001).add(scores)
    below = int((scores < sketch.threshold_below(share)).sum()) / scores.numel()
    above = int((scores >= sketch.threshold_above(share)).sum()) / scores.numel()
    assert 0.97 * share <= below <= share
    assert 0.93 * share <= above <= share


def test_strided_and_differentiable_tensors() -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    transposed = Sketch().add(weight.t()[::2])
    assert (transposed.counts == Sketch().add(weight.detach()[:, ::2].clone()).counts).all()


def test_negative_zero_is_zero() -> None:
    histogram = Sketch().add(torch.tensor([-0.0, 0.0, -1e-38])).histogram()
    assert histogram.values.tolist() == [0.0]
    assert histogram.counts.tolist() == [3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    sketch = Sketch()
    with pytest.raises(CannotRepresentError, match="finite"):
        sketch.add(torch.tensor([1.0, bad, 2.0], dtype=dtype))
    assert count(sketch) == 0


def test_refuses_other_dtypes() -> None:
    for dtype in (torch.float64, torch.int32, torch.bool, torch.complex64):
        with pytest.raises(CannotRepresentError, match="dtype"):
            Sketch().add(torch.zeros(2, dtype=dtype))


@settings(deadline=None)
@given(tensors(), tensors(), ALPHAS)
def test_messages_of_several_ranks_add_up_to_the_sketch_of_all(one, other, alpha):
    whole, received = Sketch(alpha).add(one).add(other), Sketch(alpha)
    for part in (one, other):
        received.count_json(json.loads(json.dumps(Sketch(alpha).add(part).to_json())))
    assert np.array_equal(received.counts, whole.counts)


@pytest.mark.parametrize("node", [[[0, 1], [5]], [[-1], [1]], [[10**6], [1]]])
def test_messages_with_other_buckets_are_refused(node):
    sketch = Sketch(0.01)
    with pytest.raises(FormatError, match="buckets"):
        sketch.count_json(node)
    assert count(sketch) == 0
