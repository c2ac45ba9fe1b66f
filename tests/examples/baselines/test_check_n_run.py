import numpy as np
import pytest
import torch
from baselines.check_n_run import AdaptiveOptions, CheckNRunWeightCodec, search_bounds
from hypothesis import given
from hypothesis import strategies as st
from support.chains import encode, relative_step, spec_of

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.base import Context


def test_rows_have_their_own_bounds():
    weight = torch.tensor([[0.0, 1.0, 2.0, 3.0], [-10.0, 20.0, 50.0, 80.0], [7.0, 7.0, 7.0, 7.0]])
    codec = CheckNRunWeightCodec(options=AdaptiveOptions(bits=2))
    assert torch.equal(encode(codec, weight, spec_of(weight), Context()).value, weight)


def test_the_search_by_hand():
    # one bit between 0 and 10 in 10 steps: moving the upper bound down to 2 serves all but the outlier, whose error
    # is too large; the best greedy bounds are those that leave the least squared error
    row = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 10]], np.float32)
    low, high = search_bounds(row, 1, 10, 10)

    def error(low, high):
        scale = high - low
        levels = np.clip(np.rint((row - low) / scale), 0, 1)
        return float(((levels * scale + low - row) ** 2).sum())

    tried, at = {(0.0, 10.0): error(0, 10)}, (0.0, 10.0)
    for _ in range(9):
        at = min(((at[0] + 1, at[1]), (at[0], at[1] - 1)), key=lambda bounds: (error(*bounds), -bounds[0]))
        tried[at] = error(*at)
    assert error(low[0], high[0]) == pytest.approx(min(tried.values()))
    assert (low[0], high[0]) != (0.0, 10.0)


@given(st.integers(0, 50), st.sampled_from([2, 3, 4]))
def test_the_search_never_loses(seed, bits):
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed)) ** 3

    def error(ratio):
        codec = CheckNRunWeightCodec(options=AdaptiveOptions(bits=bits, ratio=ratio))
        value = encode(codec, weight, spec_of(weight), Context()).value
        return (value - weight).square().sum(dim=1)

    assert bool((error(1.0) <= error(0.0) * (1 + 1e-4)).all())
    assert float(error(1.0).sum()) < float(error(0.0).sum())


def test_only_changed_rows_are_stored():
    before = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    after = before.clone()
    after[[3, 50, 99]] += 1
    for changed, count in ((after, 3), (before, 0)):
        coded, restored = relative_step(CheckNRunWeightCodec(), before, changed)
        assert len(coded.encoded.sections["bounds"]) == 8 * count
        alone = encode(CheckNRunWeightCodec(), changed, spec_of(changed), Context())
        assert torch.equal(restored, alone.value)


def test_ranges_beyond_fp32_are_refused():
    weight = torch.tensor([[3e38, -3e38], [0.0, 1.0]])
    with pytest.raises(CannotRepresentError, match="range"):
        encode(CheckNRunWeightCodec(), weight, spec_of(weight), Context())
