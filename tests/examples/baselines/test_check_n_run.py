import numpy as np
import pytest
import torch
from baselines.check_n_run import Adaptive, AdaptiveOptions, CheckNRunWeightCodec, search_bounds
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import check_chain, check_malformed, encode, relative_step, spec_of, walks

from shrinkpoint.errors import CannotRepresentError, ConfigError
from shrinkpoint.schemes.base import Context

options = st.builds(
    AdaptiveOptions,
    bits=st.sampled_from([1, 2, 4, 8]),
    num_bins=st.sampled_from([None, 1, 10]),
    ratio=st.sampled_from([0.0, 0.5, 1.0]),
    coder=st.sampled_from(["packed", "rans"]),
    min_elements=st.just(1),
    moments=st.sampled_from(["exact", "levels"]),
)


@settings(max_examples=80)
@given(walks(), options)
def test_chains_are_restored_as_encoded(states, chosen):
    check_chain(states, lambda _: Adaptive(options=chosen))


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


@pytest.mark.parametrize("coder", ["packed", "rans"])
def test_malformed_bytes_are_refused(coder):
    before, after = torch.randn(2, 10, 10, generator=torch.Generator().manual_seed(0))
    after[:5] = before[:5]
    check_malformed(CheckNRunWeightCodec(options=AdaptiveOptions(bits=3, coder=coder)), before, after)


@pytest.mark.parametrize("wrong", [{"bits": 0}, {"num_bins": 0}, {"ratio": 2}, {"coder": "lzma"}])
def test_options_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdaptiveOptions(**wrong)
