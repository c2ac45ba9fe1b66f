"""Compiled loops of dithered quantization against the same arithmetic by numpy, bit for bit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.quantize import trellis_dither_kernels

SIZE = 4099
SEEDS = st.integers(0, 2**32 - 1)


def bits_by_numpy(seed, count):
    with np.errstate(over="ignore"):
        bits = (np.arange(1, count + 1, dtype=np.uint64) + (np.uint64(seed) << np.uint64(32))) * np.uint64(
            0x9E37_79B9_7F4A_7C15
        )
        for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        bits ^= bits >> np.uint64(31)
    return bits


def wide_dither_by_numpy(seed, count):
    """That of a trellis, whose points lie two steps apart."""
    bits = bits_by_numpy(seed, count)
    return ((2 * (bits >> np.uint64(47)).astype(np.float64) + 1) * 2.0**-17 - 1).astype(np.float32)


def grid(generator):
    exponents = generator.integers(0, 129, SIZE).astype(np.uint8)
    quarters = (10.0 ** generator.uniform(-20, 10) * np.array([1, 1.1892071, 1.4142135, 1.6817929])).astype(
        np.float32
    )
    steps = np.ldexp(quarters[np.arange(129) % 4], np.arange(129) // 4 - 16)
    assert steps.dtype == np.float32
    return exponents, quarters, steps[exponents]


@given(SEEDS)
def test_places_on_a_trellis_and_the_values_of_its_points(seed):
    generator = np.random.default_rng(seed)
    exponents, quarters, steps = grid(generator)
    offsets = wide_dither_by_numpy(seed, SIZE)
    points = generator.integers(-30_000, 30_001, SIZE).astype(np.int16)
    out = np.empty(SIZE, np.float32)
    trellis_dither_kernels.values(points, exponents, quarters, seed, out)
    expected = (points.astype(np.float32) * np.float32(0.5) - offsets) * steps
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))
    again, near = np.empty(SIZE, np.int16), abs(points) < 28_000
    trellis_dither_kernels.points(out, exponents, quarters, seed, again)
    assert np.array_equal(again[near], points[near])
    zeros = np.empty(SIZE, np.int16)
    trellis_dither_kernels.places(seed, zeros)
    assert np.array_equal(zeros, np.floor(offsets * np.float32(256)))


@given(SEEDS, st.sampled_from([1.0, 10.0, 1000.0]))
def test_places_from_another_trellis(seed, far):
    """The nearest even point, and where what is expected lies beside it."""
    generator = np.random.default_rng(seed)
    exponents, quarters, steps = grid(generator)
    exponents_before = (exponents + generator.integers(-8, 9, SIZE)).clip(0, 128).astype(np.uint8)
    quarters_before = quarters * np.float32(1.1)
    steps_before = np.ldexp(quarters_before[exponents_before % 4], exponents_before.astype(int) // 4 - 16)
    assert steps_before.dtype == np.float32
    before = (generator.standard_normal(SIZE) ** 3 * far).astype(np.float32) * steps
    back = generator.integers(-127, 128, SIZE).astype(np.int8)
    even, places = np.empty(SIZE, np.int16), np.empty(SIZE, np.int16)
    trellis_dither_kernels.expect(
        before, back, exponents_before, quarters_before, exponents, quarters, seed, even, places
    )
    mean = before + (back.astype(np.float32) * steps_before) * np.float32(2.0**-6)
    place = mean / steps + wide_dither_by_numpy(seed, SIZE)
    place = np.clip(place, np.float32(-14_000), np.float32(14_000))
    near = np.floor(place * np.float32(0.5) + np.float32(0.5)) * np.float32(2)
    assert place.dtype == near.dtype == np.float32
    assert np.array_equal(even, 2 * near)
    assert np.array_equal(places, np.clip(np.floor((place - near) * np.float32(256)), -256, 255))


@given(SEEDS, st.sampled_from([2, 100, 30_000]))
def test_what_is_remembered_is_a_share_of_what_a_point_lies_beyond_its_place(seed, far):
    generator = np.random.default_rng(seed)
    points = generator.integers(-far, far + 1, SIZE).astype(np.int16)
    places = generator.integers(-256, 256, SIZE).astype(np.int16)
    exponents, gains = generator.integers(0, 129, SIZE).astype(np.uint8), np.zeros(256, np.uint16)
    gains[:129] = generator.integers(0, 257, 129)
    out = np.empty(SIZE, np.int8)
    trellis_dither_kernels.remember(points, places, gains, exponents, out)
    beyond = points.astype(np.int64) * 128 - places
    share = -beyond * gains[exponents].astype(np.int64) / 256  # in 1/256 step
    assert np.array_equal(out, np.clip(np.floor(share / 4 + 0.5), -127, 127))


def test_dither_is_fixed_for_ever():
    values = np.empty(1 << 19, np.float32)
    steps = np.ones(4, np.float32)
    points, exponents = np.zeros(values.size, np.int16), np.full(values.size, 64, np.uint8)
    trellis_dither_kernels.values(points, exponents, steps, 12345, values)
    assert [float(x) * 2**17 for x in values[:4]] == [15001.0, -13395.0, -118929.0, 21693.0]
    assert -1 < float(values.min()) < float(values.max()) < 1
    assert abs(float(values.mean())) < 2e-3
