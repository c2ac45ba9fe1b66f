from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.baseline_schemes import BASELINES
from support.chains import Coded, check_malformed, decode_chain, encode, save_chain, spec_of, state_of
from support.moments import KINDS, SCALES, SHAPES, given_second, moments

from shrinkpoint.errors import CannotRepresentError, FormatError, ShrinkpointError
from shrinkpoint.schemes.auto.factors import Factors
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.base import Context, EncodedTensor, SaveContext
from shrinkpoint.schemes.catalogue import SCHEMES, build, options_of
from shrinkpoint.schemes.codec_io import matrix_shape
from shrinkpoint.state.training import Role

CODECS = [CentroidFirstMomentCodec, CentroidMomentumCodec, partial(CentroidMomentumCodec, linear=True)]
STEPS = st.sampled_from([None, 0.02, 0.3, 1.0, 4.0, 64.0])
LOSSES = st.sampled_from([0.005, 0.05, 0.2, 0.45, 1.0])


def read(codec: Any, encoded: EncodedTensor, spec: Any, context: Context) -> torch.Tensor:
    return codec.reconstruct(encoded, codec.decode(encoded, spec, Context()), spec, context)


def code(codec: Any, first: torch.Tensor, context: Context) -> tuple[Coded, torch.Tensor]:
    """What was coded, and the tensor that a reader gets, in a process with what is stored alone."""
    spec = spec_of(first, "m", Role.EXP_AVG)
    coded = encode(codec, first, spec, context)
    assert coded.planes == {}
    assert not coded.encoded.uses_reference
    restored = read(type(codec)(), coded.encoded, spec, context)
    assert restored.dtype == first.dtype
    assert torch.equal(restored.view(torch.int32), coded.value.view(torch.int32))
    return coded, restored


def units_of(codec: Any, first: torch.Tensor, context: Context) -> torch.Tensor:
    """What each element is measured in, in double precision; zero where that is subnormal."""
    if isinstance(codec, CentroidFirstMomentCodec):
        second = context.siblings[Role.EXP_AVG_SQ.value]
        return second.where(second >= torch.finfo().tiny, 0).double().sqrt()
    units = Factors.of_roots(first.reshape(matrix_shape(tuple(first.shape))).numpy()).product()
    return torch.from_numpy(units).reshape(first.shape).double()


def in_units(
    codec: Any, first: torch.Tensor, restored: torch.Tensor, context: Context
) -> tuple[torch.Tensor, ...]:
    """Both in units, flat, without the elements that have none; as they are where updates are linear in them."""
    units = units_of(codec, first, context)
    used = units >= 2.0**-125
    if codec.linear:
        units = torch.ones_like(units)
    return tuple((each.double()[used] / units[used]).reshape(-1) for each in (first, restored))


def lost(true: torch.Tensor, restored: torch.Tensor) -> float:
    return 1 - float((true * restored).sum() / true.square().sum())


@settings(max_examples=200)
@given(SHAPES, st.integers(0, 999), SCALES, KINDS, STEPS, LOSSES, st.sampled_from(CODECS))
def test_first_moments_are_read_as_written_never_longer_and_never_worse_than_zeros(
    shape, seed, scale, kind, step, loss, kind_of_codec
):
    first, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    codec, context = kind_of_codec(step=step, loss=loss), given_second(second)
    try:
        _, restored = code(codec, first, context)
    except CannotRepresentError:  # a gradient whose square is not to be told
        return
    units = units_of(codec, first, context)
    assert not bool(restored[units == 0].any())
    assert not bool((restored * first < 0).any())
    true, found = in_units(codec, first, restored, context)
    assume(scale * (step or 2.0**-6) > 1e-30)  # products are about to be subnormal, and restored as zeros
    size = float(true.square().sum())
    assert float(found.square().sum()) <= 1.0001 * size + 1e-30
    assert float((found - true).square().sum()) <= 1.005 * size + 1e-30  # centroids are rounded to 1/256


def roots(first: torch.Tensor, second: torch.Tensor, epsilon: float) -> torch.Tensor:
    """What Adam makes of two moments."""
    return first.double() / (second.double().sqrt() + epsilon)


@settings(max_examples=200)
@given(
    SHAPES,
    st.integers(0, 999),
    st.sampled_from([1e-8, 1e-3, 1.0, 1e12]),
    st.sampled_from(["plain", "dead row", "dead column", "sparse", "one sign"]),
    st.sampled_from([0.0, 1e-8, 1e-3]),
    st.floats(0, 3),
)
def test_the_update_is_what_it_would_have_been_however_far_the_second_moment_is_restored(
    shape, seed, scale, kind, epsilon, away
):
    first, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    restored = second * torch.exp2(away * noise)
    assume(not bool(((second > 0) & (restored < 1e-30)).any()))
    codec = CentroidFirstMomentCodec(step=0.05, second_moment=second, epsilon=epsilon)
    try:
        _, value = code(codec, first, given_second(restored))
    except CannotRepresentError:  # too far away
        assume(False)
    used = second > 0
    wanted, found = (each[used] for each in (roots(first, second, epsilon), roots(value, restored, epsilon)))
    # of a mean of 20 gradients, which is less than 4.5 roots large; 126 levels reach beyond. The centroid of a level lies anywhere in its
    # cell, so a value is one step away from it at most; and all are lengthened
    assert bool(((found - wanted).abs() <= 0.05 + 0.02 * wanted.abs()).all())


@settings(max_examples=100)
@given(
    st.integers(0, 999),
    LOSSES,
    st.sampled_from(CODECS),
    st.sampled_from(["plain", "sparse", "one sign", "dead row"]),
)
def test_no_more_is_lost_than_may_be(seed, loss, kind_of_codec, kind):
    """Of tensors that are small enough to be looked at as a whole, to the rounding of centroids."""
    first, second = moments(60, 90, seed=seed, kind=kind)
    codec, context = kind_of_codec(loss=loss), given_second(second)
    _, restored = code(codec, first, context)
    true, found = in_units(codec, first, restored, context)
    assert lost(true, found) <= loss + 0.002


@pytest.mark.parametrize("columns", [1, 1024, 4096])
def test_no_more_is_lost_than_may_be_of_large_tensors_either(columns):
    """Of which some elements are looked at, of every column of those that differ."""
    generator = torch.Generator().manual_seed(0)
    rows = 2**21 // columns
    first = torch.randn(rows, columns, generator=generator)
    if columns > 1:
        first[:, ::16] *= (
            30  # a column in sixteen, of which a sample of every 32nd element would see nothing else
        )
        first[:, 0] *= 1e-3
    context = given_second(torch.full((rows, columns), 100.0))
    _, restored = code(CentroidFirstMomentCodec(loss=0.1), first, context)
    assert lost(first.double(), restored.double()) <= 0.11


def test_a_level_stands_for_the_mean_of_its_elements():
    first = torch.tensor([[0.0, 0.2, 0.6, 0.9, 1.2, 1.3, 1.6, 1.7, 2.9, -0.6, -1.8, -3.1]])
    codec, context = CentroidFirstMomentCodec(step=1.0), given_second(torch.ones(1, 12))
    coded, restored = code(codec, first, context)
    longer = float(coded.encoded.params["step"])
    means = torch.tensor([0.0, 0.0, 0.92, 0.92, 0.92, 0.92, 1.7, 1.7, 3.0, -0.92, -1.7, -3.0])
    assert coded.encoded.params["radius"] == 3
    assert coded.encoded.params["centroids"] == [round(-0.08 * 256), round(-0.3 * 256), 0]
    assert restored.numpy() / longer == pytest.approx(means.reshape(1, -1).numpy(), abs=0.5 / 256)


def test_what_is_too_large_is_clipped_at_126_steps():
    first = torch.zeros(100, 100)
    first[0, 0], first[1, 1] = 1e9, -1e9
    coded, restored = code(CentroidFirstMomentCodec(step=1.0), first, given_second(torch.ones(100, 100)))
    assert coded.encoded.params["radius"] == 126
    assert (
        float(restored[0, 0]) == -float(restored[1, 1]) == pytest.approx(2 * 126)
    )  # lengthened, by 2 at most
    assert torch.count_nonzero(restored) == 2


def test_moments_that_are_all_zero_and_ones_without_a_unit_take_nothing():
    first, second = moments(60, 50)
    for m, v in ((first * 0, second), (first, second * 0), (first * 0, second * 0)):
        coded, restored = code(CentroidFirstMomentCodec(), m, given_second(v))
        assert not restored.any()
        assert coded.encoded.params["radius"] == 0
        assert coded.encoded.nbytes < 60
    assert not code(CentroidMomentumCodec(), first * 0, Context())[1].any()


def test_other_gradients_and_odd_values_are_refused():
    first, second = moments(30, 30)
    spec = spec_of(first)
    with pytest.raises(CannotRepresentError, match="too large"):
        encode(CentroidFirstMomentCodec(), first, spec, given_second(second * 1e-8))
    for context in (
        Context(),
        given_second(second.int()),
        given_second(second[:5]),
        given_second(-second),
        given_second(second / 0),
    ):
        with pytest.raises(CannotRepresentError, match="no second moment"):
            encode(CentroidFirstMomentCodec(), first, spec, context)
    for wrong in (
        first.int(),
        first * torch.inf,
        first * torch.nan,
        first[:0],
        first[:, :0],
        first.to(torch.float8_e5m2),
    ):
        with pytest.raises(CannotRepresentError):
            encode(CentroidMomentumCodec(), wrong, spec_of(wrong), Context())
        with pytest.raises(CannotRepresentError):
            encode(CentroidFirstMomentCodec(), wrong, spec_of(wrong), given_second(wrong.float().square()))
    large = torch.zeros(30, 32)
    large[:, :8] = 3.3e38
    with pytest.raises(CannotRepresentError, match="fp32's range"):
        encode(CentroidMomentumCodec(), large, spec_of(large), Context())


PARAMS = [
    ("step", [None, 0, 0.0, -1.0, 1e30, 1e-46, float("nan"), float("inf"), "1", True, [1.0]]),
    ("radius", [None, -1, 0, 3, 127, 255, 1.0, "1", True, [4]]),
    (
        "centroids",
        [None, 4, "1234", {}, [], [0], [0] * 5, [0, 0, 0, 128], [0, -129, 0, 0], [0, 0, 0.5, 0], [0, True, 0, 0],
         [[0], 0, 0, 0], [None, 0, 0, 0], [10**30, 0, 0, 0]],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in PARAMS for value in values])
@pytest.mark.parametrize("codec", CODECS)
def test_malformed_params_are_refused(codec, key, value):
    first, second = moments(30, 20)
    spec, context = spec_of(first), given_second(second)
    coded = encode(codec(step=0.3), first, spec, context).encoded
    radius = coded.params["radius"]
    assert radius == len(coded.params["centroids"]) > 1
    if isinstance(value, list) and len(value) == 4:
        value = value + [0] * (radius - 4)
    params = {**coded.params, key: value}
    if value is None:
        del params[key]
    with pytest.raises(FormatError):
        read(codec(), EncodedTensor(coded.codec, params, coded.sections), spec, context)


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_first_moments_are_refused(codec):
    first, second = moments(30, 70)
    spec, context = spec_of(first), given_second(second)
    coded = encode(codec(step=0.3), first, spec, context).encoded
    payload = coded.sections["levels"]
    others = {name: data for name, data in coded.sections.items() if name != "levels"}
    for sections in (
        {**others, "levels": payload[:-1]},
        {**others, "levels": payload[: len(payload) // 2]},
        {**others, "levels": b""},
        {**others, "levels": payload + b"\0"},
        {**coded.sections, "more": b""},
        {**others, "points": payload},
        {"levels": payload} if others else {"levels": payload, "factors": b""},
        {},
    ):
        with pytest.raises(ShrinkpointError):
            read(codec(), EncodedTensor(coded.codec, coded.params, sections), spec, context)


def test_damaged_copies_of_a_momentum_are_refused():
    momentum, _ = moments(30, 70)
    check_malformed(CentroidMomentumCodec(), momentum, momentum)


def test_a_second_moment_that_is_missing_or_another_ones_is_refused():
    first, second = moments(30, 20)
    spec = spec_of(first)
    coded = encode(CentroidFirstMomentCodec(), first, spec, given_second(second)).encoded
    for context in (
        Context(),
        given_second(second[:7]),
        given_second(second.int()),
        given_second(-second),
        given_second(second * torch.nan),
    ):
        with pytest.raises(FormatError, match="second moment"):
            read(CentroidFirstMomentCodec(), coded, spec, context)


def test_stored_tensors_of_no_elements_or_other_dtypes_are_refused():
    first, second = moments(30, 20)
    for codec in CODECS:
        coded = encode(codec(), first, spec_of(first), given_second(second)).encoded
        for strange in (first[:0], first.to(torch.float8_e5m2), first.int()):
            with pytest.raises(FormatError, match="stored exactly"):
                read(codec(), coded, spec_of(strange), given_second(strange.float()))


def test_levels_may_be_as_large_as_numbers_are():
    """What a malformed file says is restored or refused, and overflows nothing."""
    first, second = moments(30, 20)
    spec, context = spec_of(first), given_second(second.new_full((30, 20), 3e38))
    coded = encode(CentroidFirstMomentCodec(step=0.3), first, spec, given_second(second)).encoded
    value = read(
        CentroidFirstMomentCodec(), replace(coded, params={**coded.params, "step": 9e29}), spec, context
    )
    assert value.shape == first.shape


@pytest.mark.parametrize("name", sorted({*SCHEMES, *BASELINES} - {"auto"}))
def test_published_schemes_leave_a_momentum_without_a_second_moment_exact(name):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator) for _ in range(2)]
    states = [state_of(a__w=w, a__exp_avg=0.01 * torch.randn(64, 64, generator=generator)) for w in weights]
    options = options_of(name)
    if hasattr(options, "moments"):
        options = replace(options, moments="levels")

    def make(reference):
        return build(name, options, SaveContext(state=states[0], reference=reference))

    checkpoints, told = save_chain(states, make)
    for length, (state, one) in enumerate(zip(states, told, strict=True), 1):
        assert "a/exp_avg" not in one.kept_exactly
        restored = decode_chain(checkpoints[:length]).state
        assert torch.equal(restored.tensors["a/exp_avg"], state.tensors["a/exp_avg"])
