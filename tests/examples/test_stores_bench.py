"""The benchmarks of several stores print what docs/stores.md shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


def run(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_latency_of_three_folders_beside_one(tmp_path: Path) -> None:
    shown = run("stores.py", "--only", "latency", "--rounds", 3, "--folder", tmp_path)
    rows = re.findall(
        r"^\| ([0-9,]+ kB) \| ([a-z0-9, ]+) \| [0-9.]+ ms \| [0-9.]+ ms \|", shown, flags=re.MULTILINE
    )
    assert len(rows) == 12
    kinds = {"folders, one disk", "folders, memory", "folders, syncs of 5 ms", "requests of 20 ms"}
    assert {kind for _, kind in rows} == kinds
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_fastchecks_tables(tmp_path: Path) -> None:
    quick = ("--steps", 9, "--rate", 1e9, "--rates", 1e9, "--repeats", 1, "--models", "gpt,recommender")
    shown = run(
        "stores.py", "--only", "models,techniques,intervals,shards,rates", *quick, "--folder", tmp_path
    )
    assert "| Recommender | torch.save, one store |" in shown
    assert re.search(r"^\| FastCheck's form, 4\+1 \| [0-9.]+ s \| [0-9.]+ MB \|", shown, flags=re.MULTILINE)
    assert [int(k) for k in re.findall(r"^\| (\d+), 4\+1 \|", shown, flags=re.MULTILINE)] == [1, 2, 4, 8]
    techniques, shards = shown.index("saved as | encode |"), shown.index("data shards |")
    assert techniques < shards
    for rows, wanted in ((shown[techniques:shards], [4]), (shown[shards:], [1, 2, 3, 4, 5])):
        found = re.findall(r"^\| lossless delta, (\d)\+1 \|", rows, flags=re.MULTILINE)
        assert [int(k) for k in found] == wanted
    assert [kind for kind in ("memory", "one disk") if f"| 1000 MB/s, {kind} |" in shown] == [
        "memory",
        "one disk",
    ]
    # So fast a link shows nothing; but what is saved is smaller.
    sizes = [float(size) for size in re.findall(r"\| ([0-9.]+) MB \|", shown)]
    assert sizes[1] < sizes[0]
    assert not list(tmp_path.iterdir())
