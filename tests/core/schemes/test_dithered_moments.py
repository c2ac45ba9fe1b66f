from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import check_malformed, save_chain, spec_of, state_of

from shrinkpoint.coding import decode_chain
from shrinkpoint.entropy.rans import encode_symbols
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError, ShrinkpointError
from shrinkpoint.schemes.base import Context, EncodedTensor, Occasion, Quantizer
from shrinkpoint.schemes.catalogue import SCHEMES, build, options_of
from shrinkpoint.schemes.dithered_moments import (
    DitheredFirstMomentCodec,
    DitheredMomentumCodec,
    FactoredSecondMomentCodec,
)
from shrinkpoint.schemes.factors import Factors
from shrinkpoint.schemes.moments import FirstMomentCodec
from shrinkpoint.schemes.trellis_moments import TrellisFirstMomentCodec
from shrinkpoint.state import Role

SHAPES = st.sampled_from([(1,), (7,), (1, 1), (1, 30), (30, 1), (12, 40), (4, 3, 3, 3), (2, 1, 5)])
SCALES = st.sampled_from([1e-25, 1e-8, 1e-3, 1.0, 1e12])
KINDS = st.sampled_from(["plain", "dead row", "dead column", "sparse", "zero", "subnormal", "far row"])


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


def read(codec, encoded, spec, context):
    return codec.reconstruct(encoded, codec.decode(encoded, spec, Context()), spec, context)


def reread(codec, coded, spec, context):
    """The tensor that a reader gets of a base; its planes are the writer's."""
    reader = type(codec)()
    planes = reader.decode(coded.encoded, spec, Context(beside=context.beside))
    assert planes.keys() == coded.planes.keys()
    assert all(np.array_equal(planes[name], coded.planes[name]) for name in planes)
    return reader.reconstruct(coded.encoded, planes, spec, context)


@settings(max_examples=150)
@given(SHAPES, st.integers(0, 999), SCALES, KINDS, st.sampled_from([0.05, 0.5, 4.0, 30.0]))
def test_adams_moments_are_read_as_written_and_never_zero_where_they_were_not(shape, seed, scale, kind, step):
    first, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    spec_v, spec_m = spec_of(second, "v", Role.EXP_AVG_SQ), spec_of(first, "m", Role.EXP_AVG)
    codec_v = FactoredSecondMomentCodec()
    v = codec_v.encode(second, spec_v, Context())
    assert torch.equal(reread(codec_v, v, spec_v, Context()), v.value)
    assert torch.equal(codec_v.restored(second, spec_v, Context()), v.value)
    assert bool((v.value[second > 0] > 0).all())
    if second.dim() == 2:
        assert bool((v.value[second.sum(dim=1) == 0] == 0).all())
        assert bool((v.value[:, second.sum(dim=0) == 0] == 0).all())
    context = Context(siblings={Role.EXP_AVG_SQ.value: v.value})
    codec = DitheredFirstMomentCodec(step=step, seed=seed)
    try:
        m = codec.encode(first, spec_m, context)
    except CannotRepresentError:  # a gradient whose second moment no product of two vectors resembles
        with pytest.raises(CannotRepresentError):
            codec.restored(first, spec_m, context)
        return
    restored = reread(codec, m, spec_m, context)
    assert torch.equal(restored, m.value)
    assert torch.equal(codec.restored(first, spec_m, context), m.value)
    assert bool((restored[v.value == 0] == 0).all())
    unit = step * v.value.sqrt()
    inside = first.abs() <= 125 * unit
    assert bool(((restored - first).abs()[inside] <= 0.5001 * unit[inside]).all())


@settings(max_examples=150)
@given(SHAPES, st.integers(0, 999), SCALES, KINDS, st.sampled_from([0.05, 0.5, 4.0, 64.0]))
def test_a_momentum_of_its_own_is_read_as_written(shape, seed, scale, kind, step):
    momentum, _ = moments(*shape, seed=seed, scale=scale, kind=kind)
    spec = spec_of(momentum, "m", Role.EXP_AVG)
    codec = DitheredMomentumCodec(step=step, seed=seed)
    coded = codec.encode(momentum, spec, Context())
    restored = reread(codec, coded, spec, Context())
    assert torch.equal(restored, coded.value)
    assert torch.equal(codec.restored(momentum, spec, Context()), coded.value)
    wide = momentum.double().reshape(momentum.shape[0] if momentum.dim() > 1 else 1, -1)
    squares = wide.square()
    units = (
        squares.mean(dim=1, keepdim=True) * squares.mean(dim=0) / squares.mean().clamp_min(1e-300)
    ).sqrt()
    error, inside = (restored.double().reshape(wide.shape) - wide).abs(), wide.abs() <= 100 * step * units
    assert bool((error[inside] <= 0.6 * step * units[inside] + 2.4e-38 * max(step, 4 / step)).all())


def test_the_product_is_right_on_average_and_costs_a_row_and_a_column():
    _, second = moments(300, 200)
    coded = FactoredSecondMomentCodec().encode(second, spec_of(second, "v", Role.EXP_AVG_SQ), Context())
    assert abs(float((coded.value.log2() - second.log2()).mean())) < 0.1
    assert coded.encoded.nbytes <= 300 + 200
    assert coded.planes == {}


def test_rows_that_have_not_been_seen_for_long_keep_their_factor():
    second = torch.ones(50, 40)
    second[3] = 1e-37
    coded = FactoredSecondMomentCodec().encode(second, spec_of(second), Context())
    assert torch.equal(reread(FactoredSecondMomentCodec(), coded, spec_of(second), Context()), coded.value)
    assert bool((coded.value[3] < 1e-35).all())
    assert bool((coded.value[4] > 0.5).all())


def test_a_second_moments_factors_are_whole_octaves_and_a_momentums_quarters():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand((20, 30), generator=generator).numpy()
    second, own = (
        Factors.of_second_moment(values),
        Factors.of_roots(values * np.arange(1, 31, dtype=np.float32)),
    )
    assert not (second.rows % 4).any()
    assert not (second.columns % 4).any()
    assert (own.columns % 4).any()


def test_roots_are_found_where_squares_are_beyond_fp32():
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-36, 1e30):
        values = scale * torch.randn(64, 64, generator=generator)
        root = float(np.median(Factors.of_roots(values.numpy()).product()))
        assert root == pytest.approx(scale, rel=0.3)


@pytest.mark.parametrize("codec", [DitheredFirstMomentCodec, DitheredMomentumCodec])
def test_first_moments_are_right_on_average(codec):
    first = torch.full((200, 200), 0.3)
    context = Context(siblings={Role.EXP_AVG_SQ.value: torch.full((200, 200), 0.09)})
    coded = codec(step=4.0, seed=5).encode(first, spec_of(first), context)
    assert abs(float(coded.value.mean()) - 0.3) < 0.01
    other = codec(step=4.0, seed=6).encode(first, spec_of(first), context)
    assert not torch.equal(coded.value, other.value)


def test_wide_levels_are_clipped_at_126_steps():
    first = torch.zeros(100, 100)
    first[0, 0], first[1, 1] = 1e9, -1e9
    context = Context(siblings={Role.EXP_AVG_SQ.value: torch.ones(100, 100)})
    coded = DitheredFirstMomentCodec(step=1.0).encode(first, spec_of(first), context)
    assert coded.encoded.params["radius"] == 126
    assert abs(float(coded.value[0, 0]) - 126) <= 0.5
    assert torch.equal(reread(DitheredFirstMomentCodec(), coded, spec_of(first), context), coded.value)


def test_other_gradients_and_odd_values_are_refused():
    first, second = moments(30, 30)
    spec = spec_of(first)
    strange = Context(siblings={Role.EXP_AVG_SQ.value: second * 1e-8})
    with pytest.raises(CannotRepresentError, match="too large"):
        DitheredFirstMomentCodec().encode(first, spec, strange)
    with pytest.raises(CannotRepresentError, match="no second moment"):
        DitheredFirstMomentCodec().encode(first, spec, Context())
    for wrong in (second.double(), second * torch.nan, -second, second[:0], second.half()):
        with pytest.raises(CannotRepresentError):
            FactoredSecondMomentCodec().encode(wrong, spec_of(wrong), Context())
    for wrong in (first.double(), first * torch.inf, first[:0], first[:, :0], first.bfloat16()):
        with pytest.raises(CannotRepresentError):
            DitheredMomentumCodec().encode(wrong, spec_of(wrong), Context())
    coded = DitheredFirstMomentCodec().encode(first, spec, Context(siblings={Role.EXP_AVG_SQ.value: second}))
    with pytest.raises(FormatError):
        DitheredFirstMomentCodec().reconstruct(coded.encoded, coded.planes, spec, Context())


@pytest.mark.parametrize("codec", [DitheredFirstMomentCodec, DitheredMomentumCodec])
@pytest.mark.parametrize(
    "wrong", [{"step": 0}, {"step": 65}, {"seed": -1}, {"seed": 2**32}, {"seed": 1.0}, {"effort": "none"}]
)
def test_options_are_checked(codec, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        codec(**wrong)


@pytest.mark.parametrize("codec", [FactoredSecondMomentCodec, DitheredMomentumCodec])
def test_damaged_copies_are_refused(codec):
    _, second = moments(30, 20)
    check_malformed(codec(), second, second)
    second[3] = 1e-37  # a factor that takes more than a byte
    check_malformed(codec(), second, second)


def test_damaged_first_moments_are_refused():
    first, second = moments(30, 20)
    spec, context = spec_of(first), Context(siblings={Role.EXP_AVG_SQ.value: second})
    coded = DitheredFirstMomentCodec().encode(first, spec, context)
    payload = coded.encoded.sections["levels"]
    for params, sections in (
        ({**coded.encoded.params, "radius": 127}, {"levels": payload}),
        ({**coded.encoded.params, "step": 0.0}, {"levels": payload}),
        ({**coded.encoded.params, "seed": 2**32}, {"levels": payload}),
        (coded.encoded.params, {"levels": payload[:-1]}),
        (coded.encoded.params, {"levels": payload, "factors": b""}),
        (coded.encoded.params, {}),
    ):
        damaged = EncodedTensor("dithered-root-units", params, sections)
        with pytest.raises(ShrinkpointError):
            read(DitheredFirstMomentCodec(), damaged, spec, context)


@pytest.mark.parametrize("effort", ["fast", "default", "max"])
def test_bytes_do_not_depend_on_threads(effort):
    first, second = moments(600, 700)
    siblings = {Role.EXP_AVG_SQ.value: second}
    for codec in (DitheredFirstMomentCodec, DitheredMomentumCodec, FactoredSecondMomentCodec):
        made = codec() if codec is FactoredSecondMomentCodec else codec(step=1.0, effort=effort)
        assert isinstance(made, Quantizer)
        values = second if codec is FactoredSecondMomentCodec else first
        one, two = (
            made.encode(values, spec_of(values), Context(siblings=siblings, threads=n)) for n in (1, 2)
        )
        assert one.encoded == two.encoded


@pytest.mark.parametrize("kind", ["subnormal", "far row", "plain"])
@pytest.mark.parametrize("scale", [1e-37, 1e-33, 1e-20])
def test_a_process_without_subnormals_restores_the_same_bits(kind, scale):
    first, second = moments(40, 30, scale=scale, kind=kind)
    spec = spec_of(first)
    v = FactoredSecondMomentCodec().encode(second, spec, Context())
    context = Context(siblings={Role.EXP_AVG_SQ.value: v.value})
    made = [(FactoredSecondMomentCodec(), v), (DitheredMomentumCodec(step=0.5), None)]
    made.append((DitheredFirstMomentCodec(step=30.0), None))
    coded = [(codec, one or codec.encode(first, spec, context)) for codec, one in made]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        again = [reread(codec, one, spec, context) for codec, one in coded]
    finally:
        torch.set_flush_denormal(False)
    for (_, one), value in zip(coded, again, strict=True):
        assert torch.equal(value.view(torch.int32), one.value.view(torch.int32))


@pytest.mark.parametrize("codec", [FirstMomentCodec, DitheredFirstMomentCodec, TrellisFirstMomentCodec])
def test_a_root_of_a_second_moment_below_the_normal_numbers_is_zero_in_every_process(codec):
    """Second moments that are stored exactly may be subnormal; the root of one is not."""
    first, second = 1e-20 * torch.randn(16, 16), torch.full((16, 16), 1e-40)
    spec, context = spec_of(first), Context(siblings={Role.EXP_AVG_SQ.value: second})
    second[0] = 1e-38
    coded = codec(step=3.0).encode(first, spec, context)
    assert not coded.value[1:].any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        again = reread(codec(), coded, spec, context)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(again.view(torch.int32), coded.value.view(torch.int32))


def test_an_exponent_that_stands_for_none_is_no_lowest_one():
    lowest, symbols = np.array([-(2**15), 0], "<i2"), np.ones(9, np.uint8)
    contexts = np.repeat(np.array([0, 1], np.uint8), [4, 5])
    section = bytes([0]) + lowest.tobytes() + encode_symbols(symbols, contexts, 256, 2)
    with pytest.raises(FormatError, match="beyond the range"):
        Factors.read(EncodedTensor("factored", {}, {"factors": section}), spec_of(torch.rand(4, 5)))


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"auto"}))
def test_published_schemes_leave_a_momentum_without_a_second_moment_exact(name):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator) for _ in range(2)]
    states = [state_of(a__w=w, a__exp_avg=0.01 * torch.randn(64, 64, generator=generator)) for w in weights]
    options = options_of(name)
    if hasattr(options, "moments"):
        options = replace(options, moments="levels")

    def make(reference):
        return build(name, options, Occasion(state=states[0], reference=reference))

    checkpoints, told = save_chain(states, make)
    for length, (state, one) in enumerate(zip(states, told, strict=True), 1):
        assert "a/exp_avg" not in one.kept_exactly
        restored = decode_chain(checkpoints[:length]).state
        assert torch.equal(restored.tensors["a/exp_avg"], state.tensors["a/exp_avg"])
