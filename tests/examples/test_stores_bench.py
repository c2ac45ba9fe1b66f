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
def test_saves_over_slow_links_and_over_a_server(tmp_path: Path) -> None:
    quick = (
        "--rate",
        1e9,
        "--rates",
        "1e9",
        "--server-rate",
        1e9,
        "--repeats",
        1,
        "--every",
        1,
        "--steps",
        3,
    )
    shown = run("stores.py", "--only", "bandwidth,rates,server", *quick, "--folder", tmp_path)
    number = r"-?[0-9.]+"
    rows = re.findall(
        rf"^\| (.+) \| ({number}) MB \| (?:-|{number} s) (?:\| {number} s \| {number}% \| {number}%, {number}% ){{2}}\|$",
        shown,
        flags=re.MULTILINE,
    )
    names = [name for name, _ in rows]
    assert names[:3] == [
        "torch.save's bytes, one store",
        "default scheme, one store",
        "lossless delta, one store",
    ]
    assert names[-5:-3] == ["1000 MB/s, memory", "1000 MB/s, one disk"]
    assert names[-3:] == [*names[:1], "lossless delta, one store", "lossless delta, 4+1"]
    sizes = dict(zip(names[:9], (float(size) for _, size in rows), strict=False))
    assert (
        sizes["default scheme, one store"] < sizes["lossless delta, 4+1"] < sizes["torch.save's bytes, 4+1"]
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_fastchecks_tables(tmp_path: Path) -> None:
    quick = ("--steps", 9, "--rate", 1e9, "--repeats", 1, "--models", "gpt,recommender", "--folder", tmp_path)
    shown = run("stores_fastcheck.py", *quick)
    assert "| Recommender | torch.save, one store |" in shown
    assert re.search(r"^\| FastCheck's form, 4\+1 \| [0-9.]+ s \| [0-9.]+ MB \|", shown, flags=re.MULTILINE)
    assert [int(k) for k in re.findall(r"^\| (\d+), 4\+1 \|", shown, flags=re.MULTILINE)] == [1, 2, 4, 8]
    techniques, shards = shown.index("saved as | encode |"), shown.index("data shards |")
    assert techniques < shards
    for rows, wanted in ((shown[techniques:shards], [4]), (shown[shards:], [1, 2, 3, 4, 5])):
        found = re.findall(r"^\| lossless delta, (\d)\+1 \|", rows, flags=re.MULTILINE)
        assert [int(k) for k in found] == wanted
    # So fast a link shows nothing; but what is saved is smaller.
    sizes = [float(size) for size in re.findall(r"\| ([0-9.]+) MB \|", shown)]
    assert sizes[1] < sizes[0]
    assert not list(tmp_path.iterdir())
