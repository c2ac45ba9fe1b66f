import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import check_malformed, spec_of, walks

from shrinkpoint.errors import CannotRepresentError, ConfigError
from shrinkpoint.quantize.dither import dither
from shrinkpoint.schemes.auto.lattice import LatticeCodec
from shrinkpoint.schemes.auto.lattice_steps import curvature_exponents
from shrinkpoint.schemes.base import Coded, Context, Quantizer, ReferenceState


def reference(coded: Coded) -> Context:
    return Context(ReferenceState(coded.encoded.codec, coded.encoded.params, coded.planes))


def steps_of(codec: LatticeCodec, shape: tuple[int, ...]) -> torch.Tensor:
    if codec.exponents is None:
        return torch.full(shape, codec.step)
    rows, columns = (torch.from_numpy(part).double() for part in codec.exponents)
    return (codec.step * 2 ** ((rows[:, None] + columns) / 4)).float().reshape(shape)


@settings(max_examples=150, deadline=None)
@given(
    walks(saves=4),
    st.lists(
        st.tuples(st.sampled_from([0.01, 0.1, 0.12, 1.0]), st.sampled_from([None, None, 1, 2**32 - 1])),
        min_size=4,
        max_size=4,
    ),
    st.booleans(),
)
def test_a_chain_is_read_as_it_was_written_and_stays_within_half_a_step(states, chosen, curved):
    context = reading = Context()
    for state, (share, seed) in zip(states, chosen, strict=True):
        tensor = state.tensors["a/w"]
        spec = spec_of(tensor)
        size = float(tensor.float().abs().mean())
        exponents = curvature_exponents(state.tensors["a/exp_avg_sq"], spec.shape) if curved else None
        if not 1e-25 < size < 1e25:
            return
        codec = LatticeCodec(step=share * size, exponents=exponents, seed=seed)
        try:
            coded = codec.encode(tensor, spec, context)
        except CannotRepresentError:
            assert not bool(torch.isfinite(tensor).all()) or share < 0.1
            return
        planes = LatticeCodec().decode(coded.encoded, spec, reading)
        value = LatticeCodec().reconstruct(coded.encoded, planes, spec, reading)
        assert value.dtype == tensor.dtype
        assert torch.equal(value, coded.value)
        for name, plane in coded.planes.items():
            assert planes[name].dtype == plane.dtype
            assert np.array_equal(planes[name], plane)
        if context.reference is None and tensor.dtype is torch.float32:
            error = (value - tensor).abs()
            assert bool((error <= 0.5001 * steps_of(codec, spec.shape) + 1e-6 * tensor.abs()).all())
        context, reading = (
            reference(coded),
            Context(ReferenceState(coded.encoded.codec, coded.encoded.params, planes)),
        )


def test_a_weight_that_stays_costs_next_to_nothing_and_errors_never_add_up():
    weight = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    spec, context = spec_of(weight), Context()
    sizes = []
    for _ in range(6):
        coded = LatticeCodec(step=0.5).encode(weight, spec, context)
        sizes.append(coded.encoded.nbytes)
        assert float((coded.value - weight).abs().max()) <= 0.25001
        context = reference(coded)
        weight = weight + 1e-4 * torch.randn(200, 200, generator=torch.Generator().manual_seed(1))
    assert max(sizes[1:]) < sizes[0] / 50


def test_the_error_is_uniform_and_does_not_depend_on_the_weight():
    generator = torch.Generator().manual_seed(0)
    for weight in (
        torch.zeros(300, 300),
        torch.full((300, 300), 0.4),
        torch.randn(300, 300, generator=generator),
    ):
        error = LatticeCodec(step=1.0, seed=3).encode(weight, spec_of(weight), Context()).value - weight
        assert abs(float(error.mean())) < 0.01
        assert abs(float(error.var()) - 1 / 12) < 0.002


def test_after_a_restore_another_dither_keeps_small_updates_on_average():
    start = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    spec = spec_of(start)
    first = LatticeCodec(step=1.0, seed=1).encode(start, spec, Context())
    moved = first.value + 0.05
    stuck = LatticeCodec(step=1.0).encode(moved, spec, reference(first))
    fresh = LatticeCodec(step=1.0, seed=2).encode(moved, spec, reference(first))
    assert torch.equal(stuck.value, first.value)
    assert abs(float((fresh.value - first.value).mean()) - 0.05) < 0.005
    planes = LatticeCodec().decode(fresh.encoded, spec, reference(first))
    assert torch.equal(LatticeCodec().reconstruct(fresh.encoded, planes, spec, Context()), fresh.value)
    alone = LatticeCodec(step=1.0, seed=2).encode(moved, spec, Context())
    assert fresh.encoded.nbytes < alone.encoded.nbytes / 3  # the decoder knows how far the lattice was moved


def test_steps_near_the_wanted_ones_are_kept_and_others_taken():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    first = LatticeCodec(step=0.1).encode(weight, spec_of(weight), Context())
    near, far, restored = (
        LatticeCodec(step=step, seed=seed).encode(weight, spec_of(weight), reference(first))
        for step, seed in ((0.12, None), (0.2, None), (0.12, 1))
    )
    assert near.encoded.params["step"] == first.encoded.params["step"]
    assert "exponents" not in near.encoded.sections
    assert torch.equal(near.value, first.value)
    assert "exponents" in far.encoded.sections
    assert 0.05 < float((far.value - weight).abs().max()) <= 0.1 + 1e-6  # half of the wider step
    assert restored.encoded.params["step"] == pytest.approx(0.12)


def test_a_row_that_takes_another_step_leaves_the_others_where_they_are():
    generator = torch.Generator().manual_seed(0)
    weight, columns = torch.randn(64, 64, generator=generator), np.zeros(64, np.int8)
    first = LatticeCodec(step=0.1).encode(weight, spec_of(weight), Context())
    rows = np.zeros(64, np.int8)
    rows[5] = -12
    codec = LatticeCodec(step=0.1, exponents=(rows, columns))
    then = codec.encode(weight, spec_of(weight), reference(first))
    others = torch.arange(64) != 5
    assert torch.equal(then.value[others], first.value[others])
    assert float((then.value - weight)[5].abs().max()) <= 0.1 / 8 / 2 + 1e-6
    assert then.encoded.nbytes < first.encoded.nbytes / 8
    assert torch.equal(reread(then, spec_of(weight), reference(first)), then.value)


@pytest.mark.parametrize("outlier", [10.0, 1e3])
def test_far_indices_are_stored_apart(outlier):
    weight = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    weight[3, 7] = outlier
    coded = LatticeCodec(step=0.05).encode(weight, spec_of(weight), Context())
    assert abs(float(coded.value[3, 7]) - outlier) < 0.03
    planes = LatticeCodec().decode(coded.encoded, spec_of(weight), Context())
    assert np.array_equal(planes["index"], coded.planes["index"])


def test_what_cannot_stand_on_a_lattice_is_refused():
    for weight in (
        torch.tensor([[1.0, torch.nan]]),
        torch.tensor([[1e9, 1.0]]),
        torch.tensor([[1.0, torch.inf]]),
        torch.full((2, 2), 1e300, dtype=torch.float64),
        torch.ones(0, 4),
        torch.ones(4, 0),
    ):
        with pytest.raises(CannotRepresentError):
            LatticeCodec(step=1e-3).encode(weight, spec_of(weight), Context())


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 0},
        {"step": -1.0},
        {"step": float("nan")},
        {"seed": -1},
        {"seed": 2**32},
        {"slack": -1},
        {"effort": "slow"},
    ],
)
def test_options_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LatticeCodec(**{"step": 1.0, **wrong})


def test_damaged_copies_are_refused():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(40, 30, generator=generator)
    check_malformed(LatticeCodec(), before, before + 0.01 * torch.randn(40, 30, generator=generator))


def test_bytes_do_not_depend_on_threads():
    weight = torch.randn(700, 900, generator=torch.Generator().manual_seed(0))
    one, two = (LatticeCodec(step=0.1).encode(weight, spec_of(weight), Context(threads=n)) for n in (1, 2))
    assert one.encoded == two.encoded


SHAPES = [(1,), (9,), (1, 1), (1, 40), (40, 1), (6, 5, 3, 3), (2, 1, 7)]


def reread(coded: Coded, spec, context: Context) -> torch.Tensor:
    planes = LatticeCodec().decode(coded.encoded, spec, context)
    assert planes.keys() == coded.planes.keys()
    assert all(np.array_equal(planes[name], coded.planes[name]) for name in planes)
    return LatticeCodec().reconstruct(coded.encoded, planes, spec, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_dtype_goes_through_a_chain_and_stands_alone_after_it(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, context = torch.randn(shape, generator=generator), Context()
    exponents = curvature_exponents(torch.rand(shape, generator=generator), shape)
    spec = spec_of(weight.to(dtype))
    for seed in (None, None, 7, None):
        codec = LatticeCodec(step=0.1, exponents=exponents, seed=seed)
        coded = codec.encode(weight.to(dtype), spec, context)
        assert torch.equal(reread(coded, spec, context), coded.value)
        assert torch.equal(codec.restored(weight.to(dtype), spec, context), coded.value)
        assert isinstance(codec, Quantizer)
        context = reference(coded)
        base = LatticeCodec().rebase(coded.encoded, context.reference, spec, {})
        assert not base.uses_reference
        planes = LatticeCodec().decode(base, spec, Context())
        assert torch.equal(LatticeCodec().reconstruct(base, planes, spec, Context()), coded.value)
        weight = weight + 0.05 * torch.randn(shape, generator=generator)


def test_weights_that_are_all_equal_or_all_on_one_point_cost_next_to_nothing():
    for weight, step in (
        (torch.zeros(300, 300), 1.0),
        (torch.full((300, 300), 1e-41), 1.0),
        (torch.rand(300, 300), 1e3),
    ):
        coded = LatticeCodec(step=step, seed=3).encode(weight, spec_of(weight), Context())
        assert torch.equal(reread(coded, spec_of(weight), Context()), coded.value)
        assert coded.encoded.nbytes < 600
        context = reference(coded)
        again = LatticeCodec(step=step).encode(weight, spec_of(weight), context)
        assert again.encoded.nbytes < 40
        assert torch.equal(again.value, coded.value)


def test_moves_farther_than_a_byte_tells_are_read_as_written():
    weight = 100 * torch.randn(60, 50, generator=torch.Generator().manual_seed(0))
    first = LatticeCodec(step=0.1).encode(weight, spec_of(weight), Context())
    second = LatticeCodec(step=0.1).encode(-weight, spec_of(weight), reference(first))
    assert torch.equal(reread(first, spec_of(weight), Context()), first.value)
    assert torch.equal(reread(second, spec_of(weight), reference(first)), second.value)


def test_a_tensor_of_another_size_begins_anew():
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    before = reference(LatticeCodec(step=0.1).encode(weight, spec_of(weight), Context()))
    wider = torch.cat([weight, weight])
    coded = LatticeCodec(step=0.1).encode(wider, spec_of(wider), before)
    assert not coded.encoded.uses_reference
    assert torch.equal(reread(coded, spec_of(wider), Context()), coded.value)
    turned = weight.t().contiguous()
    coded = LatticeCodec(step=0.1).encode(turned, spec_of(turned), before)
    assert torch.equal(reread(coded, spec_of(turned), before), coded.value)


def test_what_becomes_infinite_is_refused():
    weight = torch.full((4, 4), 65504.0, dtype=torch.float16)
    with pytest.raises(CannotRepresentError, match="end of"):
        LatticeCodec(step=5000.0).encode(weight, spec_of(weight), Context())


def test_a_weight_that_has_just_moved_is_expected_to_move_back():
    """Half of the weights lie on a border and cross it at every save; the coder is told which."""
    generator = torch.Generator().manual_seed(0)
    restless = torch.rand(300, 300, generator=generator) < 0.5
    spec, context, sizes = spec_of(restless.float()), Context(), []
    for save in range(5):
        weight = torch.where(restless, 0.5 + 0.1 * (-1) ** save, 0.0) - torch.from_numpy(dither(0, 90_000))[
            :90_000
        ].reshape(300, 300)
        coded = LatticeCodec(step=1.0, seed=0).encode(weight, spec, context)
        context = reference(coded)
        sizes.append(8 * coded.encoded.nbytes / 90_000)
    assert sizes[1] > 0.2
    assert max(sizes[2:]) < 0.02


@pytest.mark.parametrize("effort", ["fast", "default", "max"])
def test_efforts_are_read_alike(effort):
    generator = torch.Generator().manual_seed(0)
    weight, context = torch.randn(200, 100, generator=generator), Context()
    for _ in range(3):
        coded = LatticeCodec(step=0.2, effort=effort).encode(weight, spec_of(weight), context)
        assert torch.equal(reread(coded, spec_of(weight), context), coded.value)
        context = reference(coded)
        weight = weight + 0.02 * torch.randn(200, 100, generator=generator)


@pytest.mark.parametrize("scale", [1e-26, 1.0, 1e28])
def test_a_process_without_subnormals_restores_the_same_bits(scale):
    generator = torch.Generator().manual_seed(0)
    weight = scale * torch.randn(40, 30, generator=generator)
    exponents = curvature_exponents(torch.rand(40, 30, generator=generator) ** 40, (40, 30))
    spec, context, chain = spec_of(weight), Context(), []
    for step, seed in ((0.2, None), (0.2, 5), (0.9, None), (0.9, None)):
        coded = LatticeCodec(step=step * scale, exponents=exponents, seed=seed).encode(weight, spec, context)
        chain.append((coded, context))
        context, weight = reference(coded), weight + 0.1 * scale * torch.randn(40, 30, generator=generator)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        again = [reread(coded, spec, before) for coded, before in chain]
    finally:
        torch.set_flush_denormal(False)
    for (coded, _), value in zip(chain, again, strict=True):
        assert torch.equal(value.view(torch.int32), coded.value.view(torch.int32))


def test_the_finest_steps_of_all_restore_the_same_bits_without_subnormals():
    least = (np.full(20, -32, np.int8), np.full(64, -32, np.int8))
    weight = 1.1e-27 * 2.0**-16 * torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    spec = spec_of(weight)
    coded = LatticeCodec(step=1.1e-27, exponents=least).encode(weight, spec, Context())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        planes = LatticeCodec().decode(coded.encoded, spec, Context())
        again = LatticeCodec().reconstruct(coded.encoded, planes, spec, Context())
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(again.view(torch.int32), coded.value.view(torch.int32))
    assert bool((again.abs() >= torch.finfo().tiny).all())
