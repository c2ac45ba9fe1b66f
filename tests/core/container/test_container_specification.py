"""A second reader, by docs/format.md alone and without a thought for speed, reads what ours wrote."""

import hashlib
import json

import numpy as np
import pytest
import torch
from support import format_baselines, golden  # noqa: F401 - with the baselines' codecs
from support.chains import Coded, decode_chain, encode, spec_of
from support.containers import identical
from support.format_codecs import CODECS, Tensor, read_chain
from support.format_matrix import coder_width, read_matrix
from support.format_reader import (
    read_huffman,
    read_numbers,
    read_ranked,
    read_rans,
    read_runs,
    read_symbol_plane,
)
from support.trellis import nearest_points

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.entropy.lanes import coder as lanes
from shrinkpoint.entropy.lanes.coder import decode_matrix, encode_matrix
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.entropy.numbers import delta_bits, encode_numbers
from shrinkpoint.entropy.static.huffman import encode_huffman, encode_ranks, rank_lengths
from shrinkpoint.entropy.static.rans import encode_symbols
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, ReferenceState
from shrinkpoint.schemes.catalogue import CODECS as LIBRARY
from shrinkpoint.schemes.exact import ExactCodec, Lossless
from shrinkpoint.schemes.inshrinkerator.level_deltas import encode_runs
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.schemes.symbol_coders import encode_plane
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState


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


@pytest.mark.parametrize("count", [0, 1, 5000, 2**20 + 5])
@pytest.mark.parametrize("item_size", [1, 2, 4, 8])
def test_numbers(item_size, count):
    rng = np.random.default_rng(item_size)
    wide = rng.normal(size=count).view(np.uint64)
    coded = {
        0: rng.integers(0, 256, count * item_size, np.uint8).view(f"u{item_size}"),
        1: np.resize(rng.integers(0, 256, 97 * item_size, np.uint8).view(f"u{item_size}"), count),
        2: (wide >> np.uint64(64 - 8 * item_size)).astype(f"u{item_size}"),
    }
    for method, values in coded.items():
        data = encode_numbers(values)
        assert count < 5000 or data[0] == method
        assert read_numbers(data, count, item_size) == values.tobytes()


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
    assert read_runs(runs) == values.tolist()


@pytest.mark.parametrize("counts", [[9], [5, 5], [900, 50, 20, 7, 1], [2**k for k in range(32)][::-1]])
def test_ranked_codes(counts):
    lengths = rank_lengths(np.array(counts))
    ranks = np.random.default_rng(0).integers(0, len(counts), 500)
    data = encode_ranks(ranks, lengths)
    assert read_ranked(data, ranks.size, lengths) == ranks.tolist()


@pytest.mark.parametrize("alphabet", [1, 2, 9, 16, 256])
@pytest.mark.parametrize(
    ("coder", "methods"),
    [
        ("packed", {0}),
        ("lzma", {1}),
        ("huffman", {2}),
        ("cyclic", {3}),
        ("rans", {4, 5}),
    ],
)
def test_symbol_planes(coder, methods, alphabet):
    rng = np.random.default_rng(alphabet)
    previous = rng.integers(0, alphabet, 5000).astype(np.uint8)
    plane = np.where(rng.random(5000) < 0.8, previous, (previous.astype(int) + 1) % alphabet).astype(np.uint8)
    data = encode_plane(plane, alphabet, coder, previous, columns=50)
    assert data[0] in methods
    assert read_symbol_plane(data, plane.size, alphabet, previous.tolist()) == plane.tolist()


def matrix_plane(shape, *, placed, spread=1.0, rank=0, far=0.0, seed=0):
    """Points of values that rows and columns say the size of, and their places, if they have any."""
    rng = np.random.default_rng(seed)
    size = np.exp(0.6 * (rng.standard_normal((shape[0], 1)) + rng.standard_normal(shape[1])))
    values = spread * size * rng.standard_normal(shape)
    if rank:
        values *= 0.3
        values += spread * rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    values[:, ::23] += far * rng.standard_normal(values[:, ::23].shape)
    return pointed(values.reshape(-1), shape, placed, rng)


def pointed(values, shape, placed, rng):
    if not placed:
        return np.rint(values).astype(np.int16), None
    places = rng.integers(-256, 256, values.size).astype(np.int16)
    target = (values + (places + 0.5) / 256).astype(np.float32)
    return nearest_points(target, row_width(*shape)), places


def check_matrix(points, places, shape, *, predictable=True):
    """Both readers have the points, whose payload is returned."""
    width = row_width(*shape)
    assert width == coder_width(*shape)
    data = encode_matrix(points, places, width=width, predictable=predictable)
    assert np.array_equal(decode_matrix(data, points.size, places, width=width), points)
    assert np.array_equal(read_matrix(data, points.size, *shape, places), points)
    return data


SHAPES = (
    *[(1, 1), (1, 63), (1, 1025), (1, 5001), (1, 70_001), (3000, 1), (999, 7)],
    *[(9, 8), (127, 8), (128, 8), (333, 10), (31, 63), (16, 64), (17, 64), (40, 65), (7, 70), (30, 384)],
)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("predictable", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_matrix_coder(shape, predictable, placed):
    points, places = matrix_plane(shape, placed=placed)
    data = check_matrix(points, places, shape, predictable=predictable)
    assert predictable or not data[0] & 1


@pytest.mark.parametrize("placed", [False, True])
def test_matrix_coder_of_nothing(placed):
    places = np.zeros(0, np.int16) if placed else None
    data = check_matrix(np.zeros(0, np.int16), places, (0, 70))
    assert data == b""


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("shape", [(400, 10), (205, 40), (400, 72), (330, 200), (66, 500), (1, 180_000)])
@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
def test_matrix_coder_of_low_rank(shape, spread, placed):
    points, places = matrix_plane(shape, placed=placed, spread=spread, rank=2)
    data = check_matrix(points, places, shape)
    assert data[0] & 1


def test_matrix_coder_of_wide_rows():
    points, places = matrix_plane((40, 20_000), placed=True, rank=2)
    assert check_matrix(points, places, (40, 20_000))[0] & 1


@pytest.mark.parametrize("noise", [0, 1])
@pytest.mark.parametrize("shape", [(64, 333), (48, 4096)])
def test_matrix_coder_of_rows_that_are_far_from_zero(shape, noise):
    rng = np.random.default_rng(0)
    points = 300 + noise * rng.standard_normal(shape).reshape(-1)
    assert check_matrix(np.rint(points).astype(np.int16), None, shape)[0] & 1


@pytest.mark.parametrize("placed", [False, True])
def test_matrix_coder_of_directions_that_change(placed):
    parts = [matrix_plane((160, 96), placed=placed, rank=rank, seed=rank) for rank in range(4)]
    points = np.concatenate([part for part, _ in parts])
    places = np.concatenate([part for _, part in parts]) if placed else None
    assert check_matrix(points, places, (640, 96))[0] & 1


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("far", [3.0, 300.0, 4000.0])
def test_matrix_coder_of_far_points(far, rank, placed):
    points, places = matrix_plane((120, 96), placed=placed, rank=rank, far=far)
    check_matrix(points, places, (120, 96))


def test_matrix_coder_of_points_as_far_as_they_may_be():
    rng = np.random.default_rng(0)
    points = rng.choice(np.array([-(2**15), 0, 2**15 - 1], np.int16), 4000)
    check_matrix(points, None, (50, 80))
    rows = np.repeat(np.array([-(2**15), 2**15 - 1], np.int16), 40)
    check_matrix(np.tile(rows, 50), None, (50, 80))
    check_matrix(*pointed(rng.uniform(-16_000, 16_000, 4000), (50, 80), True, rng), (50, 80))


@pytest.mark.parametrize("level", [0, 1, -7, 31_000])
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (1, 640), (16, 64), (200, 100), (41, 333)])
def test_matrix_coder_of_equal_points(shape, level):
    data = check_matrix(np.full(shape[0] * shape[1], level, np.int16), None, shape)
    assert level or len(data) < 30


@pytest.mark.parametrize("shape", [(1, 640), (16, 64), (200, 100)])
def test_matrix_coder_of_equal_places(shape):
    count = shape[0] * shape[1]
    for place, value in (0, 0.0), (-256, -1.0), (255, 1.0), (100, 7.3):
        points = nearest_points(np.full(count, value, np.float32), row_width(*shape))
        check_matrix(points, np.full(count, place, np.int16), shape)


@pytest.mark.parametrize("placed", [False, True])
def test_matrix_coder_of_points_that_are_almost_all_zero(placed):
    points, places = matrix_plane((300, 80), placed=placed, spread=0.02)
    check_matrix(points, places, (300, 80))


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("shape", [(2, 2**19 + 5), (1031, 1100)])
def test_matrix_coder_of_several_chunks(shape, placed):
    points, places = matrix_plane(shape, placed=placed, spread=0.3, rank=1)
    check_matrix(points, places, shape, predictable=False)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("mean", [1e-9, 0.01, 100.0, 1e10])
def test_matrix_coder_of_means_that_are_far_off(mean, placed, monkeypatch):
    points, places = matrix_plane((200, 72), placed=placed, rank=2, far=300.0)
    monkeypatch.setattr(lanes, "_mean", lambda *_: mean)
    data = check_matrix(points, places, (200, 72))
    assert np.frombuffer(data[1:5], "<f4")[0] == np.float32(mean)


def read_next(encoded, tensor, before, siblings):
    """What the second reader has of a tensor, as bytes, and what it keeps."""
    entry = {
        "codec": encoded.codec,
        "params": json.loads(json.dumps(encoded.params)),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "uses_reference": encoded.uses_reference,
    }
    beside = {role: (value.numpy().tobytes(), "float32") for role, value in siblings.items()}
    t = Tensor(entry, encoded.sections, before, beside)
    value, kept = CODECS[encoded.codec](t)
    return value, {"codec": encoded.codec, "count": t.count, **kept}


def check_chain(codecs, tensors, siblings):
    """Both readers restore what the encoder says, which is returned for each checkpoint."""
    writing = reading = before = None
    chain: list[Coded] = []
    for codec, tensor, beside in zip(codecs, tensors, siblings, strict=True):
        spec = spec_of(tensor)
        coded = encode(codec, tensor, spec, Context(writing, siblings=beside))
        planes = type(codec)().decode(coded.encoded, spec, Context(reading))
        ours = type(codec)().reconstruct(coded.encoded, planes, spec, Context(siblings=beside))
        found, before = read_next(coded.encoded, tensor, before, beside)
        assert identical(ours, coded.value)
        assert found == coded.value.view(torch.uint8).numpy().tobytes()
        encoded = coded.encoded
        writing = ReferenceState(encoded.codec, encoded.params, coded.planes)
        reading = ReferenceState(encoded.codec, encoded.params, planes)
        chain.append(coded)
    return chain


def check_weights(options, *, shape=(40, 70), dtype=torch.float32, walk=0.02, far=0.0):
    generator = torch.Generator().manual_seed(len(options))
    weight, tensors = torch.randn(shape, generator=generator), []
    for _ in options:
        weight = weight + walk * torch.randn(shape, generator=generator)
        weight.reshape(-1)[0] += far
        tensors.append(weight.to(dtype))
    codecs = [TrellisWeightCodec(**{"step": 0.1, "seed": seed, **more}) for seed, more in enumerate(options)]
    return check_chain(codecs, tensors, [{}] * len(codecs))


def exponents_of(shape, seed, reach=12):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-reach, reach + 1, count).astype(np.int8) for count in shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_trellis_weights(dtype):
    base, *deltas = (coded.encoded for coded in check_weights([{}] * 3, dtype=dtype))
    assert "exponents" in base.sections
    assert all(delta.uses_reference and "exponents" not in delta.sections for delta in deltas)


def test_trellis_weights_that_are_made_a_base():
    *_, last = check_weights([{}] * 5, walk=0.004)
    reference = ReferenceState(last.encoded.codec, last.encoded.params, last.planes)
    base = TrellisWeightCodec().rebase(last.encoded, reference, spec_of(last.value))
    found, _ = read_next(base, last.value, None, {})
    assert found == last.value.view(torch.uint8).numpy().tobytes()


def test_trellis_weights_of_other_steps():
    options = [{"exponents": exponents_of((40, 70), k), "step": 0.1 * 3**k, "slack": 0.0} for k in range(4)]
    chain = check_weights(options)
    assert all("exponents" in coded.encoded.sections for coded in chain)


@pytest.mark.parametrize("more", [{}, {"step": 0.23}])
def test_trellis_weights_of_a_training_after_a_restore(more):
    chain = check_weights([{}, {}, {"after_restore": True, **more}, {}], walk=0.004)
    assert [coded.encoded.params.get("after_restore", False) for coded in chain] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("shape", [(1,), (300,), (500, 3), (9, 4, 5)])
def test_trellis_weights_of_other_shapes(shape):
    check_weights([{}] * 3, shape=shape)


@pytest.mark.parametrize("shape", [(40, 70), (300, 72)])
def test_trellis_weights_of_far_weights(shape):
    check_weights([{}] * 3, shape=shape, far=200.0)


def test_weights_of_steps_that_differ_by_all_that_they_may():
    """Some of them are far too wide for the weights, or take all that indices can say."""
    rows, columns = exponents_of((40, 70), 0, 32)
    rows[:2] = columns[:2] = -32, 32
    check_weights([{"exponents": (rows, columns), "step": 50.0}] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(37, 70), (5, 4, 9), (300,), (64, 1)])
def test_trellis_weights_of_rows_that_are_kept(shape, dtype):
    rows = np.arange(shape[0] if len(shape) > 1 else 1)
    masks = [None, rows % 3 == 0, rows % 2 == 1, rows >= 0, None, rows > 0]
    options = [{"kept": mask, "step": 0.1 * (1 + (k == 2))} for k, mask in enumerate(masks)]
    chain = check_weights(options, shape=shape, dtype=dtype, walk=0.1)
    told = ["kept" in coded.encoded.sections for coded in chain]
    assert told == [mask is not None and bool(mask.any()) for mask in masks]
    assert chain[3].encoded.sections["points"] == b""
    assert torch.equal(chain[3].value, chain[2].value)


def test_trellis_weights_of_rows_that_are_kept_after_a_restore():
    kept = np.arange(40) < 30
    options = [
        {},
        {},
        {"after_restore": True, "kept": kept},
        {"kept": ~kept},
        {"after_restore": True, "kept": kept, "step": 0.3},
    ]
    for walk, far in ((0.004, 0.0), (0.02, 200.0)):
        chain = check_weights(options, walk=walk, far=far)
        assert torch.equal(chain[2].value[:30], chain[1].value[:30])
        assert torch.equal(chain[3].value[30:], chain[2].value[30:])


@pytest.mark.parametrize("step", [None, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(40, 70), (300,), (3, 4, 5)])
def test_centroid_moments(shape, step):
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(shape, generator=generator) ** 4
    first = second.sqrt() * torch.randn(shape, generator=generator)
    second.reshape(-1)[::7] = 0
    first.reshape(-1)[::7] = 0
    second.reshape(-1)[1], first.reshape(-1)[1] = 2.0**-140, 2.0**-71
    siblings = {"exp_avg_sq": second}
    check_chain([CentroidFirstMomentCodec(step=step)], [first], [siblings])
    first.reshape(first.shape[0], -1)[0] *= 2.0**-123
    check_chain([CentroidMomentumCodec(step=step)], [first], [{}])


@pytest.mark.parametrize("shape", [(40, 70), (300,), (3, 4, 5)])
def test_factored_moments(shape):
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(shape, generator=generator) ** 4
    first = second.sqrt() * torch.randn(shape, generator=generator)
    second.reshape(-1)[::7] = 0
    check_chain([FactoredSecondMomentCodec(first_moment=first)], [second], [{}])
    second.reshape(second.shape[0], -1)[0] *= 1e-30
    check_chain([FactoredSecondMomentCodec(first_moment=first)], [second], [{}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("zeros", [None, 7, 1])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("step", [1, 8, 32])
def test_log_levels(step, signed, zeros, dtype):
    generator, tensors = torch.Generator().manual_seed(0), []
    size = torch.exp(3 * torch.randn((40, 70), generator=generator)) * torch.logspace(-17, 1, 40)[:, None]
    for _ in range(3):
        size *= torch.exp(0.5 + 0.2 * torch.randn((40, 70), generator=generator))
        values = size * torch.randn((40, 70), generator=generator).sign() if signed else size.clone()
        if zeros is not None:
            values.reshape(-1)[len(tensors) :: zeros] = 0
        tensors.append(values.to(dtype))
    codecs = [LogLevelsCodec(step=step, seed=seed) for seed in (0, 2**32 - 1, None)]
    chain = check_chain(codecs, tensors, [{}] * 3)
    assert zeros == 1 or [coded.encoded.uses_reference for coded in chain] == [False, True, True]
    assert all(("zeros" in coded.encoded.sections) == (zeros is not None) for coded in chain)


def test_levels_of_moments():
    generator, seconds, firsts = torch.Generator().manual_seed(0), [], []
    for _ in range(3):
        second = torch.rand((40, 70), generator=generator) ** 8
        second.reshape(-1)[::7] = 0
        seconds.append(second)
        firsts.append(second.sqrt() * torch.randn((40, 70), generator=generator))
    check_chain([SecondMomentCodec() for _ in seconds], seconds, [{}] * 3)
    siblings = [{"exp_avg_sq": second} for second in seconds]
    check_chain([FirstMomentCodec() for _ in firsts], firsts, siblings)


@pytest.mark.parametrize("coder", ["rans", "rle-huffman"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inshrinkerator(dtype, coder):
    def describe(path, tensor):
        return Tag(role=Role.WEIGHT, layer_type=LayerType.LINEAR, parameter="w")

    generator, files, reference, parent = torch.Generator().manual_seed(0), [], None, None
    weight, options = torch.randn((40, 50), generator=generator), InshrinkeratorOptions(coder=coder)
    for step, (bins, prune) in enumerate([(16, 0.0), (8, 0.1), (12, 0.6), (12, 0.6)]):
        weight = weight + 0.1 * torch.randn((40, 50), generator=generator)
        state = TrainingState.capture({"w": weight.to(dtype)}, describe)
        plan = Configuration(bins=bins, prune=prune, protect=0.01, metric="magnitude", embedding_bins=16)
        scheme = Inshrinkerator(options, Weights(state, options), plan)
        coded = encode_state(state, scheme, step=step, reference=reference, parent=parent)
        reference, parent = coded.reference, coded.checkpoint.state_digest
        (entry,) = coded.checkpoint.entries
        assert entry.encoded.codec == "inshrinkerator-weight"
        files.append(write_container(coded.checkpoint))
        restored = decode_chain([read_container(data) for data in files]).state.to_object()
        *_, read = read_chain(files)
        assert read["w"] == restored["w"].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_tensors_that_grow_and_shrink_by_rows(dtype):
    rows = (torch.randn(240, 64) * 100).to(dtype)
    files, reference, parent = [], None, None
    for step, count in enumerate((100, 120, 240, 90)):
        state = TrainingState.capture({"replay": rows[:count]})
        coded = encode_state(state, Lossless(), step=step, reference=reference, parent=parent)
        reference, parent = coded.reference, coded.checkpoint.state_digest
        (entry,) = coded.checkpoint.entries
        assert entry.encoded.uses_reference == (step > 0)
        files.append(write_container(coded.checkpoint))
        restored = decode_chain([read_container(data) for data in files]).state.to_object()
        assert torch.equal(restored["replay"], rows[:count])
        *_, read = read_chain(files)
        assert read["replay"] == rows[:count].view(torch.uint8).numpy().tobytes()


def test_exact_numbers_that_decay():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(5000, generator=generator) * torch.logspace(-44, 5, 5000)]
    for step in range(3):
        tensors.append(tensors[-1] * 0.951)
        tensors[-1][step::3] = torch.randn(5000, generator=generator)[step::3]
        tensors[-1][step::50] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0]).repeat(25)
    chain = check_chain([ExactCodec() for _ in tensors], tensors, [{}] * 4)
    assert ["scale" in coded.encoded.params for coded in chain] == [False, True, True, True]


@pytest.mark.parametrize("case", golden.CASES)
def test_golden_chains(case):
    files = [path.read_bytes() for path in golden.chain_of(case)]
    for values, expected in zip(read_chain(files), golden.CASES[case], strict=True):
        assert {name: hashlib.sha256(value).hexdigest() for name, value in values.items()} == expected


def test_golden_chain_of_the_other_codecs():
    files = sorted((golden.OWN.parent / "codecs").glob("v1_*.shrink"))
    told = json.loads((golden.OWN.parent / "codecs" / "v1.json").read_text())
    for values, expected in zip(read_chain([path.read_bytes() for path in files]), told, strict=True):
        assert {name: hashlib.sha256(value).hexdigest() for name, value in values.items()} == expected


def test_the_second_reader_has_every_codec():
    assert {name for name in CODECS if ":" not in name} == set(LIBRARY)
