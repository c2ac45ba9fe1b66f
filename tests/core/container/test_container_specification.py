"""A second reader, by docs/format.md alone and without a thought for speed, reads what ours wrote."""

import hashlib
import json

import numpy as np
import pytest
import torch
from support import format_baselines, golden  # noqa: F401 - with the baselines' codecs
from support.chains import spec_of
from support.context_planes import dithered_planes, golden_planes, low_rank_planes, sparse
from support.format_codecs import CODECS, Tensor, read_chain
from support.format_models import Model, StaticReader, read_model_plane
from support.format_reader import (
    Cursor,
    Runs,
    Side,
    read_context_plane,
    read_huffman,
    read_planes,
    read_ranked,
    read_rans,
    read_symbol_plane,
)
from support.format_trellis import read_trellis_plane

from shrinkpoint.coding.encode import decode_chain, encode_state
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.entropy.contexts import coder as context
from shrinkpoint.entropy.static.bytes import delta_bits, encode_bytes
from shrinkpoint.entropy.static.huffman import encode_huffman
from shrinkpoint.entropy.static.ranked import encode_ranks, rank_lengths
from shrinkpoint.entropy.static.rans import encode_symbols
from shrinkpoint.entropy.static.rle import encode_runs
from shrinkpoint.entropy.trellis import coder as trellis_planes
from shrinkpoint.entropy.trellis.coder import Path as TrellisPath
from shrinkpoint.entropy.trellis.coder import decode_points, encode_points
from shrinkpoint.errors import CorruptionError
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.lattice import LatticeCodec
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_points import nearest_points
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Coded, Context, ReferenceState
from shrinkpoint.schemes.lossless.scheme import Lossless
from shrinkpoint.schemes.symbol_coders import encode_plane
from shrinkpoint.state.training import TrainingState


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
    [
        ("packed", {0}),
        ("lzma", {1}),
        ("huffman", {2}),
        ("cyclic", {3}),
        ("rans", {4, 5}),
        ("context", {8}),
        ("mixing", {8}),
    ],
)
def test_symbol_planes(coder, methods, alphabet):
    rng = np.random.default_rng(alphabet)
    previous = rng.integers(0, alphabet, 5000).astype(np.uint8)
    plane = np.where(rng.random(5000) < 0.8, previous, (previous.astype(int) + 1) % alphabet).astype(np.uint8)
    data = encode_plane(plane, alphabet, coder, previous, columns=50)
    assert data[0] in methods

    def contexts(body, beside):
        sides = [Side(levels, alphabet) for levels in beside]
        return read_context_plane(body, plane.size, alphabet, 50, sides, read_model_plane)

    read = read_symbol_plane(data, plane.size, alphabet, previous.tolist(), contexts=contexts)
    assert read == plane.tolist()


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


def trellis_plane(shape, states, *, spread=0.3, rank=0, sides=0, far=0.0, seed=0):
    """Points of values that rows and columns say the size of, as sides do, and what a reader has."""
    rng = np.random.default_rng(seed)
    size = np.exp(0.6 * (rng.standard_normal((shape[0], 1)) + rng.standard_normal(shape[1])))
    values = spread * size * rng.standard_normal(shape)
    if rank:
        values *= 0.3
        values += spread * rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    told = np.clip(np.rint(3 * np.log2(np.abs(values.reshape(-1)) + 1e-3)) + 30, 0, 59).astype(np.uint8)
    values[:, ::23] += far * rng.standard_normal(values[:, ::23].shape)
    places = rng.integers(-256, 256, values.size).astype(np.int16)
    target = (values.reshape(-1) + (places + 0.5) / 256).astype(np.float32)
    noise = rng.integers(0, 5, values.size).astype(np.uint8)
    given = (context.Side(told, 60), context.Side(noise, 5), context.Side(told // 4, 15))[:sides]
    return nearest_points(target, shape[1], states), TrellisPath(places, shape[1], states, given)


def check_trellis(points, path):
    """Both readers have the same of what is coded, which is returned."""
    coded = encode_points(points, path)
    ours = decode_points(coded.payload, path)
    sides = [side.plane.tolist() for side in path.sides]
    found = read_trellis_plane(coded.payload, path.places, path.columns, path.states, sides)
    for other in coded, ours:
        for theirs, own in zip((other.points, other.errors, other.far), found, strict=True):
            assert np.array_equal(theirs, own)
    return coded


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("sides", [0, 3])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3000, 1), (9, 7), (333, 10), (40, 64), (7, 70), (30, 384), (1, 5001), (1, 33_000)]
)
def test_trellis_coder(shape, sides, states):
    coded = check_trellis(*trellis_plane(shape, states, sides=sides))
    assert not coded.payload[0] & 4


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize(("shape", "sides"), [((100, 72), 0), ((90, 96), 2), ((60, 384), 0)])
def test_trellis_coder_of_low_rank(shape, sides, states):
    coded = check_trellis(*trellis_plane(shape, states, rank=2, sides=sides))
    assert coded.payload[0] & 4


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("spread", [0.02, 0.12, 1.5])
def test_trellis_coder_of_other_spreads(spread, states, rank):
    check_trellis(*trellis_plane((60, 80), states, spread=spread, rank=rank, sides=1))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("states", [4, 8])
def test_trellis_coder_of_far_points(states, rank):
    points, path = trellis_plane((120, 96), states, rank=rank, far=300.0)
    coded = check_trellis(points, path)
    moved = points.astype(int) - coded.points
    assert coded.far.any()
    assert moved[coded.far].any()
    assert not moved[~coded.far].any()
    assert not (moved % 4).any()


def test_trellis_coder_of_several_chunks():
    points, path = trellis_plane((3700, 71), 8, rank=2, sides=1, spread=0.1)
    coded = check_trellis(points, path)
    assert points.size > 2**18
    assert coded.payload[8] == 18


@pytest.mark.parametrize(("scale", "mean"), [(128, 1), (65535, 8184), (30_000, 128)])
def test_trellis_coder_of_models_that_no_encoder_writes(scale, mean, monkeypatch):
    """What overflows or is clamped is the same for both, before the chunk's end shows that the data are damaged."""
    points, path = trellis_plane((40, 80), 4, rank=2, sides=1, far=300.0)
    payload = bytearray(encode_points(points, path).payload)
    payload[0] |= 4
    payload[3:7] = scale.to_bytes(2, "little") + mean.to_bytes(2, "little")
    with pytest.raises(CorruptionError):
        decode_points(payload, path)
    opened = Runs.open
    monkeypatch.setattr(trellis_planes, "check_end", lambda words, cursor: None)
    monkeypatch.setattr(Runs, "open", lambda self, data: (opened(self, data)[0], lambda: None))
    ours = decode_points(payload, path)
    sides = [side.plane.tolist() for side in path.sides]
    found = read_trellis_plane(bytes(payload), path.places, 80, 4, sides)
    for one, other in zip((ours.points, ours.errors, ours.far), found, strict=True):
        assert np.array_equal(one, other)


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
        coded = codec.encode(tensor, spec, Context(writing, siblings=beside))
        planes = type(codec)().decode(coded.encoded, spec, Context(reading))
        ours = type(codec)().reconstruct(coded.encoded, planes, spec, Context(siblings=beside))
        found, before = read_next(coded.encoded, tensor, before, beside)
        assert torch.equal(ours, coded.value)
        assert found == coded.value.view(torch.uint8).numpy().tobytes()
        encoded = coded.encoded
        writing = ReferenceState(encoded.codec, encoded.params, coded.planes, coded.encoder_only)
        reading = ReferenceState(encoded.codec, encoded.params, planes)
        chain.append(coded)
    return chain


def check_weights(
    options, *, shape=(40, 70), dtype=torch.float32, walk=0.02, far=0.0, codec=TrellisWeightCodec
):
    generator = torch.Generator().manual_seed(len(options))
    weight, tensors = torch.randn(shape, generator=generator), []
    for _ in options:
        weight = weight + walk * torch.randn(shape, generator=generator)
        weight.reshape(-1)[0] += far
        tensors.append(weight.to(dtype))
    codecs = [codec(**{"step": 0.1, "seed": seed, **more}) for seed, more in enumerate(options)]
    return check_chain(codecs, tensors, [{}] * len(codecs))


def exponents_of(shape, seed, reach=12):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-reach, reach + 1, count).astype(np.int8) for count in shape)


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_trellis_lattice(dtype, states):
    base, *deltas = (coded.encoded for coded in check_weights([{"states": states}] * 3, dtype=dtype))
    assert "exponents" in base.sections
    assert all(delta.uses_reference and "exponents" not in delta.sections for delta in deltas)


@pytest.mark.parametrize("states", [4, 8])
def test_trellis_lattice_of_carried_noise(states):
    _, *deltas = check_weights([{"states": states}] * 5, walk=0.004)
    assert all(delta.encoded.params["carried"] > 0 for delta in deltas)
    last = deltas[-1]
    reference = ReferenceState(last.encoded.codec, last.encoded.params, last.planes)
    base = TrellisWeightCodec().rebase(last.encoded, reference, spec_of(last.value), {})
    assert base.params["carried"] > 0
    found, _ = read_next(base, last.value, None, {})
    assert found == last.value.view(torch.uint8).numpy().tobytes()


def test_trellis_lattice_of_other_steps():
    options = [{"exponents": exponents_of((40, 70), k), "step": 0.1 * 3**k, "slack": 0.0} for k in range(4)]
    chain = check_weights(options)
    assert all("exponents" in coded.encoded.sections for coded in chain)


@pytest.mark.parametrize("more", [{}, {"step": 0.23}])
def test_trellis_lattice_of_a_training_after_a_restore(more):
    chain = check_weights([{}, {}, {"after_restore": True, **more}, {}], walk=0.004)
    assert [coded.encoded.params.get("after_restore", False) for coded in chain] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("shape", [(1,), (300,), (500, 3), (9, 4, 5)])
def test_trellis_lattice_of_other_shapes(shape):
    check_weights([{}] * 3, shape=shape)


def test_trellis_lattice_of_far_weights():
    chain = check_weights([{"states": 8}] * 3, far=200.0)
    assert all(len(coded.encoded.sections["far"]) > 0 for coded in chain)


@pytest.mark.parametrize("codec", [LatticeCodec, TrellisWeightCodec])
def test_weights_of_steps_that_differ_by_all_that_they_may(codec):
    """Some of them are far too wide for the weights, or take all that indices can say."""
    rows, columns = exponents_of((40, 70), 0, 32)
    rows[:2] = columns[:2] = -32, 32
    check_weights([{"exponents": (rows, columns), "step": 50.0}] * 3, codec=codec)


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(37, 70), (5, 4, 9), (300,), (64, 1)])
def test_trellis_lattice_of_rows_that_are_kept(shape, dtype, states):
    rows = np.arange(shape[0] if len(shape) > 1 else 1)
    masks = [None, rows % 3 == 0, rows % 2 == 1, rows >= 0, None, rows > 0]
    options = [{"kept": mask, "states": states, "step": 0.1 * (1 + (k == 2))} for k, mask in enumerate(masks)]
    chain = check_weights(options, shape=shape, dtype=dtype, walk=0.1)
    told = ["kept" in coded.encoded.sections for coded in chain]
    assert told == [mask is not None and bool(mask.any()) for mask in masks]
    assert chain[3].encoded.sections["points"] == b""
    assert torch.equal(chain[3].value, chain[2].value)


def test_trellis_lattice_of_rows_that_are_kept_after_a_restore():
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
@pytest.mark.parametrize("effort", ["fast", "default", "max"])
@pytest.mark.parametrize("shape", [(40, 70), (300,), (3, 4, 5)])
def test_centroid_moments(shape, effort, step):
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(shape, generator=generator) ** 4
    first = second.sqrt() * torch.randn(shape, generator=generator)
    second.reshape(-1)[::7] = 0
    first.reshape(-1)[::7] = 0
    second.reshape(-1)[1], first.reshape(-1)[1] = 2.0**-140, 2.0**-71
    siblings = {"exp_avg_sq": second}
    check_chain([CentroidFirstMomentCodec(step=step, effort=effort)], [first], [siblings])
    check_chain([CentroidMomentumCodec(step=step, effort=effort)], [first], [{}])


@pytest.mark.parametrize("shape", [(40, 70), (300,), (3, 4, 5)])
def test_factored_moments(shape):
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(shape, generator=generator) ** 4
    first = second.sqrt() * torch.randn(shape, generator=generator)
    second.reshape(-1)[::7] = 0
    check_chain([FactoredSecondMomentCodec(first_moment=first)], [second], [{}])
    second.reshape(second.shape[0], -1)[0] *= 1e-30
    check_chain([FactoredSecondMomentCodec(first_moment=first)], [second], [{}])


class _Plain:
    """Has no codec for any tensor."""

    name = "plain"

    def codecs(self, state):
        return {}

    def describe(self):
        return {}


@pytest.mark.parametrize("scheme", [_Plain(), Lossless()], ids=["exact", "lossless"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_tensors_that_grow_and_shrink_by_rows(scheme, dtype):
    rows = (torch.randn(240, 64) * 100).to(dtype)
    files, reference, parent = [], None, None
    for step, count in enumerate((100, 120, 240, 90)):
        state = TrainingState.capture({"replay": rows[:count]})
        coded = encode_state(state, scheme, step=step, reference=reference, parent=parent)
        reference, parent = coded.reference, coded.checkpoint.state_digest
        (entry,) = coded.checkpoint.entries
        assert entry.encoded.uses_reference == (step > 0)
        files.append(write_container(coded.checkpoint))
        restored = decode_chain([read_container(data) for data in files]).state.to_object()
        assert torch.equal(restored["replay"], rows[:count])
        *_, read = read_chain(files)
        assert read["replay"] == rows[:count].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", golden.CASES)
def test_golden_chains(case):
    files = [path.read_bytes() for path in golden.chain_of(case)]
    for values, expected in zip(read_chain(files), golden.CASES[case], strict=True):
        assert {name: hashlib.sha256(value).hexdigest() for name, value in values.items()} == expected
