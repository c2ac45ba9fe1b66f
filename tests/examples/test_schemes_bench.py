"""The bench of schemes: its bookkeeping here, and the whole of it on small models among the slow tests."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "baselines"))


# --- settings and trainings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt", "gpt-999", "conv"])
def test_training_goes_on_from_its_own_state_bit_by_bit(model):
    from schemes_run import Course, Position

    course = Course(model=model, seed=3, every=4, quick=True)
    undisturbed, resumed = Position(course), Position(course)
    undisturbed.run(4)
    state = undisturbed.state()
    resumed.load(state)
    for training in (undisturbed, resumed):
        training.run(7)
    assert undisturbed.loss() == resumed.loss()
    again = Position(course)
    again.load(state)  # what was loaded first has trained since; the state has not changed with it
    again.run(7)
    assert again.loss() == resumed.loss()


# --- the summary --------------------------------------------------------------------------------------------


# --- the script ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bench_runs_from_end_to_end_and_continues(tmp_path):
    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARKS / "schemes.py"), "--quick", "--seeds", "1"]
        command += [
            "--only",
            "auto:scale 1,excp:alpha 0.001,lossless",
            "--cache",
            str(tmp_path / "cells.csv"),
        ]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, check=False, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done

    assert "chain, lossless" in bench("--models", "gpt", "--parts", "chain").stderr
    done = bench("--models", "gpt,conv", "--workers", "2")
    assert "gpt, 1, 8, chain" not in done.stderr, "it was measured already"
    for heading in ("## GPT", "## Convolutional network"):
        assert heading in done.stdout
    with (tmp_path / "cells.csv").open(newline="") as file:
        exact = [json.loads(cell["rises"]) for cell in csv.DictReader(file) if cell["scheme"] == "lossless"]
    assert [{*rises.values()} for rises in exact] == [{0.0}, {0.0}], (
        "what is restored bit by bit costs nothing"
    )
    again = bench("--models", "gpt,conv")
    assert ": chain" not in again.stderr, "nothing is left to measure"
    assert again.stdout == done.stdout
