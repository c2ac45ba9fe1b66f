import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import Coded, check_malformed, encode, spec_of
from support.moments import KINDS, SCALES, SHAPES, moments

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.auto.factors import EMPTY, Factors
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
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


def test_first_moments_that_are_unknown_or_nothing_change_nothing():
    first, second = moments(300, 200)
    for unknown in (None, first[:5], first * torch.nan, first.reshape(200, 300), first * 0):
        coded, value = code(second, unknown)
        assert coded.encoded.nbytes <= 300 + 200
        assert torch.equal(value, code(second)[1])


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
