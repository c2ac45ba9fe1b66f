from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.baseline_schemes import BASELINES
from support.chains import Coded, check_malformed, decode_chain, encode, save_chain, spec_of, state_of
from support.moments import KINDS, SCALES, SHAPES, given_second, moments
from support.teams import in_team

from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError, ShrinkpointError
from shrinkpoint.schemes.auto import moment_kernels
from shrinkpoint.schemes.auto.factors import Factors
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.base import Context, EncodedTensor, SaveContext
from shrinkpoint.schemes.catalogue import SCHEMES, build, options_of
from shrinkpoint.schemes.codec_io import matrix_shape
from shrinkpoint.schemes.moments import FirstMomentCodec
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


def test_where_the_root_is_less_than_epsilon_first_moments_stay():
    first, second = moments(60, 90, scale=1e-12)
    restored = 4 * second
    codec = CentroidFirstMomentCodec(step=0.02, second_moment=second, epsilon=1e-3)
    kept = code(codec, first, given_second(restored))[1]
    assert torch.allclose(kept, code(CentroidFirstMomentCodec(step=0.02), first, given_second(restored))[1])
    moved = code(replace(codec, epsilon=0.0), first, given_second(restored))[1]
    assert float((moved / first).median()) == pytest.approx(2, rel=0.02)


def test_first_moments_whose_second_one_is_zero_or_of_another_shape_stay():
    first, second = moments(60, 90)
    plain = code(CentroidFirstMomentCodec(step=0.1), first, given_second(second))[1]
    for unknown in (second * 0, second[:5], second.reshape(90, 60)):
        codec = CentroidFirstMomentCodec(step=0.1, second_moment=unknown)
        assert torch.equal(code(codec, first, given_second(second))[1], plain)


def test_no_first_moment_is_made_larger_than_any_of_its_gradient_is():
    """A second moment that is next to none, as of another gradient, makes no first one that is next to infinite."""
    first, second = moments(60, 90)
    codec = CentroidFirstMomentCodec(step=1.0, second_moment=second * 1e-20, epsilon=0.0)
    value = code(codec, first, given_second(second))[1]
    assert float((value.abs() / second.sqrt()).max()) <= 31 * 1.01
    assert bool(torch.isfinite(value).all())


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


def test_the_step_is_the_widest_that_loses_no_more():
    first, second = moments(60, 90)
    context = given_second(second)
    steps = {}
    for loss in (0.005, 0.05, 0.2, 0.45):
        codec = CentroidFirstMomentCodec(loss=loss)
        chosen = [2.0 ** (k / 4) for k in range(-24, 13)]
        fits = [
            step
            for step in chosen
            if lost(
                *in_units(codec, first, code(CentroidFirstMomentCodec(step=step), first, context)[1], context)
            )
            <= loss
        ]
        coded = encode(codec, first, spec_of(first), context)
        assert coded.value.equal(
            encode(CentroidFirstMomentCodec(step=max(fits)), first, spec_of(first), context).value
        )
        steps[loss] = coded.encoded.nbytes
    assert list(steps.values()) == sorted(steps.values(), reverse=True)


@pytest.mark.parametrize("kind_of_codec", CODECS)
@pytest.mark.parametrize("step", [0.1, 0.5, 1.0, 2.0])
def test_a_moment_is_restored_as_long_as_it_was(kind_of_codec, step):
    """While zeros are no better: then half is lost of what is lost without lengthening."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(300, 200, generator=generator)
    codec, context = kind_of_codec(step=step), given_second(torch.ones(300, 200))
    coded, restored = code(codec, first, context)
    true, found = in_units(codec, first, restored, context)
    size = float(true.square().sum())
    assert float(found.square().sum()) == pytest.approx(size, rel=1e-4)
    lengthened = float(coded.encoded.params["step"]) / step
    assert lengthened >= 1 - 1e-6
    plain = found / lengthened
    assert float((true * plain).sum()) == pytest.approx(float(plain.square().sum()), rel=5e-3)  # centroids
    assert 1 - lost(true, found) == pytest.approx((1 - lost(true, plain)) ** 0.5, rel=2e-3)


def test_a_level_stands_for_the_mean_of_its_elements():
    first = torch.tensor([[0.0, 0.2, 0.6, 0.9, 1.2, 1.3, 1.6, 1.7, 2.9, -0.6, -1.8, -3.1]])
    codec, context = CentroidFirstMomentCodec(step=1.0), given_second(torch.ones(1, 12))
    coded, restored = code(codec, first, context)
    longer = float(coded.encoded.params["step"])
    means = torch.tensor([0.0, 0.0, 0.92, 0.92, 0.92, 0.92, 1.7, 1.7, 3.0, -0.92, -1.7, -3.0])
    assert coded.encoded.params["radius"] == 3
    assert coded.encoded.params["centroids"] == [round(-0.08 * 256), round(-0.3 * 256), 0]
    assert restored.numpy() / longer == pytest.approx(means.reshape(1, -1).numpy(), abs=0.5 / 256)


def test_a_first_level_is_never_beyond_its_multiple():
    """An element that just rounds to it would else be restored farther from the truth than zero is."""
    first = torch.full((20, 20), 1.4)
    first[0] = 0.55
    coded, _ = code(CentroidFirstMomentCodec(step=1.0), first, given_second(torch.ones(20, 20)))
    assert coded.encoded.params["centroids"] == [0]


def test_levels_from_the_seventeenth_on_are_multiples():
    first = torch.arange(0, 40, 0.1).reshape(1, -1)
    coded, restored = code(CentroidFirstMomentCodec(step=1.0), first, given_second(4 * torch.ones(1, 400)))
    assert coded.encoded.params["radius"] == 20
    assert len(coded.encoded.params["centroids"]) == 16
    multiples = restored[0, 350:] / (2 * float(coded.encoded.params["step"]))
    assert multiples.numpy() == pytest.approx(np.rint(multiples.numpy()), abs=1e-5)


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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 0},
        {"step": -1.0},
        {"step": 65},
        {"step": float("nan")},
        {"loss": 0},
        {"loss": 1.01},
        {"loss": float("nan")},
    ],
)
def test_options_are_checked(codec, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        codec(**wrong)


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


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_do_not_depend_on_threads(codec):
    first, second = moments(600, 700)
    made = codec(step=1.0)
    siblings = {Role.EXP_AVG_SQ.value: second}
    context = Context(siblings=siblings)
    one, two = (in_team(n, lambda: encode(made, first, spec_of(first), context)) for n in (1, 2))
    assert one.encoded == two.encoded
    assert torch.equal(one.value, two.value)


@pytest.mark.parametrize("kind", ["subnormal", "far row", "plain"])
@pytest.mark.parametrize("scale", [1e-37, 1e-33, 1e-20])
def test_a_process_without_subnormals_restores_the_same_bits(kind, scale):
    first, second = moments(40, 30, scale=scale, kind=kind)
    spec = spec_of(first)
    context = given_second(encode(FactoredSecondMomentCodec(), second, spec, Context()).value)
    made = [CentroidMomentumCodec(step=0.5), CentroidMomentumCodec(), CentroidFirstMomentCodec(step=30.0)]
    coded = [(codec, encode(codec, first, spec, context)) for codec in made]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        again = [read(type(codec)(), one.encoded, spec, context) for codec, one in coded]
    finally:
        torch.set_flush_denormal(False)
    for (_, one), value in zip(coded, again, strict=True):
        assert torch.equal(value.view(torch.int32), one.value.view(torch.int32))


@pytest.mark.parametrize("codec", [FirstMomentCodec(), CentroidFirstMomentCodec(step=3.0)], ids=type)
def test_a_root_of_a_second_moment_below_the_normal_numbers_is_zero_in_every_process(codec):
    """Second moments that are stored exactly may be subnormal; the root of one is not."""
    first, second = 1e-20 * torch.randn(16, 16), torch.full((16, 16), 1e-40)
    spec, context = spec_of(first), given_second(second)
    second[0] = 1e-38
    coded = encode(codec, first, spec, context)
    assert not coded.value[1:].any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        planes = type(codec)().decode(coded.encoded, spec, Context())
        again = type(codec)().reconstruct(coded.encoded, planes, spec, context)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(again.view(torch.int32), coded.value.view(torch.int32))


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.001, 0.3, 3.0, 64.0]),
    st.integers(1, 5000),
    st.sampled_from([3, 126]),
    st.booleans(),
)
def test_levels_and_what_they_stand_for_by_numpy(seed, step, size, reach, weighted):
    generator, step, least = np.random.default_rng(seed), np.float32(step), np.float32(2.0**-125)
    units = (generator.random(size) * 10.0 ** generator.integers(-44, 10, size)).astype(np.float32)
    units[generator.random(size) < 0.1] = 0
    with np.errstate(all="ignore"):
        values = (units * generator.standard_normal(size) ** 3 * 10 * step).astype(np.float32)
        unit = step * units
        sizes = np.where(unit >= least, np.abs(values) / np.maximum(unit, least), np.float32(0))
    wanted = np.rint(np.minimum(sizes, np.float32(reach))).astype(np.int64)
    out, sums, counts = np.empty(size, np.uint8), np.zeros(128), np.zeros(128)
    assert moment_kernels.levels(values, units, step, reach, weighted, out, sums, counts) == wanted.max()
    weights = np.square(units.astype(np.float64)) if weighted else np.ones(size)
    assert np.array_equal(out.astype(int) - reach, np.where(values < 0, -wanted, wanted))
    assert counts == pytest.approx(np.bincount(wanted, weights=weights, minlength=128), rel=1e-9, abs=0)
    assert sums == pytest.approx(
        np.bincount(wanted, weights=weights * sizes.astype(np.float64), minlength=128), rel=1e-9, abs=0
    )

    stands = (step * np.arange(reach + 1)).astype(np.float32)
    restored = np.empty(size, np.float32)
    moment_kernels.unlevel(out, units, stands, reach, restored)
    with np.errstate(all="ignore"):
        found = stands[wanted] * units
    found = np.where(found >= least, found, np.float32(0))
    assert np.array_equal(restored, np.where(values < 0, -found, found))
    with np.errstate(all="ignore"):
        beyond = (np.abs(values) > np.float32(5) * units) & (units > 0)
    assert moment_kernels.count_beyond(values, units, np.float32(5)) == np.count_nonzero(beyond)
    used = units >= least
    divisors = np.ones(size) if weighted else units.astype(np.float64)
    squares = np.square(values[used].astype(np.float64) / divisors[used]).sum()
    assert moment_kernels.square_sum(values, units, weighted) == pytest.approx(float(squares), rel=1e-9)


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


@pytest.mark.parametrize("largest", [5.0, 20.0, 100.0, 1000.0])
@pytest.mark.parametrize("loss", [0.05, 0.002, 0.0002, 1e-7])
def test_a_few_large_elements_do_not_make_a_finer_moment_coarser(largest, loss):
    """Before, a step size that clipped more than `loss` was made narrower, down to one that clipped nearly all."""
    moment = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
    moment[::7, ::5] *= torch.linspace(1, largest, 14)[:, None]

    def share_lost(codec: CentroidMomentumCodec) -> float:
        return lost(*in_units(codec, moment, code(codec, moment, Context())[1], Context()))

    least = min(share_lost(CentroidMomentumCodec(step=2.0 ** (size / 4))) for size in range(-24, 25))
    # centroids are rounded to 1/256 of a step
    assert share_lost(CentroidMomentumCodec(loss=loss)) <= max(1.01 * loss, 1.3 * least)
