"""The driver of all experiments: tables become rows, only what is missing is run, and the papers' rows are filled from files."""

import csv
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import evidence

    return evidence


def test_tables_become_rows_under_their_titles(evidence) -> None:
    text = "Sizes\n\n| | ratio | |\n|---|---|---|\n| a | 2x | 1 |\n| | 3x | 2 |\n\n| k | less | less |\n|---|---|---|\n| b | 1 | 2 |\n"
    assert [*evidence.tables(text)] == [
        {"table": "Sizes", "what": "a", "ratio": "2x", "ratio, of the first": "1"},
        {"table": "Sizes", "what": "a", "ratio": "3x", "ratio, of the first": "2"},
        {"table": "k", "what": "b", "less": "1", "less (2)": "2"},
    ]


def test_an_experiment_is_run_once_and_a_failed_one_again(evidence, monkeypatch, tmp_path, capsys) -> None:
    (tmp_path / "good.py").write_text("print('| a | b |\\n|---|---|\\n| 1 | 2 |')")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    made = [evidence.Experiment(name, f"{name}.py", f"{name}.py", 1, "") for name in ("good", "bad")]
    for name, value in (("EXPERIMENTS", made), ("HERE", tmp_path), ("ROOT", tmp_path), ("figures", id)):
        monkeypatch.setattr(evidence, name, value)
    monkeypatch.setattr(sys, "argv", ["evidence.py"])
    for ran in (["good", "bad"], ["bad"]):
        with pytest.raises(SystemExit, match="not complete: bad"):
            evidence.main()
        shown = capsys.readouterr().out
        assert [name for name in ("good", "bad") if f"## {name}" in shown] == ran
    folder = tmp_path / "build" / "evidence"
    assert evidence.read(folder / "good.csv") == [{"table": "a", "what": "1", "b": "2"}]
    assert [row["ended"] for row in evidence.read(folder / "runs.csv")] == ["ok", "failed (3)"]


def test_the_papers_have_rows_enough_and_each_of_ours_is_in_a_file(evidence, capsys) -> None:
    evidence.papers()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(shown) > 25
    assert not [line for line in shown if "{" in line]


def test_what_is_kept_names_its_command_and_commit() -> None:
    with (BENCHMARKS / "results" / "evidence.csv").open(newline="") as file:
        assert all(row["command"] and row["commit"] and row["ended"] == "ok" for row in csv.DictReader(file))
