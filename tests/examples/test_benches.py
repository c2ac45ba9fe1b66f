"""The benches that `make evidence` does not run, in their smallest form: that they print a row for each case."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
slow, long = pytest.mark.slow, pytest.mark.long


def printed(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)],
        capture_output=True, check=False, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(text: str) -> list[list[str]]:
    """The cells of all tables, headings among them."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def test_a_team_is_followed_by_its_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    scaling = importlib.import_module("scaling")
    alone, shared = scaling.Item([[3.0]]), scaling.Item([[1.0], [2.0, 2.0], [1.0]])
    assert scaling.makespan([shared, alone], 1) == 9
    assert scaling.makespan([alone, alone, alone], 2) == 6
    assert scaling.makespan([shared], 2) == 4
    assert (
        scaling.makespan([shared, alone], 2) == 6
    )  # the second thread is free when one part is left, which the first has begun
    assert scaling.makespan([shared, alone], 4) == 4


@slow
@long
def test_scaling_has_a_row_for_saves_and_for_restores() -> None:
    rows = rows_of(printed("scaling.py", "--width", 32, "--layers", 1, "--vocabulary", 64, "--links", 2))[1:]
    names = ["saving a base", "saving a delta", "reading a base", "reading a base and 2 links"]
    assert [row[0] for row in rows] == names
    assert all(row[1].endswith("(1.00)") for row in rows)


@slow
@long
def test_launches_have_a_line_for_each_save() -> None:
    shown = printed("launches.py", "--width", 64, "--layers", 1, "--saves", 2, "--only", "lossless")
    rows = rows_of(shown)[1:]
    assert [row[:2] for row in rows] == [
        ["a thread that needs no lock", "1"],
        ["torch.save in a thread", "1"],
        ["shrinkpoint, lossless", "1"],
        ["shrinkpoint, lossless", "2"],
    ]
    for _, _, _, usual, slower, *longest in rows:
        assert float(usual) > 0
        assert float(slower.rstrip("%")) > -100
        assert all(float(one) > 0 for one in longest)


@slow
@long
def test_adoption_has_a_row_from_three_runs_that_are_measured_once(tmp_path: Path) -> None:
    cache, asked = tmp_path / "cells.csv", ("--quick", "--only", "matrix-factorization", "--saves", 3)
    shown = printed("adopt.py", *asked, "--cache", cache)
    with cache.open(newline="") as file:
        plain, without, adopting = csv.DictReader(file)
    assert [cell["way"] for cell in (plain, without, adopting)] == ["undisturbed", "without", "with"]
    assert plain["final"] == without["final"] != adopting["final"]
    assert float(adopting["adopt_s"]) > 0 == float(without["adopt_s"])
    _, columns = rows_of(shown)
    assert columns[1].startswith(f"{adopting['count']}, ")
    assert float(columns[5]) == round(100 * (float(adopting["final"]) / float(plain["final"]) - 1), 2)
    for more in (["--table"], []):
        assert printed("adopt.py", *asked, "--cache", cache, *more) == shown
    assert len(cache.read_text().splitlines()) == 4


# --- sharded ------------------------------------------------------------------------------------------------


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sharded_scale

    return sharded_scale


@slow
@long
def test_parts_take_hardly_more_bytes_than_one_container(scale) -> None:
    states = scale.snapshots(192, 2)
    alone, four = (sum(size for size, _ in scale.coded(states, world)) for world in (1, 4))
    assert alone < four <= 1.01 * alone


def test_records_of_many_ranks_are_small(scale) -> None:
    head, manifest = scale.record_sizes(4096)
    assert head < 2**20
    assert manifest < 2**14


@slow
@long
def test_ranks_save_and_restore() -> None:
    size = ("--width", 64, "--layers", 2, "--saves", 2, "--ranks", 2, "--copies", 2, "--tries", 1)
    rows = rows_of(printed("sharded_ranks.py", *size))
    assert [row[0] for row in rows] == ["save", "1", "2", "save", "1", "2", "ranks", "2", "3", "4"]


# --- several stores -----------------------------------------------------------------------------------------


@slow
@long
def test_latency_of_three_folders_beside_one(tmp_path: Path) -> None:
    shown = printed("stores.py", "--only", "latency", "--rounds", 3, "--folder", tmp_path)
    rows = rows_of(shown)[1:]
    assert len(rows) == 12
    kinds = {"folders, one disk", "folders, memory", "folders, syncs of 5 ms", "requests of 20 ms"}
    assert {row[1] for row in rows} == kinds
    assert all(cell.endswith(" ms") for row in rows for cell in row[2:4])
    assert not list(tmp_path.iterdir())
