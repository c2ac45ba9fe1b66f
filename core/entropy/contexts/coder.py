"""Context coding of planes of levels: each symbol's probabilities depend on earlier planes, sibling planes and the plane itself.

Quantized updates, weights and moments look like noise to a general compressor, and nearly so to a coder that is given
the same plane of the previous checkpoint. They are not: sibling planes of the checkpoint share their zeros and
magnitudes, rows and columns differ in how busy they are, and above all, the matrix is close to one of low rank, so that
a row is predicted from the directions of the rows before (:mod:`shrinkpoint.entropy.contexts.feature_kernels`).

=========  ==========================================================================================================
effort     model
=========  ==========================================================================================================
fast       static tables under the level of the one or two most informative side planes
default    static tables under a decision tree over prediction, side planes and activity, shared by a value and its negative
max        binary decisions, each predicted by a mixture of up to 10 adaptive contexts
=========  ==========================================================================================================

``fast`` and ``default`` code zeros in runs (entropy/contexts/run_kernels.py), so that a delta, which is mostly zeros, costs
little more time than what is not zero. A payload is as a rule no larger than that of ``fast``, which is tried wherever it
may be shorter. Payload (integers are little-endian, "varint" is 7 bits per byte)::

    nothing                                                                if there are no symbols
    0x00, n, side indices (n bytes, n <= 2), rANS payload                  fast, small or not sparse; entropy/static/rans.py
    0x03, n, side indices, chunk byte, zero, used, tables, lengths, chunks    fast; entropy/tables.py
    0x01, model, chunk byte, tree, tables, lengths, chunks                 default; entropy/contexts/cells.py, leaf_tables.py
    0x02, model, chunk byte, table, lengths, chunks                        max; the table holds the tree's weights

The contexts of ``fast`` are the side's levels, or for two sides ``16 a + b`` of their classes (`class_map` of
`level_counts`). The model is described in entropy/contexts/model.py. The chunk byte is log2 of the symbols per chunk; but for ``fast``, a chunk is the
whole rows that fit, or where a plane has fewer than 8 or more than 2^15 columns, that many symbols as a single row.
Zero is the symbol whose runs are coded; ``used`` has one bit per context, first one highest: whether it occurs and
has a table. Tables in which zero has at least 5/8 code gaps, with the frequencies that `set_gaps` and
entropy/contexts/run_tables.py derive.
Lengths are one varint per chunk but the last. A chunk of 0x01 and 0x03 is four 6-byte states and 16-bit words, as in
entropy/static/rans.py, event i on state i mod 4; one of ``max`` is an arithmetic code without its trailing zeros. Chunks do not
depend on each other nor on the number of threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.contexts.chunks import Plan, decode_mixed, decode_static, encode_mixed, encode_static
from shrinkpoint.entropy.contexts.fast import FastPlan, decode_plain, decode_runs
from shrinkpoint.entropy.contexts.model import (
    MAX_COLUMNS,
    MAX_SIDES,
    LevelMeaning,
    PlaneModel,
    SidePlane,
    build_scene,
)
from shrinkpoint.entropy.contexts.sample import PlaneSample, Side
from shrinkpoint.entropy.symbols import check_array, check_sizes, count_symbols
from shrinkpoint.entropy.wire import ByteReader, Payload
from shrinkpoint.errors import FormatError

__all__ = ["Effort", "Side", "decode_plane", "encode_plane"]


Effort = Literal["fast", "default", "max"]
"""``default`` takes three to five times as long as ``fast``, and ``max`` ten times as long as ``default``."""

_FAST, _STATIC, _MIXED, _RUNS = 0, 1, 2, 3
_DEFAULT_TRIAL, _MAX_TRIAL = 1 << 14, 1 << 15  # symbols on which predictions are tried
_MIN_SYMBOLS = 256  # below, no model pays for itself


def encode_plane(
    symbols: UInt8s,
    alphabet: int,
    *,
    columns: int,
    sides: Sequence[Side] = (),
    effort: Effort = "default",
    threads: int = 1,
) -> bytes:
    """Code a plane of levels.

    Args:
        symbols: uint8 (n,), flat in C order, each below ``alphabet``. Levels should ascend with what they stand for,
            zero being the most frequent one or level 0; others are coded as well, but less is known of them.
        alphabet: how many levels there are, 1..256.
        columns: the plane's columns, which divide n.
        sides: planes to be passed to the decoder again, up to 255 and in any order; what does not help is not used.
        effort: how much time to spend; decoding takes as long as encoding, or less.
        threads: how many threads share the chunks; the bytes do not depend on it.

    Returns:
        The payload. Its length, n, ``alphabet`` and ``columns`` are the caller's to store.

    Raises:
        ValueError: an argument is out of range or has the wrong shape or dtype.
    """
    check_array(symbols, "symbols")
    _check(symbols.size, alphabet, columns, sides)
    if effort not in ("fast", "default", "max"):
        raise ValueError(f"effort must be 'fast', 'default' or 'max', got {effort!r}")
    if symbols.size == 0:
        return b""
    counts = count_symbols(symbols, None, alphabet, 1)[0]
    sample = PlaneSample.of(symbols, alphabet, sides)
    fast = FastPlan.of(sample)
    payload = b""
    if effort != "fast" and symbols.size >= _MIN_SYMBOLS and np.count_nonzero(counts) > 1:
        plan = _plan(symbols, columns, sides, sample, effort)
        if effort == "max":
            payload = b"".join((bytes([_MIXED]), encode_mixed(plan, symbols, counts, threads)))
        else:
            payload = b"".join((bytes([_STATIC]), encode_static(plan, symbols, alphabet, threads)))
        if len(payload) < fast.least(sample.step):
            return payload
    plain = fast.encode(symbols, alphabet, sides, counts, threads, len(payload) if payload else None)
    if plain is None:
        return payload
    coded = b"".join((bytes([_RUNS if plain[0] else _FAST]), plain[1]))
    return min(payload or coded, coded, key=len)


def _plan(symbols: UInt8s, columns: int, sides: Sequence[Side], sample: PlaneSample, effort: Effort) -> Plan:
    from shrinkpoint.entropy.contexts import feature_kernels  # numba

    if effort == "max":
        model = choose_model(symbols, columns, sides, sample, feature_kernels.measure, _MAX_TRIAL)
    else:
        model = choose_model(symbols, columns, sides, sample, _measure, _DEFAULT_TRIAL)
        if model.sides:
            first = sides[model.sides[0].index]
            placed = model.low_rank and first.places is not None
            model = replace(model, placed=placed, mirrored=first.two_sided)
    return Plan.of(model, sides, symbols.size, columns)


def _measure(scene: Any, plane: UInt8s) -> tuple[int, int]:
    from shrinkpoint.entropy.contexts import (
        chunk_arrays,
        segment_kernels,  # numba
    )

    state = chunk_arrays.new_low_rank_state(plane.shape[1], True, scene.warm, scene.warm_values)
    predicted, error = segment_kernels.measure(scene, state, plane)
    return int(predicted), int(error)


def decode_plane(
    payload: Payload, size: int, alphabet: int, *, columns: int, sides: Sequence[Side] = (), threads: int = 1
) -> UInt8s:
    """Inverse of :func:`encode_plane`.

    Args:
        payload: the bytes of :func:`encode_plane`, all of them and nothing else.
        size: how many symbols there are; no more than a small multiple of that is ever allocated.
        alphabet: as given to the encoder.
        columns: as given to the encoder.
        sides: as given to the encoder, in the same order.
        threads: how many threads share the chunks.

    Returns:
        uint8 (size,), each below ``alphabet``.

    Raises:
        FormatError: the payload is malformed, or needs a side plane that is not given.
        CorruptionError: the payload is well-formed, but a chunk does not end where the encoder began.
        ValueError: an argument other than the payload is out of range.
    """
    _check(size, alphabet, columns, sides)
    reader = ByteReader(payload, "context payload")
    if size == 0:
        reader.finish()
        return np.zeros(0, dtype=np.uint8)
    mode = reader.byte()
    if mode in (_FAST, _RUNS):
        decode_fast = decode_plain if mode == _FAST else decode_runs
        return decode_fast(reader, size, alphabet, sides, threads)
    if mode not in (_STATIC, _MIXED):
        raise FormatError(f"context payload: unknown mode {mode}")
    plan = Plan.read(reader, sides, size, columns)
    if mode == _MIXED and (plan.model.placed or plan.model.mirrored):
        raise FormatError("context payload: mixed contexts are neither placed nor mirrored")
    decode = decode_static if mode == _STATIC else decode_mixed
    return decode(reader, plan, alphabet, threads)


def _check(size: int, alphabet: int, columns: int, sides: Sequence[Side]) -> None:
    check_sizes(alphabet, 1)
    if size < 0 or columns < 1 or size % columns:
        raise ValueError(
            f"columns must divide the number of symbols, got {columns} columns and {size} symbols"
        )
    if len(sides) > 255:
        raise ValueError(f"at most 255 sides are possible, got {len(sides)}")
    for index, side in enumerate(sides):
        check_sizes(side.alphabet, 1)
        check_array(side.plane, f"sides[{index}].plane", size)
        if size and int(side.plane.max()) >= side.alphabet:
            raise ValueError(
                f"sides[{index}] has level {int(side.plane.max())} in an alphabet of {side.alphabet}"
            )
        places = side.places
        if places is not None and (len(places) != side.alphabet or max(map(abs, places)) > 128):
            raise ValueError(
                f"sides[{index}].places must be {side.alphabet} integers from -128 to 128, or None"
            )


Measure = Callable[[Any, UInt8s], tuple[Any, Any]]

_MIN_COLUMNS, _MIN_ROWS = 24, 24  # of a plane whose directions are worth learning
_MIN_EXPLAINED = 0.002  # share of the values' power
_NO_MAPS = (np.zeros((0, 256), dtype=np.uint8), np.zeros((0, 256), dtype=np.uint8))


def choose_model(
    symbols: UInt8s,
    columns: int,
    sides: Sequence[Side],
    sample: PlaneSample,
    measure: Measure,
    trial: int,
) -> PlaneModel:
    """Choose side planes, meanings of levels and low-rank prediction.

    Args:
        symbols: uint8 (n,), the plane.
        columns: its columns, which divide n.
        sides: the side planes, of n levels each.
        sample: of all of them.
        measure: the kernel of the effort that tries a prediction.
        trial: how many symbols to try it on, about.
    """
    counts, pairs = sample.counts, sample.pairs
    meaning = LevelMeaning.guess(counts)
    given = sample.given
    order = sorted((i for i in range(len(sides)) if given[i] < 0.999 * sample.alone), key=lambda i: given[i])
    chosen = tuple(SidePlane(i, LevelMeaning.guess(pairs[i].sum(axis=1))) for i in order[:MAX_SIDES])
    mean = int(256 * (counts * meaning.magnitudes()[: counts.size]).sum() // counts.sum())
    model = PlaneModel(
        meaning=meaning,
        sides=chosen,
        low_rank=False,
        warm=None,
        placed=False,
        mirrored=False,
        scale=1,
        mean=min(max(mean, 1), 0xFFFF),
    )
    rows = symbols.size // columns
    if rows < _MIN_ROWS or not _MIN_COLUMNS <= columns <= MAX_COLUMNS:
        return model
    first = min(max(trial // columns, _MIN_ROWS, rows // 32), rows)
    return _choose_prediction(model, symbols, columns, first, sides, counts, pairs, measure)


def _choose_prediction(
    model: PlaneModel,
    symbols: UInt8s,
    columns: int,
    sample: int,
    sides: Sequence[Side],
    counts: Int64s,
    pairs: Sequence[Int64s],
    measure: Measure,
) -> PlaneModel:
    """Try the readings of the levels, then each side plane as the one from which directions are learned first."""
    cut = sample * columns
    sampled = count_symbols(symbols[:cut], None, counts.size, 1)[0]

    def explained(meaning: LevelMeaning, warm: SidePlane | None) -> tuple[float, int]:
        trial = replace(model, meaning=meaning, sides=(), low_rank=True, warm=warm)
        scene = build_scene(trial, sides, _NO_MAPS, (sample, columns), slice(cut))
        predicted, error = measure(scene, symbols[:cut].reshape(sample, columns))
        return 1 - error / max(16 * _variance(sampled, meaning), 1.0), int(predicted)

    zero_first = LevelMeaning.guess_zero_first(counts)
    readings = [model.meaning] + ([zero_first] if zero_first else [])
    found = [(*explained(reading, None), reading, None) for reading in readings]
    best: tuple[float, int, LevelMeaning, SidePlane | None] = max(found, key=lambda trial: trial[0])
    meaning = best[2]
    for index, pair in enumerate(pairs[: MAX_SIDES + 1]):
        side_counts = pair.sum(axis=1)
        reading = LevelMeaning.guess_zero_first(side_counts) if meaning.zero_first else None
        warm = SidePlane(index, reading or LevelMeaning.guess(side_counts))
        trial = explained(meaning, warm)
        if trial[0] > best[0]:
            best = (*trial, meaning, warm)
    if best[0] < _MIN_EXPLAINED:
        return model
    # a coarse bucket is a third of the predictions' root mean square wide
    spread = max(best[1] ** 0.5, 1.0)
    mean = int(256 * (counts * meaning.magnitudes()[: counts.size]).sum() // counts.sum())
    return replace(
        model,
        meaning=meaning,
        sides=tuple(SidePlane(s.index, _reading(meaning, pairs[s.index].sum(axis=1))) for s in model.sides),
        low_rank=True,
        warm=best[3],
        scale=min(max(int(3 * 65536 / spread), 2), 0xFFFF),
        mean=min(max(mean, 1), 0xFFFF),
    )


def _variance(counts: Int64s, meaning: LevelMeaning) -> float:
    """Variance of the values: a reading that puts zero far away must not be praised for predicting the mean."""
    values = meaning.values()[: counts.size].astype(np.float64)
    mean = (counts * values).sum() / counts.sum()
    return float((counts * (values - mean) ** 2).sum() / counts.sum())


def _reading(meaning: LevelMeaning, counts: Int64s) -> LevelMeaning:
    """A side plane is read as the plane itself is, where that is possible."""
    zero_first = LevelMeaning.guess_zero_first(counts) if meaning.zero_first else None
    return zero_first or LevelMeaning.guess(counts)
