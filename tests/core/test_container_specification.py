"""A second reader, by docs/format.md alone and without a thought for speed, reads what ours wrote."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from support.context_planes import dithered_planes, golden_planes, low_rank_planes, sparse
from support.format_codecs import read_chain
from support.format_models import Model, StaticReader, read_model_plane
from support.format_reader import (
    Cursor,
    Side,
    read_context_plane,
    read_huffman,
    read_planes,
    read_ranked,
    read_rans,
    read_symbol_plane,
)

from shrinkpoint.entropy import context
from shrinkpoint.entropy.bytes import delta_bits, encode_bytes
from shrinkpoint.entropy.huffman import encode_huffman
from shrinkpoint.entropy.ranked import encode_ranks, rank_lengths
from shrinkpoint.entropy.rans import encode_symbols
from shrinkpoint.entropy.rle import encode_runs
from shrinkpoint.schemes.symbol_coders import encode_plane

EACH = Path(__file__).parents[1] / "golden" / "each"
CHAINS = json.loads((EACH / "v1.json").read_text())


@pytest.mark.parametrize("skew", [0.0, 0.3, 2.0])
@pytest.mark.parametrize(
    ("count", "alphabet", "n_contexts"),
    [(0, 5, 1), (1, 5, 1), (50, 2, 1), (3000, 17, 17), (20_001, 32, 32), (40_003, 200, 3), (270_001, 3, 1)],
)
def test_rans(count, alphabet, n_contexts, skew):
    rng = np.random.default_rng(count)
    weights = np.exp(-skew * np.arange(alphabet))
    contexts = rng.integers(0, n_contexts, count).astype(np.uint8)
    symbols = rng.choice(alphabet, count, p=weights / weights.sum()).astype(np.uint8)
    symbols = ((symbols.astype(int) + contexts) % alphabet).astype(np.uint8)
    data = encode_symbols(symbols, contexts if n_contexts > 1 else None, alphabet, n_contexts)
    assert read_rans(data, contexts.tolist(), alphabet) == symbols.tolist()


@pytest.mark.parametrize("item_size", [1, 2, 4, 8, 16])
def test_byte_planes(item_size):
    rng = np.random.default_rng(item_size)
    values = rng.normal(size=5000).astype(np.float32).view(np.uint8)
    values = values[: values.size // item_size * item_size]
    data = encode_bytes(values, item_size)
    assert read_planes(data, values.size // item_size, item_size) == values.tobytes()


@pytest.mark.parametrize("floating", [False, True])
def test_difference_of_bit_patterns(floating):
    rng = np.random.default_rng(0)
    current, predecessor = rng.integers(0, 2**16, (2, 500)).astype(np.uint16)
    stored = delta_bits(current, predecessor, floating)

    def ordered(x):
        return x if not floating else x ^ 0xFFFF if x >> 15 else x | 0x8000

    for x, y, z in zip(current.tolist(), predecessor.tolist(), stored.tolist(), strict=True):
        difference = (z >> 1) ^ (0xFFFF if z % 2 else 0)
        assert difference == (ordered(x) - ordered(y)) % 2**16


@pytest.mark.parametrize("values", [[], [7] * 9, [3, -1, 3, 3, 2**31 - 1, -5], list(range(-90, 90)) * 3])
def test_huffman(values):
    assert read_huffman(encode_huffman(np.array(values, np.int64))) == values


def test_run_lengths():
    values = np.repeat(np.array([3, 0, 9, 3], np.uint8), [1, 70_000, 2, 65_536])
    runs = encode_runs(values).tolist()
    assert runs == [-3, 0, 65_535, 0, 4465, -9, 2, -3, 65_535, -3]


@pytest.mark.parametrize("counts", [[9], [5, 5], [900, 50, 20, 7, 1], [2**k for k in range(32)][::-1]])
def test_ranked_codes(counts):
    lengths = rank_lengths(np.array(counts))
    ranks = np.random.default_rng(0).integers(0, len(counts), 500)
    data = encode_ranks(ranks, lengths)
    assert read_ranked(data, ranks.size, lengths) == ranks.tolist()


@pytest.mark.parametrize("alphabet", [1, 2, 9, 16, 256])
@pytest.mark.parametrize(
    ("coder", "methods"),
    [("packed", {0}), ("lzma", {1}), ("huffman", {2}), ("cyclic", {3}), ("rans", {4, 5})],
)
def test_symbol_planes(coder, methods, alphabet):
    rng = np.random.default_rng(alphabet)
    previous = rng.integers(0, alphabet, 5000).astype(np.uint8)
    plane = np.where(rng.random(5000) < 0.8, previous, (previous.astype(int) + 1) % alphabet).astype(np.uint8)
    data = encode_plane(plane, alphabet, coder, previous)
    assert data[0] in methods
    assert read_symbol_plane(data, plane.size, alphabet, previous.tolist()) == plane.tolist()


def read_context(data, plane, alphabet, columns, sides):
    return read_context_plane(data, plane.size, alphabet, columns, second_sides(sides), read_model_plane)


@pytest.mark.parametrize(
    ("effort", "columns", "modes"),
    [("fast", 120, {0}), ("default", 120, {1}), ("max", 90, {2}), ("max", 5, {2})],
)
def test_context_coder(effort, columns, modes):
    plane, sides = golden_planes()
    data = context.encode_plane(plane, 31, columns=columns, sides=sides, effort=effort)
    assert data[0] in modes
    assert read_context(data, plane, 31, columns, sides) == plane.tolist()


def test_context_coder_of_several_chunks():
    plane, sides = golden_planes()
    sides = [context.Side(np.tile(side.plane, 16), side.alphabet) for side in sides]
    for effort, given, levels, mode in ("fast", sides, sparse(plane), 3), ("default", [], plane, 1):
        tiled = np.tile(levels, 16)
        data = context.encode_plane(tiled, 31, columns=120, sides=given, effort=effort)
        assert data[0] == mode
        assert read_context(data, tiled, 31, 120, given) == tiled.tolist()


def split_features(data, alphabet, sides):
    """The features by which mode 1 tells contexts apart."""
    cursor = Cursor(data[1:])
    model = Model(1, cursor, sides)
    cursor.byte()
    return StaticReader(model, cursor, alphabet).tree.used


def second_sides(sides):
    return [Side(side.plane.tolist(), side.alphabet, side.places, side.two_sided) for side in sides]


@pytest.mark.parametrize("effort", ["default", "max"])
@pytest.mark.parametrize("warm", [False, True])
def test_context_coder_of_planes_of_low_rank(effort, warm):
    plane, side = low_rank_planes(150, 72, 3)
    sides = [context.Side(side.reshape(-1), 63)] if warm else []
    data = context.encode_plane(plane.reshape(-1), 63, columns=72, sides=sides, effort=effort)
    assert data[0] == {"default": 1, "max": 2}[effort]
    assert data[1] & 4
    assert effort == "max" or {0, 1} <= split_features(data, 63, second_sides(sides))
    assert read_context(data, plane.reshape(-1), 63, 72, sides) == plane.reshape(-1).tolist()


@pytest.mark.parametrize(("placed", "two_sided"), [(True, False), (False, True), (True, True)])
def test_context_coder_of_dithered_planes(placed, two_sided):
    plane, told, plain = dithered_planes(90, 70)
    side = context.Side(told.plane, 32, told.places if placed else None, two_sided)
    data = context.encode_plane(plane, 7, columns=70, sides=[side, plain])
    assert data[0] == 1
    assert data[1] >> 4 == placed + 2 * two_sided
    assert read_context(data, plane, 7, 70, [side, plain]) == plane.tolist()


def test_context_coder_of_mirrored_planes_of_several_chunks():
    plane, told, _ = dithered_planes(90, 70)
    side = context.Side(np.tile(told.plane, 43), 32, told.places, two_sided=True)
    tiled = np.tile(plane, 43)
    data = context.encode_plane(tiled, 7, columns=70, sides=[side])
    assert data == context.encode_plane(tiled, 7, columns=70, sides=[side], threads=2)
    assert data[0] == 1
    assert data[1] & 32
    assert read_context(data, tiled, 7, 70, [side]) == tiled.tolist()


@pytest.mark.parametrize("case", CHAINS)
def test_golden_chains(case):
    files = [(EACH / f"v1_{case}_{index}.shrink").read_bytes() for index in range(len(CHAINS[case]))]
    for values, expected in zip(read_chain(files), CHAINS[case], strict=True):
        assert {name: hashlib.sha256(value).hexdigest() for name, value in values.items()} == expected
