"""State to a share of each element: what is guaranteed of every element, chains, and files that are malformed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import Coded, check_malformed, encode, spec_of
from support.moments import KINDS, SCALES, SHAPES, moments

from shrinkpoint.errors import CannotRepresentError, FormatError, ShrinkpointError
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.state.training import Role, TensorSpec

TINY = torch.finfo().tiny


def spec(tensor: torch.Tensor) -> TensorSpec:
    return spec_of(tensor, "s", Role.STATE)


def code(
    tensor: torch.Tensor, reference: ReferenceState | None = None, **options
) -> tuple[Coded, ReferenceState]:
    """What was coded, and what a reader holds of it, who gets the same."""
    codec = LogLevelsCodec(**options)
    coded = encode(codec, tensor, spec(tensor), Context(reference=reference))
    context = Context(reference=reference if coded.encoded.uses_reference else None)
    planes = LogLevelsCodec().decode(coded.encoded, spec(tensor), context)
    restored = LogLevelsCodec().reconstruct(coded.encoded, planes, spec(tensor), context)
    assert restored.dtype == tensor.dtype
    assert restored.shape == tensor.shape
    assert torch.equal(restored, coded.value)
    assert np.array_equal(planes["exponent"], coded.planes["exponent"])
    return coded, ReferenceState(coded.encoded.codec, coded.encoded.params, planes)


def read(encoded: EncodedTensor, tensor: torch.Tensor, context: Context) -> torch.Tensor:
    """What a reader gets."""
    planes = LogLevelsCodec().decode(encoded, spec(tensor), context)
    return LogLevelsCodec().reconstruct(encoded, planes, spec(tensor), context)


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
    rebased = LogLevelsCodec().rebase(delta.encoded, held_next, spec(tensor))
    assert rebased is not None
    assert not rebased.uses_reference
    assert torch.equal(read(rebased, tensor, Context()), delta.value)


@pytest.mark.parametrize("bad", [torch.full((3, 3), torch.nan), torch.full((3, 3), torch.inf), torch.ones(0)])
def test_what_cannot_be_coded_is_refused(bad):
    with pytest.raises(CannotRepresentError):
        encode(LogLevelsCodec(), bad, spec(bad), Context())


def test_half_precision_that_would_become_infinite_is_refused():
    tensor = torch.full((8, 8), 60_000.0, dtype=torch.float16)
    with pytest.raises(CannotRepresentError, match="range"):
        encode(LogLevelsCodec(step=32), tensor, spec(tensor), Context())


@pytest.mark.parametrize(
    "params",
    [
        {"step": 0},
        {"step": 33},
        {"seed": -1},
        {"step": 8.0},
        {"step": None},
        {"seed": 2**32},
        {"seed": 1.0},
        {"seed": True},
        {"signed": 1},
        {"signed": None},
    ],
)
def test_malformed_params_are_refused(params):
    coded, _ = code(moments(12, 40)[1])
    encoded = replace(coded.encoded, params={**coded.encoded.params, **params})
    with pytest.raises(FormatError):
        LogLevelsCodec().decode(encoded, spec(coded.value), Context())


@pytest.mark.parametrize("shift", [None, 1.0, True, "1", 4064, -4064])
def test_a_malformed_shift_of_a_delta_is_refused(shift):
    second = moments(12, 40)[1]
    _, reference = code(second)
    delta = code(second * 1.3, reference, seed=None)[0].encoded
    assert delta.params["shift"] == 6
    with pytest.raises(FormatError, match="shift"):
        LogLevelsCodec().decode(
            replace(delta, params={**delta.params, "shift": shift}), spec(second), Context(reference)
        )


@pytest.mark.parametrize("step", [1, 8, 32])
@pytest.mark.parametrize("signed", [False, True])
def test_zeros_have_a_section_of_their_own_where_there_are_any(step, signed):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.rand(30, 41, generator=generator) + 0.5
    tensor *= torch.where(torch.rand(30, 41, generator=generator) < 0.5, -1, 1) if signed else 1
    others = {"levels", "factors", *(["signs"] if signed else [])}
    base, reference = code(tensor, step=step)
    assert base.encoded.sections.keys() == others
    some = tensor.where(torch.rand(30, 41, generator=generator) < 0.7, 0)
    for before in (None, reference):  # what becomes zero, and what was zero
        coded, between = code(some, before, step=step)
        assert coded.encoded.sections.keys() - {"factors"} == (others | {"zeros"}) - {"factors"}
        check_shares(some, coded.value, step)
    coded, _ = code(tensor, between, step=step)
    assert "zeros" not in coded.encoded.sections
    check_shares(tensor, coded.value, step)


@pytest.mark.parametrize("step", [1, 32])
def test_the_least_and_the_greatest_numbers_are_told_apart_in_one_row(step):
    """Levels of any distance from their predictions, in a base and in a delta."""
    tensor = torch.logspace(-37, 38, 400).reshape(8, 50)
    mixed = tensor.flatten()[torch.randperm(400, generator=torch.Generator().manual_seed(0))].reshape(8, 50)
    _, reference = code(tensor, step=step)
    for one in (code(mixed, step=step)[0], code(mixed, reference, step=step)[0]):
        check_shares(mixed, one.value, step)


def test_malformed_sections_are_refused():
    first = moments(12, 40, kind="sparse")[0]
    coded, reference = code(first)
    delta = code(first, reference, seed=None)[0].encoded
    assert coded.encoded.sections.keys() == {"levels", "factors", "zeros", "signs"}
    assert delta.sections.keys() == {"levels", "zeros", "signs"}
    for encoded, context in ((coded.encoded, Context()), (delta, Context(reference))):
        for name, data in encoded.sections.items():
            others = {key: value for key, value in encoded.sections.items() if key != name}
            sections = [{**others, name: wrong} for wrong in (b"", data[:-1], data + b"\0")]
            if name != "zeros":  # which there need not be
                sections.append(others)
            sections.append({**encoded.sections, "more": b""})
            for damaged in sections:
                broken = replace(encoded, sections=damaged)
                with pytest.raises(ShrinkpointError):
                    read(broken, first, context)


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
