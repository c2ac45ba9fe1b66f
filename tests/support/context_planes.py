"""Planes of levels like those of real checkpoints: few directions shared by all rows, and sides that tell something."""

import numpy as np

from shrinkpoint.arrays import UInt8s
from shrinkpoint.entropy.contexts.coder import Side


def low_rank_planes(rows: int, columns: int, rank: int) -> tuple[UInt8s, UInt8s]:
    """Two planes of levels 0..62 around 31, whose rows combine the same directions with unrelated coefficients."""
    rng = np.random.default_rng(5)
    directions = rng.standard_normal((rank, columns))
    planes = []
    for _ in range(2):
        values = rng.standard_normal((rows, rank)) @ directions + 0.5 * rng.standard_normal((rows, columns))
        planes.append(np.clip(np.rint(1.5 * values) + 31, 0, 62).astype(np.uint8))
    return planes[0], planes[1]


def dithered_planes(rows: int, columns: int) -> tuple[UInt8s, Side, Side]:
    """Levels of values around zero that rows share a direction of, with what is known of each value's dither."""
    rng = np.random.default_rng(6)
    shared = np.outer(rng.standard_normal(rows), rng.standard_normal(columns))
    values = 0.2 * shared + 0.1 * rng.standard_normal((rows, columns))
    part = rng.integers(0, 32, values.shape)
    levels = np.clip(np.rint(values + (part - 15.5) / 32), -3, 3) + 3
    places = tuple(8 * k - 124 for k in range(32))
    known = part.astype(np.uint8).reshape(-1)
    told = Side(known, 32, places, two_sided=True)
    return levels.astype(np.uint8).reshape(-1), told, Side(known, 32)


def golden_planes() -> tuple[UInt8s, list[Side]]:
    """The plane of the golden payloads, 150 x 120 levels 0..30, and its two sides; made with integers alone."""
    i, j = np.indices((150, 120), dtype=np.int64)
    noise = (i * 7919 + j * 104729 + (i * j) % 1013 * 31) % 8191 * 5 >> 13
    wave = ((i * i * 3 % 41) - 20) * ((j * j * 5 % 37) - 18) // 60
    plane = np.clip(15 + wave + noise - 2, 0, 30).astype(np.uint8)
    sides = [np.clip(plane.astype(np.int64) + noise % 3 - 1, 0, 30) // 2, np.abs(wave + (i + j) % 2)]
    return plane.reshape(-1), [Side(side.astype(np.uint8).reshape(-1), 31) for side in sides]


def golden_dithered_plane() -> tuple[UInt8s, Side]:
    """A plane of few levels as of first moments, 150 x 120 levels 0..4, and its dither; made with integers alone."""
    i, j = np.indices((150, 120), dtype=np.int64)
    wave = ((i * i * 3 % 41) - 20) * ((j * j * 5 % 37) - 18)
    part = (i * 7919 + j * 104729 + (i * j) % 1013 * 31) % 8191 % 32
    levels = (16 * wave + 300 * (2 * part - 31) + 9600) // 19200 + 2  # wave / 1200 + dither, rounded
    told = Side(part.astype(np.uint8).reshape(-1), 32, tuple(8 * k - 124 for k in range(32)), two_sided=True)
    return np.clip(levels, 0, 4).astype(np.uint8).reshape(-1), told


def sparse(plane: UInt8s) -> UInt8s:
    """The golden plane with level 15 wherever it is within 4 of it: as sparse as a delta."""
    return np.where(np.abs(plane.astype(np.int64) - 15) < 5, 15, plane).astype(np.uint8)
