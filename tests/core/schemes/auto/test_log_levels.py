"""State to a share of each element: what is guaranteed of every element, chains, and files that are malformed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import check_malformed, spec_of
from support.moments import KINDS, SCALES, SHAPES, moments

from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.base import Coded, Context, ReferenceState
from shrinkpoint.state.training import Role, TensorSpec

TINY = torch.finfo().tiny


def spec(tensor: torch.Tensor) -> TensorSpec:
    return spec_of(tensor, "s", Role.STATE)


def code(
    tensor: torch.Tensor, reference: ReferenceState | None = None, **options
) -> tuple[Coded, ReferenceState]:
    """What was coded, and what a reader holds of it, who gets the same."""
    codec = LogLevelsCodec(**options)
    coded = codec.encode(tensor, spec(tensor), Context(reference=reference))
    context = Context(reference=reference if coded.encoded.uses_reference else None)
    planes = LogLevelsCodec().decode(coded.encoded, spec(tensor), context)
    restored = LogLevelsCodec().reconstruct(coded.encoded, planes, spec(tensor), context)
    assert restored.dtype == tensor.dtype
    assert restored.shape == tensor.shape
    assert torch.equal(restored, coded.value)
    assert np.array_equal(planes["exponent"], coded.planes["exponent"])
    return coded, ReferenceState(coded.encoded.codec, coded.encoded.params, planes)


def check_shares(true: torch.Tensor, restored: torch.Tensor, step: int) -> None:
    """Zeros, signs, and how far each element is from itself."""
    assert torch.equal(restored == 0, true == 0)
    assert torch.equal(restored.sign(), true.sign())
    ordinary = true.abs() >= TINY * 2**3
    octaves = (restored.double() / true.double())[ordinary].abs().log2().abs()
    assert bool((octaves <= (step + 1) / 32 + 1e-2).all())


@settings(max_examples=100)
@given(SHAPES, st.integers(0, 999), SCALES, KINDS, st.integers(1, 32), st.integers(0, 2**32 - 1))
def test_every_element_is_restored_to_a_share_of_itself(shape, seed, scale, kind, step, dither):
    first, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    for tensor in (second, first):
        coded, _ = code(tensor, step=step, seed=dither)
        assert bool((coded.value[tensor != 0].abs() >= TINY).all())
        if step >= 4:  # finer ones cannot reach from the least to the greatest of such rows
            check_shares(tensor, coded.value, step)


@settings(max_examples=30)
@given(
    SHAPES,
    st.integers(0, 999),
    st.sampled_from([torch.bfloat16, torch.float64, torch.float16]),
)
def test_other_dtypes_are_restored_to_a_share_too(shape, seed, dtype):
    tensor = (moments(*shape, seed=seed, scale=1.0)[1] + 0.01).to(dtype)
    check_shares(tensor, code(tensor)[0].value, 8)


@settings(max_examples=30)
@given(SHAPES, st.integers(0, 999), SCALES, KINDS, st.booleans())
def test_chains_are_read_as_written(shape, seed, scale, kind, restored):
    reference, before = None, None
    for number in range(3):
        second = moments(*shape, seed=seed + (number == 2), scale=scale, kind=kind)[1]
        coded, reference = code(second, reference, seed=number if restored else None)
        if number == 1 and not restored:  # nothing has changed
            assert torch.equal(coded.value, before)
        before = coded.value


def test_what_has_not_changed_costs_nothing():
    second = moments(300, 200)[1]
    base, reference = code(second)
    again, _ = code(second, reference, seed=None)
    assert again.encoded.uses_reference
    assert again.encoded.nbytes < 64 < base.encoded.nbytes / 100


def test_a_sum_that_grows_slowly_is_not_held_back_by_restores():
    """Rounded to the nearest level instead, it would never leave the one that it is on."""
    sums = torch.full((200, 200), 1.0)
    for number in range(20):
        sums = code(sums * 1.05, seed=number)[0].value
    assert float(sums.log2().mean()) == pytest.approx(20 * np.log2(1.05), abs=0.02)


@pytest.mark.parametrize("step", [8, 16, 32])
def test_updates_keep_their_length(step):
    """However far elements lie from a product of rows and columns."""
    generator = torch.Generator().manual_seed(0)
    second = 1e-8 * torch.exp(3 * torch.randn(200, 300, generator=generator))
    gradient = second.sqrt() * torch.randn(200, 300, generator=generator)
    value = code(second, step=step, divides=True)[0].value
    true, found = (float((gradient / v.sqrt()).square().mean().sqrt()) for v in (second, value))
    assert found == pytest.approx(true, rel=0.003)
    without = code(second, step=step)[0].value
    assert float((gradient / without.sqrt()).square().mean().sqrt()) > found


@pytest.mark.parametrize("signed", [False, True])
def test_a_delta_is_rebased_to_the_same_values(signed):
    first, second = moments(40, 30, kind="sparse")
    tensor = first if signed else second
    _, reference = code(tensor)
    delta, held_next = code(tensor * 1.3, reference, seed=None)
    assert delta.encoded.uses_reference
    rebased = LogLevelsCodec().rebase(delta.encoded, held_next, spec(tensor), {})
    assert rebased is not None
    assert not rebased.uses_reference
    planes = LogLevelsCodec().decode(rebased, spec(tensor), Context())
    restored = LogLevelsCodec().reconstruct(rebased, planes, spec(tensor), Context())
    assert torch.equal(restored, delta.value)


@pytest.mark.parametrize("bad", [torch.full((3, 3), torch.nan), torch.full((3, 3), torch.inf), torch.ones(0)])
def test_what_cannot_be_coded_is_refused(bad):
    with pytest.raises(CannotRepresentError):
        LogLevelsCodec().encode(bad, spec(bad), Context())


def test_half_precision_that_would_become_infinite_is_refused():
    tensor = torch.full((8, 8), 60_000.0, dtype=torch.float16)
    with pytest.raises(CannotRepresentError, match="range"):
        LogLevelsCodec(step=32).encode(tensor, spec(tensor), Context())


@pytest.mark.parametrize("options", [{"step": 0}, {"step": 33}, {"step": 1.0}, {"seed": -1}, {"seed": 2**32}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        LogLevelsCodec(**options)


@pytest.mark.parametrize(
    "params",
    [
        {"step": 0},
        {"step": 33},
        {"seed": -1},
        {"signed": 1},
        {"signed": None},
    ],
)
def test_malformed_params_are_refused(params):
    coded, _ = code(moments(12, 40)[1])
    encoded = replace(coded.encoded, params={**coded.encoded.params, **params})
    with pytest.raises(FormatError):
        LogLevelsCodec().decode(encoded, spec(coded.value), Context())


def test_damaged_copies_are_refused():
    first, second = moments(30, 20)
    check_malformed(LogLevelsCodec(seed=None), second, second * 1.1)
    check_malformed(LogLevelsCodec(seed=None), first, first * 1.1)


def test_a_delta_without_its_reference_is_refused():
    second = moments(30, 40)[1]
    _, reference = code(second)
    delta = code(second, reference, seed=None)[0].encoded
    assert delta.uses_reference
    with pytest.raises(FormatError, match="reference"):
        LogLevelsCodec().decode(delta, spec(second), Context())
