from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.chains import encode
from support.containers import identical
from support.states import tensors

from shrinkpoint.errors import FormatError
from shrinkpoint.schemes import exact
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.state.dtypes import DTYPES, tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

CODEC = ExactCodec()


def spec_of(tensor: torch.Tensor, name: str = "t") -> TensorSpec:
    return TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))


def round_trip(tensor, reference=None):
    """Encode, decode as a reader does, check the closed loop; what the reader then holds."""
    spec, context = spec_of(tensor), Context(reference)
    coded = encode(CODEC, tensor, spec, context)
    planes = CODEC.decode(coded.encoded, spec, context if coded.encoded.uses_reference else Context())
    restored = CODEC.reconstruct(coded.encoded, planes, spec, context)
    dense = tensor.detach().resolve_conj().resolve_neg()
    assert identical(restored, dense)
    assert identical(coded.value, dense)
    assert all(np.array_equal(coded.planes[name], planes[name]) for name in {*coded.planes, *planes})
    return ReferenceState(coded.encoded.codec, coded.encoded.params, planes), coded.encoded


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return tensor_from_bytes(data & 1 if dtype == torch.bool else data, dtype, shape)


@given(tensors(), st.none() | tensors())
def test_any_tensor_with_any_other_as_reference(tensor, before):
    reference = round_trip(before)[0] if before is not None else None
    round_trip(tensor, reference)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (7, 5), (3000,)])
def test_every_dtype_and_shape_along_a_chain(dtype, shape):
    reference = None
    for seed in (1, 1, 2):
        reference, _ = round_trip(random_bits(dtype, shape, seed), reference)


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.is_floating_point or d.is_complex])
def test_close_values_are_stored_as_a_small_difference(dtype):
    before = random_bits(dtype, (4096,))
    reference, base = round_trip(before)
    after = before.clone()
    after.view(torch.uint8)[0] ^= 1
    _, delta = round_trip(after, reference)
    assert delta.uses_reference
    assert delta.nbytes < base.nbytes / 10


@pytest.mark.parametrize("elements", [100, 3000, 4096, 70_000])
def test_what_has_not_changed_takes_next_to_nothing_however_small_it_is(elements):
    tensor = random_bits(torch.float32, (elements,))
    reference, base = round_trip(tensor)
    _, delta = round_trip(tensor.clone(), reference)
    assert delta.uses_reference
    assert delta.nbytes < 28 < base.nbytes / 10


@pytest.mark.parametrize("elements", [100, 3000, 4096, 70_000])
def test_what_is_noise_and_has_changed_needs_no_predecessor(elements):
    reference, _ = round_trip(random_bits(torch.float32, (elements,)))
    _, changed = round_trip(random_bits(torch.float32, (elements,), 1), reference)
    assert not changed.uses_reference


def test_payloads_of_nan_and_signs_of_zero_survive_a_delta():
    bits = torch.tensor(
        [0x7FC00001, -0x3FFFFF, 0x7F800001, -(2**31), 0, 0x7F800000, -0x800000, 1], dtype=torch.int32
    )
    before = torch.zeros(8)
    reference, _ = round_trip(before)
    for tensor in (bits.view(torch.float32), before, -before, bits.flip(0).view(torch.float32)):
        reference, _ = round_trip(tensor, reference)


def test_noise_is_not_stored_as_a_difference_to_other_noise():
    reference, _ = round_trip(random_bits(torch.int64, (2000,), 1))
    ordered = torch.arange(2000)
    _, encoded = round_trip(ordered, reference)
    assert not encoded.uses_reference


def test_what_is_held_does_not_change_with_the_restored_tensor():
    tensor = torch.randn(100)
    coded = encode(CODEC, tensor, spec_of(tensor), Context())
    plane = coded.planes["bits"].copy()
    coded.value.zero_()
    tensor.zero_()
    assert np.array_equal(coded.planes["bits"], plane)


def test_a_huge_declared_shape_is_refused_before_any_memory_is_taken():
    spec = TensorSpec(name="t", dtype=torch.float32, shape=(2**40, 2**18))
    with pytest.raises(FormatError, match="cannot hold"):
        CODEC.decode(EncodedTensor("exact", {}, {"bits": bytes(1000)}), spec, Context())


@pytest.mark.parametrize(
    ("sections", "uses_reference"),
    [({}, False), ({"bits": b"", "more": b""}, False), ({"bits": b""}, True), ({"bits": b"\x00"}, False)],
)
def test_malformed_sections(sections, uses_reference):
    spec = TensorSpec(name="t", dtype=torch.float32, shape=(8,))
    with pytest.raises(FormatError):
        CODEC.decode(EncodedTensor("exact", {}, sections, uses_reference), spec, Context())


@given(st.data())
def test_flipped_bytes_give_wrong_values_or_the_projects_own_error(data):
    tensor = torch.randn(400, generator=torch.Generator().manual_seed(1))
    reference, _ = round_trip(tensor)
    after = tensor + 1e-4
    encoded = encode(CODEC, after, spec_of(after), Context(reference)).encoded
    payload = bytearray(encoded.sections["bits"])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    hostile = EncodedTensor(
        "exact", {}, {"bits": bytes(payload[: data.draw(st.none() | st.integers(0, len(payload)))])}, True
    )
    try:
        planes = CODEC.decode(hostile, spec_of(after), Context(reference))
        assert CODEC.reconstruct(hostile, planes, spec_of(after), Context(reference)).shape == after.shape
    except FormatError:
        return


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rows", [500, 900, 1000, 1100, 2000])
def test_a_tensor_that_grows_or_shrinks_by_rows_is_a_difference(dtype, rows):
    """A replay buffer, an embedding that gets new words: only the new rows take space."""
    grown = random_bits(dtype, (max(rows, 1000), 64))
    reference, base = round_trip(grown[:1000])
    _, delta = round_trip(grown[:rows], reference)
    assert delta.uses_reference
    if dtype is not torch.bool:  # whose single bits cost more where most are zero
        assert delta.nbytes < base.nbytes * (max(0, rows - 1000) / 1000 + 0.02)


def test_a_tensor_of_more_than_twice_the_size_is_none_and_takes_no_memory():
    reference, _ = round_trip(random_bits(torch.float32, (5000,)))
    _, stored = round_trip(random_bits(torch.float32, (10_001,)), reference)
    assert not stored.uses_reference
    spec = TensorSpec(name="t", dtype=torch.float32, shape=(2**40,))
    with pytest.raises(FormatError):
        CODEC.decode(EncodedTensor("exact", {}, stored.sections, True), spec, Context(reference))


SPECIAL = torch.tensor(
    [0x7FC00001, -0x3FFFFF, 0x7F800001, -(2**31), 0, 0x7F800000, -0x800000, 1, -(2**31) + 1, -1, 2**31 - 1],
    dtype=torch.int32,
).view(torch.float32)


def decaying(decay=0.999**50, size=20_000, moved=0.5, seed=0):
    """Squares of gradients of two saves: some decay by a constant factor, a share of them moves."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.exp(4 * torch.randn(size, generator=generator) - 20)
    after = before * decay
    others = torch.rand(size, generator=generator) < moved
    after[others] += before[others] * torch.rand(int(others.sum()), generator=generator)
    return before, after


def without_scale(tensor, reference):
    with mock.patch.object(exact, "_decay", return_value=None):
        return round_trip(tensor, reference)[1]


@pytest.mark.parametrize("decay", [0.999**50, 0.9, 0.501, 3e-6])
@pytest.mark.parametrize("moved", [0.0, 0.5, 0.8])
def test_what_decays_by_a_constant_factor_is_a_difference_to_its_multiple(moved, decay):
    before, after = decaying(decay, moved=moved)
    reference, _ = round_trip(before)
    plain, (now, scaled) = without_scale(after, reference), round_trip(after, reference)
    assert "scale" not in plain.params
    assert scaled.uses_reference
    assert scaled.params == {"scale": pytest.approx(decay, rel=1e-6)}
    assert scaled.nbytes < (0.5 + moved / 2) * plain.nbytes
    round_trip(before, now)


def test_a_first_moment_decays_with_its_sign():
    before = decaying()[0] * torch.randn(20_000, generator=torch.Generator().manual_seed(1)).sign()
    reference, _ = round_trip(before)
    _, encoded = round_trip(before * 0.9, reference)
    assert encoded.params == {"scale": pytest.approx(0.9, rel=1e-6)}
    assert encoded.nbytes < 0.2 * without_scale(before * 0.9, reference).nbytes


@pytest.mark.parametrize("everywhere", [False, True])
def test_special_numbers_among_what_decays(everywhere):
    before, after = decaying()
    special = SPECIAL.repeat(before.numel() // SPECIAL.numel() + 1)[: before.numel()]
    at = torch.arange(before.numel()) % 7 == 0
    before = torch.where(at, special, before)
    reference, _ = round_trip(before)
    for tensor in (
        torch.where(at, special if everywhere else after, after),
        torch.where(at, special.flip(0), after),
        torch.where(torch.arange(before.numel()) % 5 == 0, special, after),
    ):
        _, encoded = round_trip(tensor, reference)
        assert "scale" in encoded.params


@given(st.integers(0, 99), st.sampled_from([1.0, 2.0**-100, 2.0**-126, 2.0**-140]))
def test_what_decays_among_subnormals(seed, size):
    before, after = decaying(0.951, size=5000, seed=seed)
    reference, _ = round_trip(before * size)
    round_trip(after * size, reference)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32]
)
def test_other_dtypes_are_not_scaled(dtype):
    before, after = (tensor.to(dtype) for tensor in decaying())
    reference, _ = round_trip(before)
    assert "scale" not in round_trip(after, reference)[1].params


def test_what_decays_and_grows_by_rows():
    before, after = decaying(moved=0.1)
    reference, _ = round_trip(before[:15_000].reshape(-1, 50))
    for rows in (200, 300, 400):
        _, encoded = round_trip(after[: 50 * rows].reshape(rows, 50), reference)
        assert "scale" in encoded.params


@pytest.mark.parametrize(
    "scale", [None, "0.5", True, [], float("nan"), float("inf"), 0, -0.5, 1.0001, 2.0**-21, 1e39, 2**62]
)
def test_a_malformed_scale_is_refused(scale):
    before, after = decaying()
    reference, _ = round_trip(before)
    encoded = round_trip(after, reference)[1]
    assert "scale" in encoded.params
    with pytest.raises(FormatError):
        CODEC.decode(replace(encoded, params={"scale": scale}), spec_of(after), Context(reference))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int32])
def test_a_scale_of_another_dtype_is_refused(dtype):
    tensor = decaying()[0].to(dtype)
    reference, _ = round_trip(tensor)
    encoded = round_trip(tensor, reference)[1]
    with pytest.raises(FormatError, match="scale"):
        CODEC.decode(replace(encoded, params={"scale": 0.5}), spec_of(tensor), Context(reference))


def test_flushing_subnormals_changes_nothing():
    """Neither in a process that writes nor in one that reads."""
    before, after = decaying(0.951)
    before, after = before * 2.0**-100, after * 2.0**-100
    assert ((after < torch.finfo(torch.float32).tiny) & (after > 0)).any()
    spec, reference = spec_of(after), round_trip(before)[0]
    encoded = encode(CODEC, after, spec, Context(reference)).encoded
    assert "scale" in encoded.params
    torch.set_flush_denormal(True)
    try:
        there = encode(CODEC, after, spec, Context(reference)).encoded
        planes = CODEC.decode(encoded, spec, Context(reference))
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(planes["bits"].view(np.uint8), tensor_to_bytes(after))
    planes = CODEC.decode(there, spec, Context(reference))
    assert np.array_equal(planes["bits"].view(np.uint8), tensor_to_bytes(after))
