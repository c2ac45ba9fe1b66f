"""The benches in their smallest form: that they run, and print a row for each case."""

import csv
import importlib
import os
import re
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


def test_speed_has_two_tables_with_a_row_for_each_scheme() -> None:
    rows = rows_of(printed("auto_speed.py", "--width", 32, "--matrices", 2, "--small", 3))
    assert [row[0] for row in rows if row[0]] == ["auto", "lossless"] * 2
    assert all(float(cell) > 0 for row in rows[-2:] for cell in row[1:6])


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
def test_memory_has_a_line_for_each_save_and_one_of_what_is_fixed() -> None:
    size = ("--width", 64, "--layers", 1, "--vocabulary", 300)
    lines = printed("memory.py", *size, "--schemes", "lossless", "--resumed").splitlines()
    assert lines[0].split() == ["scheme", "save", "ratio", "peak", "after", "blocked"]
    kinds = [line.split()[:2] for line in lines[1:4]]
    assert kinds == [["lossless", kind] for kind in ("base", "delta", "delta")]
    assert "coders and libraries" in lines[4]


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
def test_every_experiment_of_step_logs_has_its_table(tmp_path: Path) -> None:
    quick = ("--small", "--blocks", 1, "--seeds", 1, "--before", 30)
    found = printed("steps.py", *quick, "--log", tmp_path)
    for title in ("Experiment 1", "Experiment 4", "Experiment 7, table III", "Experiment 3", "Table I"):
        assert title in found
    for method in ("torch.save", "CheckFreq", "naive DC", "LowDiff", "step_log='exact'", "step_log='small'"):
        assert method in found
    assert "paper's f*, b*" in found
    recovery = found.partition("Experiment 5")[2].partition("Experiment 3")[0]
    assert [row[0] for row in rows_of(recovery)[-5:]] == ["5", "10", "20", "50", "48"]
    assert "| exact gradients, step by step | 32.00 |  | 0.0%" in found
    assert found.count("| small, 6.5 x rms |") == found.count("| LowDiff, top 1.0% |") == 2


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


def test_parts_of_inshrinkerator_have_a_table_each() -> None:
    rows = rows_of(
        printed("inshrinkerator.py", "--only", "search,sketch", "--instances", 1, "--elements", 1000)
    )
    assert [row[2] for row in rows[1:9]] == 4 * ["shrinkpoint", "midpoint boxes"]
    assert rows[10][0] == "sketch, 7 quantiles"


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
    size = ("--width", 64, "--layers", 2, "--saves", 2, "--ranks", 2, "--copies", 2)
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


@slow
@long
def test_fastchecks_tables(tmp_path: Path) -> None:
    quick = ("--steps", 9, "--rate", 1e9, "--rates", 1e9, "--repeats", 1, "--models", "gpt,recommender")
    tables = "models,techniques,intervals,shards,rates"
    shown = printed("stores.py", "--only", tables, *quick, "--folder", tmp_path)
    assert "| Recommender | torch.save, one store |" in shown
    assert re.search(r"^\| FastCheck's form, 4\+1 \| [0-9.]+ s \| [0-9.]+ MB \|", shown, flags=re.MULTILINE)
    assert [int(k) for k in re.findall(r"^\| (\d+), 4\+1 \|", shown, flags=re.MULTILINE)] == [1, 2, 4, 8]
    techniques, shards = shown.index("saved as | encode |"), shown.index("data shards |")
    assert techniques < shards
    for rows, wanted in ((shown[techniques:shards], [4]), (shown[shards:], [1, 2, 3, 4, 5])):
        found = re.findall(r"^\| lossless delta, (\d)\+1 \|", rows, flags=re.MULTILINE)
        assert [int(k) for k in found] == wanted
    where = ["memory", "one disk"]
    assert [kind for kind in where if f"| 1000 MB/s, {kind} |" in shown] == where
    # So fast a link shows nothing; but what is saved is smaller.
    sizes = [float(size) for size in re.findall(r"\| ([0-9.]+) MB \|", shown)]
    assert sizes[1] < sizes[0]
    assert not list(tmp_path.iterdir())
