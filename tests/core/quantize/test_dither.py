"""Compiled loops of dithered quantization against the same arithmetic by numpy, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.quantize import dither_kernels
from shrinkpoint.quantize.dither import EDGE_CLASSES, dither, dither_edges, edge_table

SIZE = 4099
SEEDS = st.integers(0, 2**32 - 1)


def dither_by_numpy(seed, count):
    with np.errstate(over="ignore"):
        bits = (np.arange(1, count + 1, dtype=np.uint64) + (np.uint64(seed) << np.uint64(32))) * np.uint64(
            0x9E37_79B9_7F4A_7C15
        )
        for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        bits ^= bits >> np.uint64(31)
    return ((2 * (bits >> np.uint64(48)).astype(np.float64) + 1) * 2.0**-17 - 0.5).astype(np.float32)


def lattice(seed):
    generator = np.random.default_rng(seed)
    exponents = generator.integers(0, 129, SIZE).astype(np.uint8)
    quarters = (10.0 ** generator.uniform(-20, 10) * np.array([1, 1.1892071, 1.4142135, 1.6817929])).astype(
        np.float32
    )
    steps = np.ldexp(quarters[np.arange(129) % 4], np.arange(129) // 4 - 16)
    assert steps.dtype == np.float32
    values = (generator.standard_normal(SIZE) ** 3 * 10).astype(np.float32) * steps[exponents]
    return generator, values, exponents, quarters, steps[exponents]


@given(SEEDS, st.integers(0, 3000))
def test_offsets_and_their_classes(seed, count):
    offsets = dither(seed, count)
    assert np.array_equal(offsets, dither_by_numpy(seed, count))
    slots = np.floor((offsets + np.float32(0.5)) * np.float32(512)).astype(np.int64)
    assert np.array_equal(dither_edges(seed, count), edge_table()[slots])


@given(SEEDS)
def test_lattice_points_and_their_indices(seed):
    _, values, exponents, quarters, steps = lattice(seed)
    offsets, index = dither_by_numpy(seed, SIZE), np.empty(SIZE, np.int16)
    limit = 30_000
    place = np.rint(values / steps + offsets)
    inside = dither_kernels.nearest(values, exponents, quarters, seed, limit, index)
    assert inside == bool((abs(place) <= limit).all())
    assert place.dtype == np.float32
    assert np.array_equal(index, np.clip(place, -limit - 1, limit + 1).astype(np.int16))
    out = np.empty(SIZE, np.float32)
    dither_kernels.points(index, exponents, quarters, seed, out)
    expected = (index.astype(np.float32) - offsets) * steps
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


@given(SEEDS)
def test_places_in_another_lattice_and_values_in_half_steps(seed):
    _, values, exponents, quarters, steps = lattice(seed)
    offsets = dither_by_numpy(seed, SIZE)
    index, classes = np.empty(SIZE, np.int16), np.empty(SIZE, np.uint8)
    dither_kernels.carry(values, exponents, quarters, seed, 30_000, edge_table(), index, classes)
    place = values / steps + offsets
    whole = np.rint(np.clip(place, np.float32(-30_000), np.float32(30_000)))
    slot = np.clip(((place - whole) + np.float32(0.5)) * np.float32(512), np.float32(0), np.float32(511))
    assert np.array_equal(index, whole.astype(np.int16))
    assert np.array_equal(classes, edge_table()[slot.astype(np.int64)])
    dither_kernels.halves(index, seed, 12, classes)
    half = np.rint((index.astype(np.float32) - offsets) * np.float32(2))
    assert np.array_equal(classes, (np.clip(half, -12, 12) + 12).astype(np.uint8))


@given(SEEDS, st.sampled_from([0, 3, 126]), st.sampled_from([1, 200, 40_000]))
def test_moves_and_back(seed, radius, spread):
    generator = np.random.default_rng(seed)
    predicted = generator.integers(-20_000, 20_000, 500).astype(np.int16)
    index = np.clip(predicted + generator.integers(-spread, spread + 1, 500), -30_000, 30_000).astype(
        np.int16
    )
    move = index.astype(np.int64) - predicted
    assert dither_kernels.largest_move(index, predicted) == abs(move).max()
    symbols, none = np.empty(500, np.uint8), np.zeros(0, np.int32)
    far = np.empty(dither_kernels.moves(index, predicted, radius, symbols, none), np.int32)
    dither_kernels.moves(index, predicted, radius, symbols, far)
    assert np.array_equal(far, move[abs(move) > radius])
    assert np.array_equal(symbols, np.where(abs(move) > radius, 2 * radius + 1, move + radius))
    back = np.empty(500, np.int16)
    assert dither_kernels.unmove(symbols, predicted, radius, far, 30_000, back)
    assert np.array_equal(back, index)
    assert not dither_kernels.unmove(
        symbols, predicted, radius, far, int(abs(index.astype(int)).max()) - 1, back
    )


def test_classes_of_places_ascend_from_border_to_border_and_are_symmetric():
    table = edge_table().astype(int)
    assert (table[0], table[-1]) == (0, EDGE_CLASSES - 1)
    assert (np.diff(table) >= 0).all()
    assert np.array_equal(table + table[::-1], np.full(512, EDGE_CLASSES - 1))


def test_dither_is_fixed_for_ever():
    offsets = dither(12345, 1 << 19)
    assert [float(x) * 2**17 for x in offsets[:4]] == [-7501.0, 6697.0, 59465.0, -10847.0]
    assert float(offsets.min()) > -0.5
    assert float(offsets.max()) < 0.5
    assert abs(float(offsets.mean())) < 1e-3
    assert np.array_equal(dither(12345, 300_001), offsets[:300_001])
    assert not np.array_equal(dither(12346, 100), offsets[:100])
    share = np.bincount(dither_edges(12345, 1 << 19), minlength=EDGE_CLASSES) / 2**19
    ends = np.array([0, 8, 11, 16, 23, 32, 45, 64, 91, 128, 256]) / 512
    assert share[:10] == pytest.approx(np.diff(ends), rel=0.05)
