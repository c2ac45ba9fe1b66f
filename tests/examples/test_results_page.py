"""docs/results.md: rows under a command with ``--table`` are lines that it prints from the results that are kept."""

import contextlib
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"^    python (examples/benchmarks/\w+\.py) (--table(?: \w+)?)", re.MULTILINE)
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "title", [part.partition("\n")[0] for part in PAGE.split("\n## ") if COMMAND.search(part)]
)
def test_rows_are_printed_from_the_kept_results(title, monkeypatch, capsys):
    section = next(part for part in PAGE.split("\n## ") if part.startswith(f"{title}\n"))
    script, options = COMMAND.search(section).groups()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    monkeypatch.setattr(sys, "argv", [script, *options.split()])
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    printed = set(capsys.readouterr().out.splitlines())
    assert printed
    assert not [line for line in section.splitlines() if line.startswith("|") and line not in printed]


def test_files_that_are_named_exist():
    results = ROOT / "examples" / "benchmarks" / "results"
    assert not [name for name in re.findall(r"\w+\.csv", PAGE) if not (results / name).exists()]
    assert not [name for name in re.findall(r"`(\w+\.py)", PAGE) if not (results.parent / name).exists()]
