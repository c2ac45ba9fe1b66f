import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chains import encode
from support.containers import identical

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.inshrinkerator.codec import InshrinkeratorWeightCodec
from shrinkpoint.schemes.inshrinkerator.partition import ScoreSketches, Thresholds, partition
from shrinkpoint.state.training import TensorSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOTHING = Thresholds(
    metric="magnitude",
    prune_magnitude=0.0,
    prune_sensitivity=0.0,
    protect_magnitude=math.inf,
    protect_sensitivity=math.inf,
)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name="w", dtype=tensor.dtype, shape=tuple(tensor.shape))


def thresholds_of(weight, gradient=None, metric="magnitude", prune=0.2, protect=0.01) -> Thresholds:
    sketches = ScoreSketches()
    sketches.add(weight, gradient, "linear")
    return sketches.thresholds(metric, prune, protect)["linear"]


def round_trip(codec, tensor, reference=None):
    """Encode, decode as a reader does, check the closed loop; what the reader holds and has restored."""
    spec, context = spec_of(tensor), Context(reference)
    coded = encode(codec, tensor, spec, context)
    reader = InshrinkeratorWeightCodec()
    planes = reader.decode(coded.encoded, spec, context if coded.encoded.uses_reference else Context())
    restored = reader.reconstruct(coded.encoded, planes, spec, context)
    assert identical(restored, coded.value)
    assert restored.dtype == tensor.dtype
    assert all(np.array_equal(coded.planes[name], planes[name]) for name in {*coded.planes, *planes})
    return ReferenceState(coded.encoded.codec, coded.encoded.params, planes), restored


def check_guarantees(codec, weight, restored):
    """What the codec's documentation promises."""
    protected, pruned = partition(weight, codec.gradient, codec.thresholds)
    quantized = ~(protected | pruned)
    assert bool(torch.isfinite(restored).all())
    assert not restored[pruned].any()
    half = torch.bfloat16 if weight.dtype is torch.float32 else weight.dtype
    limit = torch.finfo(half).max
    kept = weight[protected].clamp(-limit, limit).to(half).to(weight.dtype)
    assert torch.equal(restored[protected], kept)
    rest = weight[quantized].double().reshape(-1, 1)
    if not rest.numel():
        return
    codebook = codec.quantize(weight).codebook.double()
    assert 1 <= len(codebook) <= codec.bins
    assert bool((codebook.diff() > 0).all())
    chosen = codec.quantize(weight).levels[quantized].long() - 2
    least = (rest - codebook).abs().min(dim=1).values
    assert torch.equal((rest[:, 0] - codebook[chosen]).abs(), least)
    assert torch.equal(restored[quantized], codebook[chosen].to(torch.float32).to(weight.dtype))


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    kind = draw(
        st.sampled_from(["normal", "constant", "heavy", "few values", "zeros", "huge", "tiny", "transposed"])
    )
    dtype = draw(st.sampled_from(DTYPES))
    weight = torch.randn(shape, generator=generator)
    if kind == "constant":
        weight = torch.full(shape, draw(st.floats(-10, 10, width=16)))
    if kind == "heavy":
        weight = weight**7
    if kind == "few values":
        weight = weight.round()
    if kind == "zeros":
        weight = weight * (weight > 0.5)
    if kind == "huge":
        weight = weight.sign() * torch.finfo(dtype).max
    if kind == "tiny":
        weight = weight * torch.finfo(dtype).smallest_normal
    if kind == "transposed" and weight.dim() >= 2:
        weight = weight.transpose(0, -1)
    limit = torch.finfo(dtype).max
    return weight.clamp(-limit, limit).to(dtype)


@settings(max_examples=60)
@given(st.data())
def test_any_weight_along_a_chain_of_changing_bins(data):
    weight = data.draw(weights())
    reference = None
    for _ in range(data.draw(st.integers(1, 3))):
        gradient = torch.randn(weight.shape) if data.draw(st.booleans()) else None
        metric = data.draw(st.sampled_from(["magnitude", "sensitivity"]))
        prune, protect = (
            data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            data.draw(st.sampled_from([0.0, 0.05, 1.0])),
        )
        finite = (
            gradient if gradient is not None and bool((weight.float() * gradient).isfinite().all()) else None
        )
        codec = InshrinkeratorWeightCodec(
            bins=data.draw(st.integers(1, 32)),
            thresholds=thresholds_of(weight, finite, metric, prune, protect),
            gradient=finite,
            coder=data.draw(st.sampled_from(["rans", "rle-huffman"])),
        )
        reference, restored = round_trip(codec, weight, reference)
        check_guarantees(codec, weight, restored)
        weight = (weight.float() * 0.99).to(weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_a_dtypes_range_stay_finite(dtype):
    ends = torch.tensor([[1.0, -1.0, 0.999, -0.999]]).repeat(4, 1) * torch.finfo(dtype).max
    weight = ends.to(dtype).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    for thresholds in (NOTHING, thresholds_of(weight, protect=1.0, prune=0.0)):
        codec = InshrinkeratorWeightCodec(bins=8, thresholds=thresholds)
        check_guarantees(codec, weight, round_trip(codec, weight)[1])


@pytest.mark.parametrize(("prune", "protect"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
def test_a_single_group(prune, protect):
    weight = torch.randn(40, 50)
    codec = InshrinkeratorWeightCodec(bins=4, thresholds=thresholds_of(weight, prune=prune, protect=protect))
    restored = round_trip(codec, weight)[1]
    check_guarantees(codec, weight, restored)
    if protect == 1.0:
        assert torch.equal(restored, weight.bfloat16().float())


@pytest.mark.parametrize("bins", [1, 2, 253])
def test_the_least_and_the_most_bins(bins):
    weight = torch.randn(64, 64)
    codec = InshrinkeratorWeightCodec(bins=bins, thresholds=NOTHING)
    check_guarantees(codec, weight, round_trip(codec, weight)[1])


def test_levels_that_did_not_move_cost_next_to_nothing():
    weight = torch.randn(100, 100)
    codec = InshrinkeratorWeightCodec(bins=16, thresholds=NOTHING)
    reference, _ = round_trip(codec, weight)
    encoded = encode(codec, weight, spec_of(weight), Context(reference)).encoded
    assert len(encoded.sections["levels"]) < 20


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value):
    weight = torch.ones(10, 10)
    weight[3, 3] = value
    with pytest.raises(CannotRepresentError, match="NaN or infinity"):
        encode(InshrinkeratorWeightCodec(thresholds=NOTHING), weight, spec_of(weight), Context())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    weight = torch.ones(10, 10, dtype=dtype)
    with pytest.raises(CannotRepresentError, match="dtype"):
        encode(InshrinkeratorWeightCodec(thresholds=NOTHING), weight, spec_of(weight), Context())


def encoded_pair(coder):
    weight = torch.randn(30, 30, generator=torch.Generator().manual_seed(3))
    codec = InshrinkeratorWeightCodec(bins=8, thresholds=thresholds_of(weight), coder=coder)
    reference, _ = round_trip(codec, weight)
    after = weight + 0.05 * torch.randn(30, 30, generator=torch.Generator().manual_seed(4))
    return encode(codec, after, spec_of(after), Context(reference)).encoded, spec_of(after), reference


@pytest.mark.parametrize("coder", ["rans", "rle-huffman"])
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_sections_and_params_give_wrong_values_or_the_projects_own_error(coder, data):
    encoded, spec, reference = encoded_pair(coder)
    sections = {name: bytearray(section) for name, section in encoded.sections.items()}
    target = sections[data.draw(st.sampled_from(sorted(sections)))]
    for _ in range(data.draw(st.integers(0, 3))):
        target[data.draw(st.integers(0, len(target) - 1))] ^= data.draw(st.integers(1, 255))
    del target[len(target) - data.draw(st.sampled_from([0, 0, 0, 1, len(target)])) :]
    params = data.draw(
        st.sampled_from([encoded.params, {}, {"levels": 2}, {"levels": 10.0}, {"levels": 255}])
    )
    given = data.draw(st.sampled_from([reference, None]))
    hostile = EncodedTensor(
        "inshrinkerator-weight", params, {name: bytes(s) for name, s in sections.items()}, True
    )
    try:
        planes = InshrinkeratorWeightCodec().decode(hostile, spec, Context(given))
        assert InshrinkeratorWeightCodec().reconstruct(hostile, planes, spec, Context()).shape == spec.shape
    except FormatError:
        return


@pytest.mark.parametrize("name", ["levels", "codebook", "protected"])
def test_a_missing_section_is_named(name):
    encoded, spec, reference = encoded_pair("rans")
    sections = {part: section for part, section in encoded.sections.items() if part != name}
    hostile = EncodedTensor("inshrinkerator-weight", encoded.params, sections, True)

    def read():
        planes = InshrinkeratorWeightCodec().decode(hostile, spec, Context(reference))
        return InshrinkeratorWeightCodec().reconstruct(hostile, planes, spec, Context())

    with pytest.raises(FormatError, match=name):
        read()


@settings(max_examples=20)
@given(st.integers(0, 50), st.sampled_from(DTYPES))
@example(0, torch.float32)
def test_the_same_weight_gives_the_same_bytes(seed, dtype):
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codec = InshrinkeratorWeightCodec(bins=6, thresholds=thresholds_of(weight))
    first, second = (encode(codec, w, spec_of(weight), Context()).encoded for w in (weight, weight.clone()))
    assert first.sections == second.sections
