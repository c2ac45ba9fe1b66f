import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.containers import identical
from support.states import tensors

from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.lossless.bit_planes import BitPlanesCodec
from shrinkpoint.state.dtypes import DTYPES, tensor_from_bytes
from shrinkpoint.state.training import TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

CODEC = ExactCodec()


def spec_of(tensor: torch.Tensor, name: str = "t") -> TensorSpec:
    return TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))


def round_trip(tensor, reference=None, codec=CODEC):
    """Encode, decode as a reader does, check the closed loop; what the reader then holds."""
    spec, context = spec_of(tensor), Context(reference)
    coded = codec.encode(tensor, spec, context)
    planes = codec.decode(coded.encoded, spec, context if coded.encoded.uses_reference else Context())
    restored = codec.reconstruct(coded.encoded, planes, spec, context)
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
    reference, delta = round_trip(tensor.clone(), reference)
    assert delta.uses_reference
    assert delta.nbytes <= 16 < base.nbytes / 10
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


@given(st.integers(1, 6), st.integers(0, 9))
def test_chains(length, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor, reference = torch.randn(3, 50, generator=generator), None
    for _ in range(length):
        reference, _ = round_trip(tensor, reference)
        tensor = tensor + 1e-3 * torch.randn(3, 50, generator=generator)


def test_noise_is_not_stored_as_a_difference_to_other_noise():
    reference, _ = round_trip(random_bits(torch.int64, (2000,), 1))
    ordered = torch.arange(2000)
    _, encoded = round_trip(ordered, reference)
    assert not encoded.uses_reference


def test_what_is_held_does_not_change_with_the_restored_tensor():
    tensor = torch.randn(100)
    coded = CODEC.encode(tensor, spec_of(tensor), Context())
    plane = coded.planes["bits"].copy()
    coded.value.zero_()
    tensor.zero_()
    assert np.array_equal(coded.planes["bits"], plane)


def test_a_huge_declared_shape_is_refused_before_any_memory_is_taken():
    spec = TensorSpec(name="t", dtype=torch.float32, shape=(2**40, 2**18))
    with pytest.raises(FormatError, match="cannot hold"):
        CODEC.decode(EncodedTensor("exact", {}, {"bytes": bytes(1000)}), spec, Context())


@pytest.mark.parametrize(
    ("sections", "uses_reference"),
    [({}, False), ({"bytes": b"", "more": b""}, False), ({"bytes": b""}, True), ({"bytes": b"\x00"}, False)],
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
    encoded = CODEC.encode(after, spec_of(after), Context(reference)).encoded
    payload = bytearray(encoded.sections["bytes"])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    hostile = EncodedTensor(
        "exact", {}, {"bytes": bytes(payload[: data.draw(st.none() | st.integers(0, len(payload)))])}, True
    )
    try:
        planes = CODEC.decode(hostile, spec_of(after), Context(reference))
        assert CODEC.reconstruct(hostile, planes, spec_of(after), Context(reference)).shape == after.shape
    except FormatError:
        return


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (ExactCodec(), torch.float32),
        (ExactCodec(), torch.bfloat16),
        (ExactCodec(), torch.uint8),
        (BitPlanesCodec(), torch.float32),
        (BitPlanesCodec(), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [500, 900, 1000, 1100, 2000])
def test_a_tensor_that_grows_or_shrinks_by_rows_is_a_difference(codec, dtype, rows):
    """A replay buffer, an embedding that gets new words: only the new rows take space."""
    grown = random_bits(dtype, (max(rows, 1000), 64))
    reference, base = round_trip(grown[:1000], codec=codec)
    _, delta = round_trip(grown[:rows], reference, codec=codec)
    assert delta.uses_reference
    assert delta.nbytes < base.nbytes * (max(0, rows - 1000) / 1000 + 0.02)


def test_a_tensor_of_more_than_twice_the_size_is_none_and_takes_no_memory():
    reference, _ = round_trip(random_bits(torch.float32, (5000,)))
    _, stored = round_trip(random_bits(torch.float32, (10_001,)), reference)
    assert not stored.uses_reference
    spec = TensorSpec(name="t", dtype=torch.float32, shape=(2**40,))
    with pytest.raises(FormatError):
        CODEC.decode(EncodedTensor("exact", {}, stored.sections, True), spec, Context(reference))
