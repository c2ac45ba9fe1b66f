from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import Coded, check_malformed, encode, spec_of, walks

from shrinkpoint.entropy.lanes.coder import decode_matrix, encode_matrix
from shrinkpoint.entropy.lanes.trellis import NOISE, row_width
from shrinkpoint.entropy.numbers import encode_numbers
from shrinkpoint.errors import CannotRepresentError, FormatError, ShrinkpointError
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.random_walk import LAST_WALK
from shrinkpoint.schemes.auto.row_and_column_steps import curvature_exponents
from shrinkpoint.schemes.auto.trellis import zero_places
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, EncodedTensor, Rebasable, ReferenceState
from shrinkpoint.state.training import TensorSpec

SHAPES = [(1,), (7,), (1, 1), (3, 5), (1, 40), (40, 1), (64, 3, 3, 3), (2, 1, 7), (30, 70), (200,)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def reference(coded: Coded, planes: Mapping[str, Any] | None = None) -> Context:
    """What the encoder goes on with, or a reader with what it has read."""
    held = coded.planes if planes is None else planes
    return Context(ReferenceState(coded.encoded.codec, coded.encoded.params, held))


def reread(coded: Coded, spec: TensorSpec, context: Context) -> tuple[torch.Tensor, Context]:
    """What a reader restores, bit for bit what the encoder says, and what it then holds."""
    planes = TrellisWeightCodec().decode(coded.encoded, spec, context)
    assert planes.keys() == coded.planes.keys()
    for name, plane in planes.items():
        assert plane.dtype == coded.planes[name].dtype
        assert np.array_equal(plane, coded.planes[name])
    value = TrellisWeightCodec().reconstruct(coded.encoded, planes, spec, context)
    assert (value.dtype, tuple(value.shape)) == (spec.dtype, spec.shape)
    assert torch.equal(value, coded.value)
    return value, reference(coded, planes)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chain(
    codec: TrellisWeightCodec, walk: float, saves: int, weight: torch.Tensor
) -> list[tuple[torch.Tensor, Coded]]:
    """A random walk, saved with another dither each time."""
    context, out = Context(), []
    for save in range(saves):
        coded = encode(replace(codec, seed=save), weight, spec_of(weight), context)
        out.append((weight, coded))
        context = reference(coded)
        weight = weight + normal(*weight.shape, seed=1000 + save, scale=walk * codec.step)
    return out


@settings(max_examples=100)
@given(
    walks(saves=4),
    st.lists(
        st.tuples(
            st.sampled_from([0.01, 0.1, 0.12, 1.0]),
            st.sampled_from([0, 1, 2**32 - 1]),
            st.booleans(),
            st.booleans(),
        ),
        min_size=4,
        max_size=4,
    ),
    st.booleans(),
)
def test_a_chain_is_read_as_it_was_written(states, chosen, curved):
    """With seeds that repeat, steps that change, restores in between, and an encoder that has only what a reader has."""
    context = reading = Context()
    for state, (share, seed, after_restore, forgotten) in zip(states, chosen, strict=True):
        tensor = state.tensors["a/w"]
        spec = spec_of(tensor)
        size = float(tensor.float().abs().mean())
        exponents = curvature_exponents(state.tensors["a/exp_avg_sq"], spec.shape) if curved else None
        if not 1e-25 < size < 1e25:
            return
        codec = TrellisWeightCodec(
            step=share * size, exponents=exponents, seed=seed, after_restore=after_restore
        )
        try:
            coded = encode(codec, tensor, spec, context)
        except CannotRepresentError:
            return
        _, reading = reread(coded, spec, reading)
        context = reading if forgotten else reference(coded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_dtype_goes_through_a_chain_and_stands_alone_after_it(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, context = torch.randn(shape, generator=generator), Context()
    exponents = curvature_exponents(torch.rand(shape, generator=generator) ** 8, shape)
    spec = spec_of(weight.to(dtype))
    for save, after_restore in enumerate([False, False, True, False]):
        codec = TrellisWeightCodec(step=0.1, exponents=exponents, seed=save, after_restore=after_restore)
        coded = encode(codec, weight.to(dtype), spec, context)
        reread(coded, spec, context)
        assert isinstance(codec, Rebasable)
        context = reference(coded)
        base = TrellisWeightCodec().rebase(coded.encoded, context.reference, spec)
        assert base is not None
        assert not base.uses_reference
        planes = TrellisWeightCodec().decode(base, spec, Context())
        assert np.array_equal(planes["value"], coded.planes["value"])
        assert torch.equal(TrellisWeightCodec().reconstruct(base, planes, spec, Context()), coded.value)
        weight = weight + 0.05 * torch.randn(shape, generator=generator)


def test_a_reader_can_go_on_writing():
    """And writes the same bytes as the encoder that made what it has read."""
    (weight, before), (moved, after) = chain(TrellisWeightCodec(step=0.1), 0.02, 2, normal(60, 70))
    _, reading = reread(before, spec_of(weight), Context())
    again = encode(TrellisWeightCodec(step=0.1, seed=1), moved, spec_of(moved), reading)
    assert again.encoded == after.encoded
    reread(again, spec_of(moved), reading)


def noises(chained: list[tuple[torch.Tensor, Coded]], step: float) -> list[torch.Tensor]:
    return [((coded.value - weight) / step).double().reshape(-1) for weight, coded in chained]


@pytest.mark.parametrize("walk", [0.0, 0.003, 0.05, 0.3, 3.0])
def test_the_noise_stays_the_same_through_ten_checkpoints(walk):
    """It never tells of weights, nor of where they go, nor of the noise before."""
    chained = chain(TrellisWeightCodec(step=0.1), walk, 11, normal(200, 256))
    errors = noises(chained, 0.1)
    for error, (weight, _) in zip(errors, chained, strict=True):
        assert float(error.square().mean()) == pytest.approx(NOISE, rel=0.02)
        assert abs(float(error.mean())) < 0.006
        assert abs(correlation(error, weight)) < 0.02
        assert float(error.abs().max()) <= 1.0001
    for before, (error, now, then) in enumerate(zip(errors[1:], chained, chained[1:], strict=False)):
        if walk:
            assert abs(correlation(error, then[0] - now[0])) < 0.02
            assert abs(correlation(errors[before], then[0] - now[0])) < 0.02
        assert abs(correlation(error, errors[before])) < 0.03


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.reshape(-1).double(), other.reshape(-1).double()]))[0, 1])


def test_after_a_restore_weights_are_where_the_file_said():
    """What was restored is taken for the weights themselves, and small moves are kept on average."""
    chained = chain(TrellisWeightCodec(step=1.0), 0.01, 4, normal(300, 300, scale=5.0))
    before = chained[-1][1]
    moved = before.value + 0.05
    spec = spec_of(moved)
    plain, fresh = (
        encode(
            TrellisWeightCodec(step=1.0, seed=9, after_restore=after_restore), moved, spec, reference(before)
        )
        for after_restore in (False, True)
    )
    assert fresh.encoded.params["after_restore"] is True
    assert "after_restore" not in plain.encoded.params
    assert (
        "exponents" in fresh.encoded.sections or fresh.encoded.params["step"] == before.encoded.params["step"]
    )
    for coded in (plain, fresh):
        reread(coded, spec, reference(before))
    assert abs(float((fresh.value - before.value).mean()) - 0.05) < 0.005
    assert float((fresh.value - moved).square().mean()) == pytest.approx(NOISE, rel=0.03)
    alone = encode(TrellisWeightCodec(step=1.0, seed=9), moved, spec, Context())
    assert (
        fresh.encoded.nbytes < alone.encoded.nbytes / 3
    )  # the decoder knows how far the dither moved the points
    assert fresh.encoded.nbytes < plain.encoded.nbytes


@pytest.mark.parametrize("changes", [(12, -12), (-12, 12), (5, 0), (0, -7)])
def test_curvature_that_changes_is_followed(changes):
    weight = normal(64, 72)
    spec = spec_of(weight)
    columns = np.zeros(72, np.int8)
    before, after = np.zeros(64, np.int8), np.zeros(64, np.int8)
    before[5], after[5] = changes
    context = Context()
    for save, rows in enumerate((before, before, after, after)):
        codec = TrellisWeightCodec(step=0.1, exponents=(rows, columns), seed=save)
        coded = encode(codec, weight, spec, context)
        reread(coded, spec, context)
        context = reference(coded)
        weight = weight + normal(64, 72, seed=save + 1, scale=0.02)
    others = torch.arange(64) != 5
    error = coded.value - (weight - normal(64, 72, seed=4, scale=0.02))
    assert float(error[others].square().mean()) == pytest.approx(0.01 * NOISE, rel=0.1)
    assert float(error[5].abs().max()) < 2 * 0.1 * 2 ** (max(changes[1], 0) / 4) * 1.2
    if changes[1] == -12:  # an eighth of a step
        assert float(error[5].square().mean()) < 0.01 * NOISE / 16


@pytest.mark.parametrize("jump", [30.0, 100.0, -130.0, 3000.0, -4000.0, 13_900.0, -13_900.0])
def test_weights_that_jump_lose_nothing_by_it(jump):
    """Neither they nor the others."""
    weight = normal(50, 64)
    spec, context = spec_of(weight), Context()
    for save in range(4):
        codec = TrellisWeightCodec(step=1.0, seed=save)
        coded = encode(codec, weight, spec, context)
        reread(coded, spec, context)
        assert float((coded.value - weight).abs().max()) <= 1.01
        assert float((coded.value - weight)[41:].square().mean()) == pytest.approx(NOISE, rel=0.2)
        context = reference(coded)
        weight = weight.clone()
        weight[save, 7], weight[40, save] = jump + float(weight[save, 7]), jump
    far = encode(TrellisWeightCodec(step=1.0, seed=9), weight, spec, Context())
    value, _ = reread(far, spec, Context())
    assert float((value - weight).abs().max()) <= 1.01


def test_a_jump_that_is_too_far_for_a_point_is_refused():
    weight = normal(50, 64)
    weight[3, 5] = 9000.0
    spec = spec_of(weight)
    first = encode(TrellisWeightCodec(step=1.0), weight, spec, Context())
    weight[3, 5] = -9000.0
    encode(TrellisWeightCodec(step=1.0, seed=1), weight, spec, Context())
    with pytest.raises(CannotRepresentError, match="too small"):
        encode(TrellisWeightCodec(step=1.0, seed=1), weight, spec, reference(first))


@pytest.mark.parametrize("value", [3e38, -3e38, 1e30])
def test_weights_that_have_exploded_are_refused(value):
    """As they are without a predecessor: they are then stored exactly."""
    weight = normal(6, 8)
    first = encode(TrellisWeightCodec(step=0.5), weight, spec_of(weight), Context())
    weight[2, 3] = value
    for context in (Context(), reference(first)):
        with pytest.raises(CannotRepresentError):
            encode(TrellisWeightCodec(step=0.5, seed=1), weight, spec_of(weight), context)


def test_a_tensor_of_another_size_begins_anew():
    weight = normal(8, 6)
    before = reference(encode(TrellisWeightCodec(step=0.1), weight, spec_of(weight), Context()))
    wider = torch.cat([weight, weight])
    coded = encode(TrellisWeightCodec(step=0.1), wider, spec_of(wider), before)
    assert not coded.encoded.uses_reference
    reread(coded, spec_of(wider), Context())
    turned = weight.t().contiguous()
    coded = encode(TrellisWeightCodec(step=0.1, seed=1), turned, spec_of(turned), before)
    reread(coded, spec_of(turned), before)


def test_what_another_codec_holds_is_no_predecessor():
    weight = normal(8, 6)
    before = reference(encode(LogLevelsCodec(), weight, spec_of(weight), Context()))
    coded = encode(TrellisWeightCodec(step=0.1), weight, spec_of(weight), before)
    assert not coded.encoded.uses_reference


@pytest.mark.parametrize("context", ["base", "delta"])
def test_what_cannot_stand_on_a_trellis_is_refused(context):
    for weight in (
        torch.tensor([[1.0, torch.nan]]),
        torch.tensor([[1e9, 1.0]]),
        torch.tensor([[1.0, torch.inf]]),
        torch.tensor([[1.0, -torch.inf]]),
        torch.full((1, 2), 1e300, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.int32),
        torch.ones(0, 4),
        torch.ones(4, 0),
    ):
        before = Context()
        if context == "delta":
            one = torch.tensor([[1.0, 2.0]])
            before = reference(encode(TrellisWeightCodec(step=1e-3), one, spec_of(one), before))
        with pytest.raises(CannotRepresentError):
            TrellisWeightCodec(step=1e-3).stage(weight, spec_of(weight), before)


def test_what_becomes_infinite_is_refused():
    weight = torch.full((4, 4), 65504.0, dtype=torch.float16)
    with pytest.raises(CannotRepresentError, match="end of"):
        encode(TrellisWeightCodec(step=5000.0), weight, spec_of(weight), Context())


def test_damaged_copies_are_refused():
    before = normal(40, 64)
    check_malformed(TrellisWeightCodec(), before, before + 0.01 * normal(40, 64, seed=1))


def small_delta() -> tuple[EncodedTensor, TensorSpec, Context]:
    """One after a base; what its reader holds."""
    weight = normal(30, 64)
    spec = spec_of(weight)
    codec = TrellisWeightCodec(step=0.1)
    (_, first), (_, second) = chain(codec, 0.01, 2, weight)
    return second.encoded, spec, reference(first)


WRONG = {
    "step": [None, 0, 0.0, -0.1, 1e-28, 1e31, float("nan"), float("inf"), "0.1", True, [0.1]],
    "seed": [None, -1, 2**32, 1.0, "1", True, [1]],
    "walk": [None, -1, LAST_WALK + 1, 1.0, "1", True, [1]],
    "after_restore": [0, 1, "true", [True], "x"],
    "variance_code": [None, -1, LAST_WALK + 1, 1.0, "1", True, [1]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_malformed_params_are_refused(key, value):
    encoded, spec, context = small_delta()
    params = {**encoded.params, key: value}
    if value is None:
        del params[key]
    with pytest.raises(FormatError):
        TrellisWeightCodec().decode(replace(encoded, params=params), spec, context)


def test_a_base_after_a_restore_must_say_so_properly_too():
    weights = torch.randn(20, 30)
    spec = spec_of(weights)
    encoded = encode(TrellisWeightCodec(step=0.1), weights, spec, Context()).encoded
    with pytest.raises(FormatError, match="after_restore"):
        TrellisWeightCodec().decode(
            replace(encoded, params={**encoded.params, "after_restore": 1}), spec, Context()
        )


def test_what_a_step_is_rounded_to_decides_whether_it_is_taken():
    """The reader judges by the fp32 number, on either side of the limit."""
    weights = torch.zeros(20, 30)
    with pytest.raises(CannotRepresentError, match="step"):  # below the limit, but not as fp32
        encode(TrellisWeightCodec(step=1e30 * (1 - 1e-10)), weights, spec_of(weights), Context())
    least = 1e-27  # as fp32 above it
    assert float(np.float32(least)) > least
    coded = encode(TrellisWeightCodec(step=least), weights, spec_of(weights), Context())
    assert (
        TrellisWeightCodec().decode(coded.encoded, spec_of(weights), Context()).keys() == coded.planes.keys()
    )


@pytest.mark.parametrize("value", [None, -1, LAST_WALK + 1, 1.0, "1", True, [1]])
def test_malformed_knowledge_of_a_predecessor_is_refused(value):
    """How well is known where weights are is of no use before there is another checkpoint."""
    encoded, spec, context = small_delta()
    assert context.reference is not None
    params = {**context.reference.params, "variance_code": value}
    if value is None:
        del params["variance_code"]
    with pytest.raises(FormatError, match="variance_code"):
        TrellisWeightCodec().decode(
            encoded, spec, Context(ReferenceState(context.reference.codec, params, context.reference.planes))
        )


def test_malformed_sections_are_refused():
    encoded, spec, context = small_delta()
    points = encoded.sections["points"]
    assert set(encoded.sections) == {"points"}
    exponents = np.zeros(94, np.uint8)
    beyond = exponents.copy()
    beyond[3] = 33
    below = exponents.copy()
    below[90] = 256 - 33
    for sections in (
        {},
        {"more": points},
        {"points": points, "more": b""},
        {"points": points, "far": encode_numbers(np.zeros(4, np.uint8))},
        {"points": points[:-1]},
        {"points": points[:-2]},
        {"points": points + b"\0"},
        {"points": points + b"\0\0"},
        {"points": b""},
        {"points": points, "exponents": b""},
        {"points": points, "exponents": encode_numbers(exponents) + b"\0"},
        {"points": points, "exponents": encode_numbers(beyond)},
        {"points": points, "exponents": encode_numbers(below)},
    ):
        with pytest.raises(FormatError):
            TrellisWeightCodec().decode(replace(encoded, sections=sections), spec, context)
    params = {**encoded.params, "step": 2 * encoded.params["step"]}
    with pytest.raises(FormatError, match="exponents"):  # another step needs other exponents
        TrellisWeightCodec().decode(replace(encoded, params=params), spec, context)


def with_point(coded: Coded, place: int, far: int) -> EncodedTensor:
    """A base with one point this many half steps away, or up to 3 less: its path goes on as before."""
    size, (rows, columns) = coded.value.numel(), coded.value.shape
    places, width = zero_places(int(coded.encoded.params["seed"]), size), row_width(rows, columns)
    points = decode_matrix(coded.encoded.sections["points"], size, places, width=width)
    points[place] += (far - int(points[place])) // 4 * 4
    section = encode_matrix(points, places, width=width, predictable=False)
    return replace(coded.encoded, sections={**coded.encoded.sections, "points": section})


def test_points_stored_too_far_away_are_refused():
    weight = normal(5, 64)
    coded = encode(TrellisWeightCodec(step=1.0), weight, spec_of(weight), Context())
    for far in (30_000, -29_997):
        planes = TrellisWeightCodec().decode(with_point(coded, 131, far), spec_of(weight), Context())
        assert abs(planes["value"][131] - far / 2) < 3
    for far in (30_004, -30_001, 32_767, -(2**15) + 3):
        with pytest.raises(FormatError, match="beyond 30000"):
            TrellisWeightCodec().decode(with_point(coded, 131, far), spec_of(weight), Context())


def test_deltas_need_what_they_refer_to():
    encoded, spec, context = small_delta()
    assert context.reference is not None
    for missing in ("value", "exponent", "offset"):
        planes = {name: plane for name, plane in context.reference.planes.items() if name != missing}
        with pytest.raises(FormatError, match="reference planes are missing"):
            TrellisWeightCodec().decode(
                encoded, spec, Context(ReferenceState(encoded.codec, context.reference.params, planes))
            )
    with pytest.raises(FormatError, match="reference planes are missing"):
        TrellisWeightCodec().decode(encoded, spec, Context())
    for strange in (spec_of(torch.ones(30, 64, dtype=torch.float8_e5m2)), spec_of(torch.ones(0, 64))):
        with pytest.raises(FormatError, match="cannot hold"):
            TrellisWeightCodec().decode(encoded, strange, context)


def save(tensor: torch.Tensor, context: Context, **options: Any) -> tuple[Coded, torch.Tensor, Context]:
    """One more checkpoint of a chain, read as it was written."""
    spec = spec_of(tensor)
    codec = TrellisWeightCodec(**{"step": 0.1, **options})
    coded = encode(codec, tensor, spec, context)
    value, _ = reread(coded, spec, context)
    return coded, value, reference(coded)


def matrix_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)


@settings(max_examples=80)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.integers(0, 999),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.2, 0.9, 1.0]), st.booleans(), st.sampled_from([0.1, 0.12, 0.5])),
        min_size=3,
        max_size=3,
    ),
)
def test_rows_that_are_kept_are_restored_as_before_and_others_as_well_as_ever(shape, dtype, seed, chosen):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(dtype)
    _, before, context = save(weight, Context(), seed=seed)
    rows = matrix_of(weight).shape[0]
    for number, (share, after_restore, step) in enumerate(chosen, 1):
        moved = weight.float() + 0.3 * torch.randn(shape, generator=generator)
        weight = moved.to(dtype)
        kept = torch.rand(rows, generator=generator) < share
        options = {"seed": seed + number, "step": step, "after_restore": after_restore}
        coded, value, context = save(weight, context, kept=kept.numpy(), **options)
        assert ("kept" in coded.encoded.sections) == bool(kept.any())
        assert torch.equal(matrix_of(value)[kept], matrix_of(before)[kept])
        error = matrix_of((value.float() - weight.float()).abs())[~kept]
        assert float(error.max()) < 2 * 0.5 + 0.05 if error.numel() else bool(kept.all())
        before = value


def test_nothing_is_written_of_rows_that_are_kept():
    weight = normal(512, 64)
    _, before, context = save(weight, Context())
    kept = np.ones(512, np.bool_)
    everything, value, _ = save(normal(512, 64, seed=1), context, seed=1, kept=kept)
    assert torch.equal(value, before)
    assert everything.encoded.sections["points"] == b""
    assert everything.encoded.nbytes < 40
    kept[:16] = False
    some = save(weight, context, seed=1, kept=kept)[0].encoded
    alone = save(weight[:16], save(weight[:16], Context())[2], seed=1)[0].encoded
    assert some.nbytes < alone.nbytes + 150


@pytest.mark.parametrize("after_restore", [False, True])
def test_a_row_that_moves_again_is_coded_from_where_it_was_kept(after_restore):
    weight = normal(40, 256)
    _, before, context = save(weight, Context(), seed=0)
    for number in (1, 2):
        _, value, context = save(weight, context, seed=number, kept=np.arange(40) < 20)
        assert torch.equal(value[:20], before[:20])
    weight = weight + 0.05
    _, value, _ = save(weight, context, seed=3, after_restore=after_restore, kept=np.arange(40) < 10)
    assert torch.equal(value[:10], before[:10])
    assert float((value - weight)[10:].square().mean()) == pytest.approx(0.01 * NOISE, rel=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_rows_that_were_kept_cannot_be_rebased(dtype):
    """Their values lie on the points of another checkpoint."""
    weight = normal(30, 70).to(dtype)
    spec, context = spec_of(weight), save(normal(30, 70).to(dtype), Context(), seed=0)[2]
    coded, _, context = save(weight, context, seed=1, kept=np.arange(30) == 7)
    assert TrellisWeightCodec().rebase(coded.encoded, context.reference, spec) is None
    # once all rows are coded again, there is nothing in the way
    coded, value, context = save(weight, context, seed=2)
    base = TrellisWeightCodec().rebase(coded.encoded, context.reference, spec)
    planes = TrellisWeightCodec().decode(base, spec, Context())
    assert torch.equal(TrellisWeightCodec().reconstruct(base, planes, spec, Context()), value)


def test_without_a_predecessor_no_row_is_kept():
    weight = normal(30, 70)
    everything = np.ones(30, np.bool_)
    assert "kept" not in save(weight, Context(), kept=everything)[0].encoded.sections
    other = save(normal(30, 20), Context())[2]
    coded, value, _ = save(weight, other, kept=everything)
    assert not coded.encoded.uses_reference
    assert float((value - weight).abs().max()) < 0.2


def test_malformed_sections_of_rows_that_are_kept_are_refused():
    weight = normal(30, 64)
    spec, context = spec_of(weight), save(weight, Context())[2]
    coded = save(weight, context, seed=1, kept=np.arange(30) < 4)[0].encoded

    def packed(*stored: int) -> bytes:
        return encode_numbers(np.array(stored, np.uint8))

    sound = packed(0xF0, 0, 0, 0)
    assert coded.sections["kept"] == sound
    for kept in (b"", sound[:-1], sound + b"\0", packed(0xF0, 0, 0), packed(0xF0, 0, 0, 0, 0),
                 packed(0xF0, 0, 0, 1), packed(0xF0, 0, 0, 2), packed(0, 0, 0, 0), packed(255, 255, 255, 252)):  # fmt: skip
        damaged = replace(coded, sections={**coded.sections, "kept": kept})
        with pytest.raises(ShrinkpointError):
            TrellisWeightCodec().decode(damaged, spec, context)
    without = replace(coded, sections={name: data for name, data in coded.sections.items() if name != "kept"})
    with pytest.raises(ShrinkpointError):
        TrellisWeightCodec().decode(without, spec, context)
    base = save(weight, Context())[0].encoded
    with pytest.raises(FormatError, match="no rows to keep"):
        TrellisWeightCodec().decode(replace(base, sections={**base.sections, "kept": sound}), spec, Context())


def test_a_mask_of_other_rows_is_malformed_or_another_tensor():
    """As many rows, but others: no reader can tell, and none fails otherwise than it says."""
    weight = normal(30, 64)
    spec, context = spec_of(weight), save(weight, Context())[2]
    coded = save(weight + 0.05, context, seed=1, kept=np.arange(30) < 4)[0].encoded
    generator = np.random.default_rng(0)
    for _ in range(60):
        mask = np.packbits(generator.permutation(30) < generator.choice([3, 4, 5]))
        damaged = replace(coded, sections={**coded.sections, "kept": encode_numbers(mask)})
        try:
            planes = TrellisWeightCodec().decode(damaged, spec, context)
        except ShrinkpointError:
            continue
        assert TrellisWeightCodec().reconstruct(damaged, planes, spec, context).shape == weight.shape
