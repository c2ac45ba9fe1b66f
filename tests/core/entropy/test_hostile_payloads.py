"""Damaged payloads of every coder of symbols, in a process in which numba checks every index."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shrinkpoint.entropy.lstm.coder import LstmOptions
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.schemes.inshrinkerator.level_deltas import decode_levels, encode_levels
from shrinkpoint.schemes.symbol_coders import PlaneCoder, decode_plane, encode_plane

SIZE, ALPHABET = 600, 12
TRIALS = {
    "huffman": 100_000,
    "cyclic": 100_000,
    "rans": 100_000,
    "given": 100_000,
    "runs": 100_000,
    "lstm": 100_000,
}


def sample(coder: str) -> tuple[bytes, Callable[[bytes], np.ndarray]]:
    """A payload, and its decoder."""
    rng = np.random.default_rng(0)
    before = np.minimum(rng.geometric(0.4, SIZE) - 1, ALPHABET - 1).astype(np.uint8)
    plane = np.where(rng.random(SIZE) < 0.3, rng.integers(0, ALPHABET, SIZE), before).astype(np.uint8)
    if coder == "runs":
        payload = encode_levels(plane, ALPHABET, before, ALPHABET, "rle-huffman")
        return payload, lambda data: decode_levels(data, SIZE, ALPHABET, before, ALPHABET)
    kinds: dict[str, PlaneCoder] = {"huffman": "huffman", "cyclic": "cyclic", "lstm": LstmOptions()}
    known = before if coder in ("cyclic", "given", "lstm") else None
    payload = encode_plane(plane, ALPHABET, kinds.get(coder, "rans"), known, columns=30)
    return payload, lambda data: decode_plane(data, SIZE, ALPHABET, known, columns=30)


def campaign(coder: str, trials: int) -> tuple[int, int]:
    """How many damaged payloads were read and refused."""
    payload, decode = sample(coder)
    rng, read = np.random.default_rng(1), 0
    whole = np.frombuffer(payload, np.uint8)
    assert decode(payload).size == SIZE
    for trial in range(trials):
        bad = whole.copy()
        # the model and the tables, or anywhere; the method stays
        at = rng.integers(1, min(60, bad.size) if trial % 2 else bad.size, rng.integers(1, 5))
        bad[at] = rng.integers(0, 256, at.size)
        try:
            found = decode(bad.tobytes())
        except ShrinkpointError:
            continue
        assert found.size == SIZE
        assert int(found.max()) < ALPHABET
        read += 1
    return read, trials - read


@pytest.mark.slow
@pytest.mark.parametrize(
    "coder", [pytest.param(name, marks=[pytest.mark.long] * (name == "lstm")) for name in TRIALS]
)
def test_no_payload_reads_or_writes_out_of_bounds(coder: str, tmp_path: Path) -> None:
    """With a cache of its own, whose kernels are others."""
    program = f"import runpy; print(*runpy.run_path({__file__!r})['campaign']({coder!r}, {TRIALS[coder]}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = map(int, done.stdout.split())
    assert read + refused == TRIALS[coder]
