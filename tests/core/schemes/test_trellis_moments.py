from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import check_malformed, spec_of

from shrinkpoint.entropy.trellis import NOISE
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError, ShrinkpointError
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Quantizer
from shrinkpoint.schemes.dithered_moments import (
    DitheredFirstMomentCodec,
    DitheredMomentumCodec,
    FactoredSecondMomentCodec,
)
from shrinkpoint.schemes.trellis_moments import TrellisFirstMomentCodec, TrellisMomentumCodec
from shrinkpoint.schemes.trellis_points import WIDER
from shrinkpoint.state import Role

SHAPES = st.sampled_from([(1,), (7,), (1, 1), (1, 30), (30, 1), (12, 40), (4, 3, 3, 3), (2, 1, 5), (5, 70)])
SCALES = st.sampled_from([1e-25, 1e-8, 1e-3, 1.0, 1e12])
KINDS = st.sampled_from(["plain", "dead row", "dead column", "sparse", "zero", "subnormal", "far row"])
CODECS = [TrellisFirstMomentCodec, TrellisMomentumCodec]


def moments(
    *shape: int, seed: int = 0, scale: float = 1e-4, kind: str = "plain"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A first and a second moment of one made-up gradient whose size differs from row to row and column to column."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    size = scale * torch.rand(rows, 1, generator=generator) * torch.rand(1, columns, generator=generator)
    gradients = size * torch.randn(20, rows, columns, generator=generator)
    if kind == "dead row":
        gradients[:, 0] = 0
    if kind == "dead column":
        gradients[:, :, -1] = 0
    if kind == "sparse":
        gradients *= torch.rand(rows, columns, generator=generator) > 0.5
    if kind == "zero":
        gradients *= 0
    if kind == "far row":
        gradients[:, 0] *= 1e-12
    if kind == "subnormal":
        gradients = 1e-41 * torch.randn(20, rows, columns, generator=generator)
    first, second = gradients.mean(dim=0), gradients.square().mean(dim=0)
    return first.reshape(shape), second.reshape(shape)


def beside(second: torch.Tensor) -> Context:
    """The context of a first moment whose second moment is restored as this."""
    return Context(siblings={Role.EXP_AVG_SQ.value: second})


def read(codec: Any, encoded: EncodedTensor, spec: Any, context: Context) -> torch.Tensor:
    return codec.reconstruct(encoded, codec.decode(encoded, spec, Context()), spec, context)


def reread(codec: Any, coded: Coded, spec: Any, context: Context) -> torch.Tensor:
    """The tensor that a reader gets of a base; its planes are the writer's."""
    reader = type(codec)()
    planes = reader.decode(coded.encoded, spec, Context(beside=context.beside))
    assert planes.keys() == coded.planes.keys()
    assert all(np.array_equal(planes[name], coded.planes[name]) for name in planes)
    return reader.reconstruct(coded.encoded, planes, spec, context)


@settings(max_examples=100)
@given(
    SHAPES,
    st.integers(0, 999),
    SCALES,
    KINDS,
    st.sampled_from([0.05, 0.5, 4.0, 30.0, 128.0]),
    st.sampled_from([4, 8]),
)
def test_adams_first_moments_are_read_as_written(shape, seed, scale, kind, step, states):
    first, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    spec, context = spec_of(first, "m", Role.EXP_AVG), beside(second)
    codec = TrellisFirstMomentCodec(step=step, seed=seed, states=states)
    try:
        coded = codec.encode(first, spec, context)
    except CannotRepresentError:  # a gradient whose square is not to be told
        with pytest.raises(CannotRepresentError):
            codec.restored(first, spec, context)
        return
    restored = reread(codec, coded, spec, context)
    assert torch.equal(restored, coded.value)
    assert torch.equal(codec.restored(first, spec, context), coded.value)
    second = second.where(second >= torch.finfo().tiny, 0)
    assert bool((restored[second == 0] == 0).all())
    unit = step * second.sqrt()
    inside = first.abs() <= 109 * unit
    error = (restored - first).abs()
    assert bool((error[inside] <= 1.0001 * unit[inside] + 2.4e-38).all())


@settings(max_examples=100)
@given(SHAPES, st.integers(0, 999), SCALES, KINDS, st.sampled_from([0.05, 0.5, 4.0, 128.0]))
def test_a_momentum_in_units_of_its_own_is_read_as_written(shape, seed, scale, kind, step):
    momentum, _ = moments(*shape, seed=seed, scale=scale, kind=kind)
    spec = spec_of(momentum, "m", Role.EXP_AVG)
    codec = TrellisMomentumCodec(step=step, seed=seed)
    coded = codec.encode(momentum, spec, Context())
    restored = reread(codec, coded, spec, Context())
    assert torch.equal(restored, coded.value)
    assert torch.equal(codec.restored(momentum, spec, Context()), coded.value)
    wide = momentum.double().reshape(momentum.shape[0] if momentum.dim() > 1 else 1, -1)
    squares = wide.square()
    units = (
        squares.mean(dim=1, keepdim=True) * squares.mean(dim=0) / squares.mean().clamp_min(1e-300)
    ).sqrt()
    error, inside = (restored.double().reshape(wide.shape) - wide).abs(), wide.abs() <= 80 * step * units
    # factors are rounded to a quarter octave each, twice
    assert bool((error[inside] <= 1.2 * step * units[inside] + 2.4e-38 * max(step, 4 / step)).all())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("states", [4, 8])
def test_first_moments_are_right_on_average(codec, states):
    first = torch.full((200, 200), 0.3)
    context = beside(torch.full((200, 200), 0.09))
    coded = codec(step=4.0, seed=5, states=states).encode(first, spec_of(first), context)
    assert abs(float(coded.value.mean()) - 0.3) < 0.01
    other = codec(step=4.0, seed=6, states=states).encode(first, spec_of(first), context)
    assert not torch.equal(coded.value, other.value)
    apart = (coded.value - 0.3) * (other.value - 0.3)
    assert abs(float(apart.mean())) < 0.02 * float((coded.value - 0.3).square().mean())


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("step", [0.2, 1.0, 6.0])
def test_the_noise_does_not_depend_on_the_moment(step, states):
    generator = torch.Generator().manual_seed(0)
    roots = 10 ** torch.rand(300, 384, generator=generator)
    first = 0.3 * roots * torch.randn(300, 384, generator=generator)
    codec = TrellisFirstMomentCodec(step=step, seed=3, states=states)
    value = codec.encode(first, spec_of(first), beside(roots.square())).value
    error, known = ((value - first) / (step * roots)).reshape(-1), (first / roots).reshape(-1)
    assert float(error.square().mean()) == pytest.approx(NOISE[states], rel=0.02)
    assert abs(float(error.mean())) < 0.003
    assert abs(float(torch.corrcoef(torch.stack([error, known]))[0, 1])) < 0.012
    assert abs(float(torch.corrcoef(torch.stack([error.square(), known.square()]))[0, 1])) < 0.012


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("step", [0.5, 1.0, 4.0])
def test_fewer_bits_are_written_than_by_rounding_with_the_same_noise(step, states):
    generator = torch.Generator().manual_seed(0)
    first = 0.2 * torch.randn(400, 384, generator=generator)
    spec, context = spec_of(first), beside(torch.ones(400, 384))
    rounded = DitheredFirstMomentCodec(step=step, seed=3).encode(first, spec, context)
    coded = TrellisFirstMomentCodec(step=step * WIDER[states], seed=3, states=states).encode(
        first, spec, context
    )
    noises = [float((each.value - first).square().mean()) for each in (rounded, coded)]
    assert noises[1] == pytest.approx(noises[0], rel=0.02)
    assert coded.encoded.nbytes < 0.9 * rounded.encoded.nbytes


def test_a_momentum_takes_fewer_bits_too():
    momentum, _ = moments(300, 300)
    spec = spec_of(momentum)
    rounded = DitheredMomentumCodec(step=4.0).encode(momentum, spec, Context())
    coded = TrellisMomentumCodec(step=4.0 * WIDER[4]).encode(momentum, spec, Context())
    assert coded.encoded.nbytes < 0.9 * rounded.encoded.nbytes


@pytest.mark.parametrize("states", [4, 8])
def test_where_the_second_moment_is_zero_the_first_is_too(states):
    first, second = moments(60, 50, kind="sparse")
    second[7], second[:, 11] = 0, 0
    first[0] = 0
    coded = TrellisFirstMomentCodec(step=0.5, states=states).encode(first, spec_of(first), beside(second))
    assert bool((coded.value[second == 0] == 0).all())
    assert bool((coded.value[second > 0] != 0).any())
    nothing = TrellisFirstMomentCodec(step=0.5).encode(first * 0, spec_of(first), beside(second * 0))
    assert not nothing.value.any()


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("where", [(0, 0), (1, 1), (50, 99), (99, 99)])
def test_what_is_too_large_is_clipped_at_110_steps(states, where):
    first = torch.zeros(100, 100)
    first[where], first[70, 70] = 1e9, -1e9
    codec = TrellisFirstMomentCodec(step=1.0, seed=4, states=states)
    coded = codec.encode(first, spec_of(first), beside(torch.ones(100, 100)))
    assert torch.equal(reread(codec, coded, spec_of(first), beside(torch.ones(100, 100))), coded.value)
    assert abs(float(coded.value[where]) - 110) <= 1.001
    assert abs(float(coded.value[70, 70]) + 110) <= 1.001


@pytest.mark.parametrize("states", [4, 8])
def test_rows_of_clipped_moments_round_trip_though_they_are_predicted(states):
    """Directions that rows share move places by up to four steps: the points must be in reach nevertheless.

    Of a momentum's own units few elements are 110 steps; with steps as short as these, many are.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(200, 1, generator=generator), torch.randn(1, 128, generator=generator)
    momentum = torch.sign(rows * columns) + 1e-3 * torch.randn(200, 128, generator=generator)
    codec = TrellisMomentumCodec(step=0.005, seed=1, states=states)
    coded = codec.encode(momentum, spec_of(momentum), Context())
    assert torch.equal(reread(codec, coded, spec_of(momentum), Context()), coded.value)
    assert torch.equal(codec.restored(momentum, spec_of(momentum), Context()), coded.value)


def test_other_gradients_and_odd_values_are_refused():
    first, second = moments(30, 30)
    spec = spec_of(first)
    with pytest.raises(CannotRepresentError, match="too large"):
        TrellisFirstMomentCodec().encode(first, spec, beside(second * 1e-8))
    with pytest.raises(CannotRepresentError, match="no second moment"):
        TrellisFirstMomentCodec().encode(first, spec, Context())
    for wrong in (
        first.double(),
        first * torch.inf,
        first * torch.nan,
        first[:0],
        first[:, :0],
        first.bfloat16(),
    ):
        with pytest.raises(CannotRepresentError):
            TrellisMomentumCodec().encode(wrong, spec_of(wrong), Context())
        with pytest.raises(CannotRepresentError):
            TrellisFirstMomentCodec().encode(wrong, spec_of(wrong), beside(wrong.float().square()))
    with pytest.raises(CannotRepresentError, match="fp32's range"):
        TrellisMomentumCodec(step=128.0).encode(first * 0 + 1e36, spec, Context())
    coded = TrellisFirstMomentCodec().encode(first, spec, beside(second))
    with pytest.raises(FormatError, match="second moment"):
        TrellisFirstMomentCodec().reconstruct(coded.encoded, coded.planes, spec, Context())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 0},
        {"step": -1.0},
        {"step": 129},
        {"step": float("nan")},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 1.0},
        {"seed": True},
        {"states": 2},
        {"states": 16},
    ],
)
def test_options_are_checked(codec, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        codec(**wrong)


def test_damaged_copies_of_a_momentum_are_refused():
    momentum, _ = moments(30, 70)
    check_malformed(TrellisMomentumCodec(), momentum, momentum)


PARAMS = [
    ("step", [None, 0, 0.0, -1.0, float("nan"), float("inf"), "1", True, [1.0]]),
    ("seed", [None, -1, 2**32, 1.0, "1", True, [1]]),
    ("states", [None, 0, 2, 5, 6, 7, 16, 4.0, "4", True, [4]]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in PARAMS for value in values])
@pytest.mark.parametrize("codec", CODECS)
def test_malformed_params_are_refused(codec, key, value):
    first, second = moments(30, 20)
    spec, context = spec_of(first), beside(second)
    coded = codec().encode(first, spec, context).encoded
    params = {**coded.params, key: value}
    if value is None:
        del params[key]
    with pytest.raises(
        FormatError, match=key if key != "states" or type(value) is not int else "states|trellis"
    ):
        read(codec(), EncodedTensor(coded.codec, params, coded.sections), spec, context)


def test_damaged_first_moments_are_refused():
    first, second = moments(30, 70)
    spec, context = spec_of(first), beside(second)
    coded = TrellisFirstMomentCodec(step=0.5).encode(first, spec, context).encoded
    payload = coded.sections["points"]
    for sections in (
        {"points": payload[:-1]},
        {"points": payload[: len(payload) // 2]},
        {"points": b""},
        {"points": payload + b"\0"},
        {"points": payload, "factors": b""},
        {"levels": payload},
        {},
    ):
        with pytest.raises(ShrinkpointError):
            read(TrellisFirstMomentCodec(), EncodedTensor(coded.codec, coded.params, sections), spec, context)


def test_stored_tensors_of_no_elements_or_other_dtypes_are_refused():
    first, _ = moments(30, 20)
    coded = TrellisMomentumCodec().encode(first, spec_of(first), Context())
    with pytest.raises(FormatError, match="empty"):
        TrellisMomentumCodec().decode(coded.encoded, spec_of(first[:0]), Context())
    with pytest.raises(FormatError):
        TrellisMomentumCodec().reconstruct(coded.encoded, coded.planes, spec_of(first.half()), Context())


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_do_not_depend_on_threads(codec):
    first, second = moments(600, 700)
    made = codec(step=1.0)
    assert isinstance(made, Quantizer)
    siblings = {Role.EXP_AVG_SQ.value: second}
    one, two = (made.encode(first, spec_of(first), Context(siblings=siblings, threads=n)) for n in (1, 2))
    assert one.encoded == two.encoded
    assert torch.equal(one.value, two.value)


@pytest.mark.parametrize("kind", ["subnormal", "far row", "plain"])
@pytest.mark.parametrize("scale", [1e-37, 1e-33, 1e-20])
def test_a_process_without_subnormals_restores_the_same_bits(kind, scale):
    first, second = moments(40, 30, scale=scale, kind=kind)
    spec = spec_of(first)
    context = beside(FactoredSecondMomentCodec().encode(second, spec, Context()).value)  # without subnormals
    made = [TrellisMomentumCodec(step=0.5), TrellisFirstMomentCodec(step=30.0)]
    coded = [(codec, codec.encode(first, spec, context)) for codec in made]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        again = [reread(codec, one, spec, context) for codec, one in coded]
    finally:
        torch.set_flush_denormal(False)
    for (_, one), value in zip(coded, again, strict=True):
        assert torch.equal(value.view(torch.int32), one.value.view(torch.int32))
