"""How the encoder of the context coder chooses a plane's model: by counting, and by trying predictions on a sample."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.contexts.model import (
    MAX_COLUMNS,
    MAX_SIDES,
    LevelMeaning,
    PlaneModel,
    SidePlane,
    build_scene,
)
from shrinkpoint.entropy.contexts.sample import PlaneSample, Side
from shrinkpoint.entropy.symbols import count_symbols

__all__ = ["choose_model"]

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
