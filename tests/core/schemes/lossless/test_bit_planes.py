from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.containers import identical
from support.states import tensors

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.lossless.bit_planes import BitPlanesCodec
from shrinkpoint.schemes.lossless.bit_prediction import format_of
from shrinkpoint.state.dtypes import DTYPES, tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

CODEC = BitPlanesCodec()
FLOATS = {name: dtype for name, dtype in DTYPES.items() if format_of(dtype) is not None}


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name="t", dtype=tensor.dtype, shape=tuple(tensor.shape))


def round_trip(
    tensor: torch.Tensor,
    reference: ReferenceState | None = None,
    sibling: Mapping[str, ReferenceState] | None = None,
) -> tuple[ReferenceState, EncodedTensor]:
    """Encode, decode as a reader does, check the closed loop; what the reader then holds."""
    spec, context = spec_of(tensor), Context(reference=reference, sibling_planes=sibling or {})
    coded = CODEC.encode(tensor, spec, context)
    reading = context if coded.encoded.uses_reference else Context(sibling_planes=sibling or {})
    planes = CODEC.decode(coded.encoded, spec, reading)
    dense = tensor.detach().resolve_conj().resolve_neg()
    assert identical(CODEC.reconstruct(coded.encoded, planes, spec, reading), dense)
    assert identical(coded.value, dense)
    assert np.array_equal(coded.planes["bits"], planes["bits"])
    return ReferenceState(CODEC.id, coded.encoded.params, planes), coded.encoded


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return tensor_from_bytes(
        np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8), dtype, shape
    )


def moments(rows: int = 96, columns: int = 80, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A second and a first moment as Adam has them."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(rows, 1, generator=generator) * 2 + torch.randn(1, columns, generator=generator) * 2
    second = torch.exp(scale - 16 + torch.randn(rows, columns, generator=generator) / 2)
    return second, torch.randn(rows, columns, generator=generator) * second.sqrt()


@given(tensors().filter(lambda t: format_of(t.dtype) is not None and t.numel() > 0))
def test_any_tensor_and_any_other_of_its_shape_as_reference(tensor):
    reference, _ = round_trip(tensor)
    other = random_bits(tensor.dtype, tuple(tensor.shape), 7)
    round_trip(other, reference, {"exp_avg_sq": reference})


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("shape", [(), (1, 1), (7, 5), (6000,), (64, 5, 20), (6000, 1)])
def test_every_dtype_and_shape_along_a_chain(dtype, shape):
    reference = None
    for seed in (1, 1, 2):
        reference, _ = round_trip(
            random_bits(dtype, shape, seed), reference, {"exp_avg_sq": reference} if reference else None
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_training_like_numbers_of_every_format_along_a_chain(dtype):
    second, first = (tensor.to(dtype) for tensor in moments())
    weight = (torch.randn(96, 80) * 0.02).to(dtype)
    reference: dict[str, ReferenceState] = {}
    for _ in range(3):
        sibling: dict[str, ReferenceState] = {}
        for role, tensor in (("exp_avg_sq", second), ("exp_avg", first), ("weight", weight)):
            sibling[role], encoded = round_trip(tensor, reference.get(role), dict(sibling))
            assert encoded.nbytes < spec_of(tensor).nbytes
        reference = sibling
        second, first, weight = second * 1.01, -first, weight + weight / 256


SPECIAL = torch.tensor(
    [0x7FC00001, -0x3FFFFF, 0x7F800001, -(2**31), 0, 0x7F800000, -0x800000, 1, -(2**31) + 1, -1, 2**31 - 1],
    dtype=torch.int32,
).view(torch.float32)


@pytest.mark.parametrize("count", [1, 50, 700])
def test_nan_payloads_zeros_of_both_signs_infinities_and_subnormals(count):
    special = SPECIAL.repeat(count)
    usual = torch.randn(special.numel())
    reference, _ = round_trip(usual)
    mixed = torch.where(torch.arange(special.numel()) % 3 == 0, special, usual)
    for tensor in (special, mixed, usual, -special, mixed.flip(0), torch.zeros_like(usual)):
        reference, _ = round_trip(tensor, reference, {"exp_avg_sq": reference})


@given(st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_subnormals_everywhere(seed, dtype):
    tiny = torch.finfo(dtype).tiny
    tensor = torch.randn(4500, generator=torch.Generator().manual_seed(seed), dtype=dtype) * tiny
    reference, _ = round_trip(tensor)
    round_trip(tensor * 0.951, reference)


def test_flushing_subnormals_changes_nothing():
    second = moments()[0] * 2.0**-100
    assert (second < torch.finfo(torch.float32).tiny).any()
    after = torch.where(torch.arange(96)[:, None] % 2 == 0, second * 0.951, second * 1.3 + 2.0**-114)
    spec, reference = spec_of(after), round_trip(second)[0]
    encoded = CODEC.encode(after, spec, Context(reference=reference)).encoded
    assert "scale" in encoded.params
    torch.set_flush_denormal(True)
    try:
        planes = CODEC.decode(encoded, spec, Context(reference=reference))
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(planes["bits"].view(np.uint8), tensor_to_bytes(after))


def test_the_second_moment_takes_fewer_bytes_by_its_rows_and_columns():
    second, _ = moments()
    _, encoded = round_trip(second)
    assert "factored" in encoded.params
    assert encoded.nbytes < 0.95 * ExactCodec().encode(second, spec_of(second), Context()).encoded.nbytes


def test_the_first_moment_takes_fewer_bytes_by_the_second():
    second, first = moments()
    reference, _ = round_trip(second)
    _, encoded = round_trip(first, None, {"exp_avg_sq": reference})
    assert encoded.params["sibling"] == 32
    assert encoded.nbytes < round_trip(first)[1].nbytes


def test_a_second_moment_held_by_the_exact_codec_serves_too():
    second, first = moments()
    coded = ExactCodec().encode(second, spec_of(second), Context())
    reference = ReferenceState(ExactCodec.id, coded.encoded.params, coded.planes)
    assert round_trip(first, None, {"exp_avg_sq": reference})[1].params["sibling"] == 32


@pytest.mark.parametrize("other", [torch.ones(4096, dtype=torch.bfloat16), torch.ones(80, 96, 2)])
def test_a_neighbour_of_another_size_is_left_aside(other):
    coded = ExactCodec().encode(other, spec_of(other), Context())
    reference = ReferenceState(ExactCodec.id, {}, coded.planes)
    assert "sibling" not in round_trip(moments()[1], None, {"exp_avg_sq": reference})[1].params


def test_small_steps_are_differences():
    weight = torch.randn(90, 70) * 0.02
    reference, base = round_trip(weight)
    _, delta = round_trip(weight + 1e-6 * torch.randn(90, 70), reference)
    assert delta.uses_reference
    assert delta.nbytes < base.nbytes / 2


def test_an_unchanged_tensor_takes_nearly_nothing():
    weight = torch.randn(90, 70)
    reference, _ = round_trip(weight)
    assert round_trip(weight, reference)[1].nbytes < 64


def test_moments_without_gradients_decay_as_predicted():
    second, _ = moments(400, 80)
    preserved_state = torch.arange(400)[:, None] % 2 == 0
    after = second.clone()
    for _ in range(50):
        after = torch.where(preserved_state, after * 0.999, after * 0.999 + 1e-9 * torch.rand(400, 80))
    reference, _ = round_trip(second)
    _, encoded = round_trip(after, reference)
    assert encoded.params["scale"] == pytest.approx(0.999**50, rel=1e-5)
    assert encoded.nbytes < 0.6 * spec_of(after).nbytes


def test_rounded_numbers_and_repeated_ones_are_byte_planes():
    rounded = torch.randn(300, 70).to(torch.bfloat16).float()
    reference, encoded = round_trip(rounded)
    assert set(encoded.sections) == {"bytes"}
    assert encoded.nbytes < 0.45 * spec_of(rounded).nbytes
    after = torch.where(torch.arange(300)[:, None] < 9, rounded, rounded * 2)
    round_trip(after, reference)
    tiled = torch.randn(50).repeat(400)
    assert round_trip(tiled)[1].nbytes < 0.05 * spec_of(tiled).nbytes


def test_a_delta_can_become_a_base():
    second, first = moments()
    sibling = {"exp_avg_sq": round_trip(second)[0]}
    reference, _ = round_trip(first, None, sibling)
    now, delta = round_trip(first * 1.0001, reference, sibling)
    assert delta.uses_reference
    base = CODEC.rebase(delta, now, spec_of(first), sibling)
    assert base is not None
    assert not base.uses_reference
    planes = CODEC.decode(base, spec_of(first), Context(sibling_planes=sibling))
    assert np.array_equal(planes["bits"], now.planes["bits"])


def test_what_is_held_does_not_change_with_the_restored_tensor():
    tensor = torch.randn(5000)
    coded = CODEC.encode(tensor, spec_of(tensor), Context())
    plane = coded.planes["bits"].copy()
    coded.value.zero_()
    tensor.zero_()
    assert np.array_equal(coded.planes["bits"], plane)


def test_the_bytes_do_not_depend_on_threads():
    second, first = moments(700, 800)
    sibling = {"exp_avg_sq": round_trip(second)[0]}
    one, two = (
        CODEC.encode(first, spec_of(first), Context(sibling_planes=sibling, threads=threads)).encoded
        for threads in (1, 2)
    )
    assert one == two


@pytest.mark.parametrize("tensor", [torch.arange(5000), torch.zeros(0), torch.ones(3, dtype=torch.bool)])
def test_what_is_no_floating_point_tensor_is_refused(tensor):
    with pytest.raises(CannotRepresentError, match="stored exactly"):
        CODEC.encode(tensor, spec_of(tensor), Context())
    with pytest.raises(FormatError, match="no tensor of this codec"):
        CODEC.decode(EncodedTensor(CODEC.id, {"cut": 21}, {}), spec_of(tensor), Context())


def encoded_delta() -> tuple[EncodedTensor, TensorSpec, Context]:
    second, first = moments()
    context = Context(round_trip(first)[0], sibling_planes={"exp_avg_sq": round_trip(second)[0]})
    encoded = CODEC.encode(
        second * 1.3, spec_of(first), Context(context.sibling_planes["exp_avg_sq"])
    ).encoded
    return encoded, spec_of(first), Context(context.sibling_planes["exp_avg_sq"])


@pytest.mark.parametrize(
    "params",
    [
        {"cut": None},
        {"cut": 31},
        {"cut": "21"},
        {"previous": 65},
        {"sibling": 32},
        {"context": "sibling"},
        {"context": "else"},
        {"scale": 1.5},
        {"scale": float("nan")},
        {"scale": "1"},
        {"magnitude": 1},
        {"offset": 2**40},
        {"unknown": 1},
        {"factored": True},
    ],
)
def test_malformed_params(params):
    encoded, spec, context = encoded_delta()
    kept = {key: value for key, value in encoded.params.items() if key != "factored"}
    sections = {name: data for name, data in encoded.sections.items() if name != "offsets"}
    with pytest.raises(FormatError):
        CODEC.decode(EncodedTensor(CODEC.id, kept | params, sections, True), spec, context)


def test_a_missing_reference():
    encoded, spec, _ = encoded_delta()
    for hostile in (encoded, EncodedTensor(CODEC.id, encoded.params, encoded.sections, False)):
        with pytest.raises(FormatError, match=r"predecessor|predicted from"):
            CODEC.decode(hostile, spec, Context())


@given(st.data())
def test_damaged_sections_give_numbers_or_the_projects_own_error(data):
    encoded, spec, context = encoded_delta()
    sections = dict(encoded.sections)
    name = data.draw(st.sampled_from(sorted(sections)))
    payload = bytearray(sections[name])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    sections[name] = bytes(payload[: data.draw(st.none() | st.integers(0, len(payload)))])
    hostile = EncodedTensor(CODEC.id, encoded.params, sections, True)
    try:
        planes = CODEC.decode(hostile, spec, context)
    except FormatError:
        return
    assert CODEC.reconstruct(hostile, planes, spec, context).shape == spec.shape
