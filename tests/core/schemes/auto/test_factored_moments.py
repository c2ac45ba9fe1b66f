import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import Coded, check_malformed, encode, spec_of
from support.moments import KINDS, SCALES, SHAPES, moments
from support.teams import in_team

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.quantize import matrix_kernels
from shrinkpoint.schemes.auto.factors import EMPTY, Factors
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec, rank_one
from shrinkpoint.schemes.base import Context, EncodedTensor
from shrinkpoint.schemes.codec_io import matrix_shape
from shrinkpoint.state.training import Role

LONGEST = 2 ** (1 / 16) * 1.0001
"""A quarter octave of a second moment, of which half is rounded: 4.4 % of its root."""


def code(second: torch.Tensor, first: torch.Tensor | None = None) -> tuple[Coded, torch.Tensor]:
    """What was coded, and the tensor that a reader gets, of what is stored alone."""
    spec, codec = spec_of(second, "v", Role.EXP_AVG_SQ), FactoredSecondMomentCodec(first_moment=first)
    coded = encode(codec, second, spec, Context())
    assert coded.planes == coded.encoded.params == {}
    reader = FactoredSecondMomentCodec()
    restored = reader.reconstruct(
        coded.encoded, reader.decode(coded.encoded, spec, Context()), spec, Context()
    )
    assert torch.equal(restored.view(torch.int32), coded.value.view(torch.int32))
    return coded, restored


def lengths(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Of each row of ``m / sqrt(v)``, where v is not zero."""
    m, v = (each.reshape(matrix_shape(tuple(each.shape))).double() for each in (first, second))
    squares = torch.where(v > 0, m.square() / v.where(v > 0, 1.0), 0.0)
    return squares.sum(dim=1).sqrt()


@settings(max_examples=200)
@given(SHAPES, st.integers(0, 999), SCALES, KINDS, st.booleans())
def test_second_moments_are_read_as_written_and_never_zero_where_they_were_not(
    shape, seed, scale, kind, told
):
    first, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    _, value = code(second, first if told else None)
    assert bool((value[second > 0] >= torch.finfo().tiny).all())
    assert bool((value >= 0).all())
    if second.dim() == 2:
        assert bool((value[second.sum(dim=1) == 0] == 0).all())
        assert bool((value[:, second.sum(dim=0) == 0] == 0).all())


@settings(max_examples=200)
@given(
    SHAPES,
    st.integers(0, 999),
    st.sampled_from([1e-8, 1e-3, 1.0, 1e6]),
    st.sampled_from(["plain", "dead row", "dead column", "sparse", "one sign"]),
)
def test_updates_of_the_first_moment_are_half_the_way_to_their_length_row_by_row(shape, seed, scale, kind):
    first, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    wanted, found = half_the_way(first, second), lengths(first, code(second, first)[1])
    assert bool((found <= LONGEST * wanted).all())
    assert bool((wanted <= LONGEST * found).all())


def half_the_way(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Lengths of rows between the true ones and those of factors that do not know the first moment."""
    return (lengths(first, second) * lengths(first, code(second)[1])).sqrt()


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_updates_keep_their_length_however_far_elements_lie_from_a_product(spread):
    """Scaled to the mean logarithm instead, updates would be the longer the more elements differ, up to seven times here."""
    generator = torch.Generator().manual_seed(0)
    second = 1e-8 * torch.exp(spread * torch.randn(64, 200, generator=generator))
    first = 0.1 * second.sqrt() * torch.randn(64, 200, generator=generator)
    ratios = lengths(first, code(second, first)[1]) / half_the_way(first, second)
    assert float(ratios.max()) <= LONGEST
    assert float(ratios.min()) >= 1 / LONGEST
    if spread:  # otherwise all rows are rounded alike
        assert float(ratios.log().mean()) == pytest.approx(0, abs=0.01)
    without = lengths(first, code(second)[1]) / lengths(first, second)
    assert float(without.mean()) == pytest.approx(1, abs=0.05)


def quotients(second: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """Of each row that has any, the mean of ``v / v'`` where v is not zero."""
    v, other = (each.reshape(matrix_shape(tuple(each.shape))).double() for each in (second, restored))
    counted = (v > 0).sum(dim=1)
    sums = torch.where(v > 0, v / other.where(v > 0, 1.0), 0.0).sum(dim=1)
    return sums[counted > 0] / counted[counted > 0]


@settings(max_examples=200)
@given(
    SHAPES,
    st.integers(0, 999),
    st.sampled_from([1e-8, 1e-3, 1.0, 1e6]),
    st.sampled_from(["plain", "dead row", "dead column", "sparse", "one sign"]),
)
def test_without_a_first_moment_the_mean_quotient_is_one_row_by_row(shape, seed, scale, kind):
    _, second = moments(*shape, seed=seed, scale=scale, kind=kind)
    found = quotients(second, code(second)[1])
    assert bool((found <= 2 ** (1 / 8) * 1.0001).all())
    assert bool((found >= 2 ** (-1 / 8) / 1.0001).all())


def test_columns_are_told_by_all_rows_and_not_by_the_largest():
    """Rows of very different sizes: the mean of a column says what the largest few hold in it."""
    generator = np.random.default_rng(0)
    rows, columns = 10.0 ** generator.uniform(-4, 0, (300, 1)), 10.0 ** generator.uniform(-1, 0, (1, 200))
    noise = generator.chisquare(4, (300, 200)) / 4
    values = (1e-8 * rows * columns * noise).astype(np.float32)

    def away(factors: Factors) -> float:
        return float(np.std(factors.columns / 4 - np.log2(columns[0])))

    means = Factors.of_second_moment(values)
    assert away(means) > 0.13
    assert away(means.balanced(values)) < 0.1  # of which rounding to quarter octaves alone makes 0.072


def misfit(second: torch.Tensor) -> float:
    return rank_one(second, spec_of(second, role=Role.EXP_AVG_SQ))[1]


@pytest.mark.parametrize("shape", [(64, 200), (400, 512), (32, 8, 3, 3), (3000,)])
@pytest.mark.parametrize("spread", [0.0, 0.3, 0.7, 1.5])
def test_the_misfit_is_the_spread_of_elements_around_a_product(shape, spread):
    generator = torch.Generator().manual_seed(1)
    rows = torch.exp(3 * torch.randn(shape[0] if len(shape) > 1 else 1, 1, generator=generator))
    product = rows * torch.exp(3 * torch.randn(1, torch.Size(shape[-1:]).numel(), generator=generator))
    product = product.reshape(product.shape[0], *[1] * max(0, len(shape) - 2), product.shape[1])
    second = (product * torch.exp2(spread * torch.randn(shape, generator=generator))).reshape(shape)
    if len(shape) == 1:  # each element has a factor of its own
        assert misfit(second) < 0.1
    else:  # factors are quarter octaves; a mean of quotients is above that of their logarithms
        above = np.log(2) * spread**2 / 2
        assert misfit(1e-9 * second) == pytest.approx(np.hypot(spread, above), rel=0.12, abs=0.12)


def test_what_is_zero_does_not_count_as_misfit():
    generator = torch.Generator().manual_seed(2)
    product = (torch.rand(50, 1, generator=generator) + 0.01) * (
        torch.rand(1, 300, generator=generator) + 0.01
    )
    sparse = product * (torch.rand(50, 300, generator=generator) > 0.5)
    assert misfit(sparse) < 0.15
    assert misfit(0 * product) == 0


def test_what_is_refused_has_no_misfit():
    second = torch.rand(8, 9, generator=torch.Generator().manual_seed(0)) ** 8
    assert misfit(second) > 1
    for odd in (-second, second * torch.nan, second.to(torch.complex64), second[:0], second * torch.inf):
        assert misfit(odd) == 0


def test_first_moments_that_are_unknown_or_nothing_change_nothing():
    first, second = moments(300, 200)
    for unknown in (None, first[:5], first * torch.nan, first.reshape(200, 300), first * 0):
        coded, value = code(second, unknown)
        assert coded.encoded.nbytes <= 300 + 200
        assert torch.equal(value, code(second)[1])


def test_rows_without_a_first_moment_stay_as_they_are():
    first, second = moments(30, 20)
    first[7] = 0
    value, plain = code(second, first)[1], code(second)[1]
    assert torch.equal(value[7], plain[7])
    assert not torch.equal(value[8:], plain[8:])


def test_rows_that_have_not_been_seen_for_long_keep_their_factor():
    second = torch.ones(50, 40)
    second[3] = 1e-37
    _, value = code(second)
    assert bool((value[3] < 1e-35).all())
    assert bool((value[4] > 0.5).all())


@given(st.lists(st.floats(-200, 200), min_size=1, max_size=9), st.lists(st.floats(-300, 300), max_size=9))
def test_factors_are_lengthened_to_the_nearest_quarter_within_the_range(octaves, more):
    rows = np.exp2(np.clip(octaves, -120, 120)).astype(np.float32)
    before = Factors.of_second_moment(np.append(rows, np.float32(0)).reshape(-1, 1))
    wanted = np.append(np.array([*more, *[0.0] * rows.size])[: rows.size], 5.0)
    after = before.lengthened(wanted)
    assert np.array_equal(after.columns, before.columns)
    assert after.rows[-1] == before.rows[-1]  # a row without any has no factor
    for row in range(rows.size):
        quarters = 4 * wanted[row]
        expected = min(max(float(before.rows[row]) + quarters, -504), 508)
        assert abs(float(after.rows[row]) - expected) <= 0.5


def test_factors_of_second_moments_and_of_momenta_are_quarter_octaves():
    values = torch.rand((20, 30), generator=torch.Generator().manual_seed(0)).numpy()
    for factors in (Factors.of_second_moment(values), Factors.of_roots(values)):
        assert (factors.rows % 4).any()
        assert (factors.columns % 4).any()


def test_roots_are_found_where_squares_are_beyond_fp32():
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-36, 1e30):
        values = scale * torch.randn(64, 64, generator=generator)
        root = float(np.median(Factors.of_roots(values.numpy()).product()))
        assert root == pytest.approx(scale, rel=0.3)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 600))
def test_lengths_and_distances_of_rows(seed, height, width):
    generator = np.random.default_rng(seed)
    first, other = (generator.standard_normal((height, width)).astype(np.float32) for _ in range(2))
    second = (10.0 ** generator.uniform(-30, 5, (height, width))).astype(np.float32)
    second[generator.random((height, width)) < 0.2] = 0
    rows = np.empty(height)
    matrix_kernels.square_lengths(first, second, rows)
    assert rows == pytest.approx(
        lengths(torch.from_numpy(first), torch.from_numpy(second)).square().numpy(), rel=1e-9
    )
    matrix_kernels.row_squares(first, other, rows)
    apart = np.square(first.astype(np.float64) - other.astype(np.float64)).sum(axis=1)
    assert rows == pytest.approx(apart, rel=1e-9)


def test_odd_values_are_refused():
    _, second = moments(30, 30)
    for wrong in (
        second.int(),
        second * torch.nan,
        -second,
        second[:0],
        second.to(torch.float8_e5m2),
        second * 0 + torch.inf,
    ):
        with pytest.raises(CannotRepresentError):
            FactoredSecondMomentCodec().stage(wrong, spec_of(wrong), Context())


def test_what_would_grow_beyond_fp32_is_refused():
    second = torch.zeros(4, 32)
    second[:, :8] = 3.3e38
    with pytest.raises(CannotRepresentError, match="float32's range"):
        code(second)


def test_damaged_copies_are_refused():
    _, second = moments(30, 20)
    check_malformed(FactoredSecondMomentCodec(), second, second)
    second[3] = 1e-37  # far from the others
    check_malformed(FactoredSecondMomentCodec(), second, second)


def test_stored_tensors_of_no_elements_or_other_dtypes_are_refused():
    _, second = moments(30, 20)
    encoded = code(second)[0].encoded
    for strange in (second[:0], second.to(torch.float8_e5m2), second.int()):
        with pytest.raises(FormatError, match="stored exactly"):
            FactoredSecondMomentCodec().reconstruct(encoded, {}, spec_of(strange), Context())


def read(rows: list[int], columns: list[int]) -> Factors:
    factors = Factors(rows=np.array(rows, np.int16), columns=np.array(columns, np.int16))
    encoded = EncodedTensor("factored-second-moment", {}, {"factors": factors.encode()})
    return Factors.read(encoded, spec_of(torch.rand(4, 5)))


def test_exponents_come_back_in_all_of_their_range():
    rows, columns = [-504, EMPTY, 0, 508], [508, -504, 1, EMPTY, -1]
    found = read(rows, columns)
    assert (found.rows.tolist(), found.columns.tolist()) == (rows, columns)


@pytest.mark.parametrize("exponent", [-505, 509, EMPTY + 1, 2**15 - 1])
def test_an_exponent_beyond_the_range_is_refused(exponent):
    for rows, columns in (([0, exponent, 0, 0], [0] * 5), ([0] * 4, [0] * 4 + [exponent])):
        with pytest.raises(FormatError, match="beyond the range"):
            read(rows, columns)


@pytest.mark.parametrize("section", [b"", b"\x05abc", b"\0\0", b"\xff" * 12])
def test_malformed_factors_are_refused(section):
    with pytest.raises(FormatError):
        Factors.read(
            EncodedTensor("factored-second-moment", {}, {"factors": section}), spec_of(torch.rand(4, 5))
        )


def test_bytes_do_not_depend_on_threads():
    first, second = moments(600, 700)
    codec = FactoredSecondMomentCodec(first_moment=first)
    one, two = (in_team(n, lambda: encode(codec, second, spec_of(second), Context())) for n in (1, 2))
    assert one.encoded == two.encoded


@pytest.mark.parametrize("kind", ["subnormal", "far row", "plain"])
@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e-17, 1e-3])
def test_a_process_without_subnormals_restores_the_same_bits(kind, scale):
    first, second = moments(40, 30, scale=scale, kind=kind)
    spec = spec_of(second)
    coded, _ = code(second, first)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        again = FactoredSecondMomentCodec().reconstruct(coded.encoded, {}, spec, Context())
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(again.view(torch.int32), coded.value.view(torch.int32))
