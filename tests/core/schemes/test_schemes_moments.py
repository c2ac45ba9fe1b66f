import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import encode
from support.containers import identical

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.state.training import TensorSpec

TINY = 2.0**-126


def spec_of(tensor: torch.Tensor, name: str = "m") -> TensorSpec:
    return TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))


def round_trip(codec, tensor, reference=None, second=None):
    spec, siblings = spec_of(tensor), {} if second is None else {"exp_avg_sq": second}
    context = Context(reference, siblings)
    coded = encode(codec, tensor, spec, context)
    reader, seen = type(codec)(), Context(reference if coded.encoded.uses_reference else None)
    planes = reader.decode(coded.encoded, spec, seen)
    restored = reader.reconstruct(coded.encoded, planes, spec, Context(None, siblings))
    assert identical(restored, coded.value)
    assert all(np.array_equal(coded.planes[name], planes[name]) for name in {*coded.planes, *planes})
    return ReferenceState(coded.encoded.codec, coded.encoded.params, planes), restored


def factor_of(v: torch.Tensor) -> np.ndarray:
    """The factor by its definition in docs/format.md, in numpy."""
    matrix = v.reshape(v.shape[0] if v.dim() >= 2 else 1, -1).double().numpy()
    mean = matrix.mean() or 1.0
    rows, columns = matrix.mean(axis=1) / mean, matrix.mean(axis=0)
    rows, columns = (np.where(x < TINY, 0, x) for x in (rows, columns))  # as fp32 without subnormals
    return np.maximum(np.multiply.outer(rows, columns), TINY).reshape(v.shape)


def check_second(v: torch.Tensor, restored: torch.Tensor) -> None:
    assert bool(torch.isfinite(restored).all())
    assert torch.equal(restored == 0, v == 0)
    nonzero = v != 0
    assert bool((restored[nonzero] >= TINY).all())
    with np.errstate(divide="ignore"):
        octaves = np.abs(np.log2(v.double().numpy() / factor_of(v)))
    free = nonzero & torch.as_tensor(octaves < 60) & (v >= TINY)
    ratio = (restored[free].double() / v[free].double()).log2().abs()
    assert bool((ratio <= 0.5 + 1e-4).all())


@st.composite
def second_moments(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    v = torch.randn(shape, generator=generator).double() ** 2
    kind = draw(
        st.sampled_from(["plain", "wild", "wild rows", "zero rows", "zero columns", "zeros", "all zero"])
    )
    if kind == "wild":
        v = v ** draw(st.sampled_from([3, 10, 40]))
    if kind == "wild rows":
        v = v * 10.0 ** torch.linspace(-30, 30, shape[0]).double().reshape(-1, *[1] * (len(shape) - 1))
    if kind == "zero rows":
        v[::2] = 0
    if kind == "zero columns":
        v[..., ::2] = 0
    if kind == "zeros":
        v = v * (v > 1)
    if kind == "all zero":
        v = v * 0
    return (v * 10.0 ** draw(st.integers(-38, 30))).clamp(max=1e34).float()


@settings(max_examples=60)
@given(st.data())
def test_second_moments_keep_their_guarantees_along_a_chain(data):
    reference = None
    v = data.draw(second_moments())
    for _ in range(data.draw(st.integers(1, 3))):
        reference, restored = round_trip(SecondMomentCodec(), v, reference)
        check_second(v, restored)
        v = v * 0.999 + 0.001 * torch.rand(v.shape) * v.mean()


@given(second_moments(), st.integers(-3, 0))
def test_first_moments_keep_their_guarantees(v, scale):
    v = round_trip(SecondMomentCodec(), v)[1]
    root = v.sqrt()
    m = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) * root * 10.0**scale
    reference = None
    for _ in range(2):
        reference, restored = round_trip(FirstMomentCodec(), m, reference, v)
        assert bool(torch.isfinite(restored).all())
        assert not restored[v == 0].any()
        free = m.abs() <= 15.5 * root
        error = (restored - m).abs()[free].double()
        assert bool((error <= root[free].double() / 4 * (1 + 1e-5)).all())
        clipped = restored.abs()[~free].double()
        assert bool((clipped <= 15.5 * root[~free].double() * (1 + 1e-5)).all())


def test_subnormal_moments_are_restored_as_the_least_normal():
    v = torch.full((4, 4), 1e-42)
    assert torch.equal(round_trip(SecondMomentCodec(), v)[1], torch.full((4, 4), TINY))


@pytest.mark.parametrize("fill", [1e-42, 1e-37, 1e-20])
def test_decoding_does_not_depend_on_how_the_process_treats_subnormals(fill):
    v = torch.rand(20, 20) * fill
    v[:, 3] = 1e-44
    m = torch.randn(20, 20) * v.sqrt()
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine does not flush subnormals")
    try:
        flushed = encode(SecondMomentCodec(), v, spec_of(v), Context())
        first = encode(FirstMomentCodec(), m, spec_of(m), Context(None, {"exp_avg_sq": flushed.value}))
    finally:
        torch.set_flush_denormal(False)
    v_again = SecondMomentCodec().reconstruct(flushed.encoded, flushed.planes, spec_of(v), Context())
    assert identical(v_again, flushed.value)
    context = Context(None, {"exp_avg_sq": v_again})
    assert identical(
        FirstMomentCodec().reconstruct(first.encoded, first.planes, spec_of(m), context), first.value
    )


def test_the_end_of_the_range_is_refused_rather_than_restored_as_infinite():
    v = torch.tensor([[3.4e38, 1e38], [1e38, 3.4e38]])
    with pytest.raises(CannotRepresentError, match="fp32"):
        encode(SecondMomentCodec(), v, spec_of(v), Context())
    v = torch.tensor([[3.4e38, 1.5e38], [1.5e38, 3.4e38]])
    check_second(v, round_trip(SecondMomentCodec(), v)[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", [SecondMomentCodec(), FirstMomentCodec()])
def test_moments_that_are_not_finite_are_refused_with_the_reason(codec, value):
    moment = torch.ones(5, 5)
    moment[2, 2] = value
    with pytest.raises(CannotRepresentError, match="NaN or infinity"):
        encode(codec, moment, spec_of(moment), Context(None, {"exp_avg_sq": torch.ones(5, 5)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_first_moment_beside_a_second_one_without_root_is_refused(value):
    """v is then stored exactly, and m in units of its root would be restored as NaN."""
    v = torch.ones(5, 5)
    v[1, 1] = value
    with pytest.raises(CannotRepresentError, match="second moment"):
        encode(FirstMomentCodec(), torch.ones(5, 5), spec_of(v), Context(None, {"exp_avg_sq": v}))


@pytest.mark.parametrize("second", [None, torch.ones(5, 4), torch.ones(5, 5).bfloat16()])
def test_a_first_moment_without_its_second_one_is_refused(second):
    siblings = {} if second is None else {"exp_avg_sq": second}
    with pytest.raises(CannotRepresentError, match="second moment"):
        encode(FirstMomentCodec(), torch.ones(5, 5), spec_of(torch.ones(5, 5)), Context(None, siblings))


def test_a_first_moment_that_its_second_one_cannot_measure_is_refused():
    second = torch.full((64, 64), 1e-6)
    first = torch.zeros(64, 64)
    first.view(-1)[:4] = 1.0  # clipped, as single outliers may be
    round_trip(FirstMomentCodec(), first, second=second)
    first.view(-1)[:5] = 1.0
    with pytest.raises(CannotRepresentError, match="too large for its second moment"):
        round_trip(FirstMomentCodec(), first, second=second)


@pytest.mark.parametrize(
    "moment", [torch.ones(5, 5).bfloat16(), torch.ones(5, 5).double(), torch.ones(5, 5, dtype=torch.int8)]
)
def test_moments_that_are_not_fp32_are_refused(moment):
    for codec in (SecondMomentCodec(), FirstMomentCodec()):
        with pytest.raises(CannotRepresentError, match="dtype"):
            encode(codec, moment, spec_of(moment), Context(None, {"exp_avg_sq": torch.ones(5, 5)}))


def test_negative_and_empty_second_moments_are_refused():
    for v, why in ((torch.tensor([[1.0, -1e-30]]), "negative"), (torch.ones(0, 5), "empty")):
        with pytest.raises(CannotRepresentError, match=why):
            encode(SecondMomentCodec(), v, spec_of(v), Context())


PARAMS = st.sampled_from(
    [
        {},
        {"lowest": -(2**63), "count": 3},
        {"lowest": 2**63 - 1, "count": 3},
        {"lowest": 1, "count": 0},
        {"lowest": 120, "count": 50},
        {"lowest": True, "count": 1},
        {"step": 1},
        {"step": 1e300},
        {"step": -1.0},
        {"step": "0.5"},
    ]
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("codec", [SecondMomentCodec(), FirstMomentCodec()])
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_sections_and_params_give_wrong_values_or_the_projects_own_error(codec, data):
    tensor = torch.rand(20, 20, generator=torch.Generator().manual_seed(1))
    siblings = {"exp_avg_sq": torch.ones(20, 20)}
    reference, _ = round_trip(codec, tensor, None, siblings["exp_avg_sq"])
    after = tensor * (1 + torch.rand(20, 20, generator=torch.Generator().manual_seed(2)))
    encoded = encode(codec, after, spec_of(after), Context(reference, siblings)).encoded
    sections = {name: bytearray(section) for name, section in encoded.sections.items()}
    target = sections[data.draw(st.sampled_from(sorted(sections)))]
    for _ in range(data.draw(st.integers(0, 3))):
        target[data.draw(st.integers(0, len(target) - 1))] ^= data.draw(st.integers(1, 255))
    del target[len(target) - data.draw(st.sampled_from([0, 0, 0, 1, 4, len(target)])) :]
    params = data.draw(st.just(encoded.params) | PARAMS)
    given = data.draw(st.sampled_from([reference, None]))
    hostile = EncodedTensor(
        codec.id, params, {n: bytes(s) for n, s in sections.items()}, encoded.uses_reference
    )
    try:
        planes = codec.decode(hostile, spec_of(after), Context(given))
        restored = codec.reconstruct(hostile, planes, spec_of(after), Context(None, siblings))
        assert restored.shape == after.shape
    except FormatError:
        return
