"""All experiments by one command: a CSV file for each, a record of the runs, figures, and the papers' rows beside ours.

    make evidence           (python examples/benchmarks/evidence.py: under 3 hours on 2 cores; `make evidence QUICK=1`: 5 minutes)
    python examples/benchmarks/evidence.py [--quick] [--only peers,steps] [--again] [--patience 3] [--keep] [--list]
        [--table papers | peers]

An experiment is a script beside this one; the tables that it prints become build/evidence/NAME.csv. It is run if that file is missing,
or was made by other sources of the library or of the script, and stopped after its minutes, or --patience times as many on a busy
machine. build/evidence/runs.csv says with which commit each was made, and in how many seconds. --keep copies what is there to
results/, where --table prints from, which runs nothing: ``papers.csv`` has the papers' numbers, and the places of ours in the other
files. The quick form sees that everything runs, on tiny models; its numbers mean nothing.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cells import RESULTS, library_digest
from common import parsed, show

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Row = dict[str, str]


@dataclass(frozen=True)
class Experiment:
    """One script's run: its command, its quick form's, the most minutes that it may take, and what it gives."""

    name: str
    command: str
    quick: str
    minutes: int
    gives: str


_SCHEMES = "auto:scale 1,excp:alpha 5e-05,inshrinkerator:mild,lc-checkpoint:3 bit,lossless"
_SOME = "gpt,resnet,vit,bert,matrix-factorization,recommender,gru-ctc,sines-fit"
_TABLES = "--only models,techniques,intervals,shards,rates"
_TINY = "--steps 9 --rate 1e9 --rates 1e9 --repeats 1 --models gpt"
EXPERIMENTS = [
    Experiment("peers", "peers.py", "peers.py --quick", 10, "issue's peers; bf16 deltas"),
    Experiment("rework", "published.py --only rework --seeds 4", "published.py --quick --only rework", 20, "LC-Checkpoint 3 to 5"),
    Experiment(
        "published", "published.py --only transfer,bins,coder", "published.py --quick --only bins", 15,
        "Inshrinkerator 6, 7; ITMO",
    ),
    Experiment(
        "inshrinkerator", "inshrinkerator.py --only sketch,clustering --elements 2000000",
        "inshrinkerator.py --instances 1 --elements 20000 --rounds 1", 5, "Inshrinkerator 8; the search in its full form",
    ),
    Experiment("fastcheck", f"stores.py {_TABLES}", f"stores.py {_TABLES} {_TINY}", 10, "FastCheck 6, 7, 9, 10"),
    Experiment(
        "steps", "steps.py --sections cost,recovery,storage,waste", "steps.py --sections cost,storage --small --blocks 1", 20,
        "LowDiff 1, 3, 4, 5, 7, tables I and III",
    ),
    Experiment(
        "steps_errors", "steps.py --sections errors", "steps.py --sections errors --small --seeds 1 --before 30", 15, "LowDiff 8"
    ),
    Experiment(
        "schemes_few", f"schemes.py --models gpt --every 50 --seeds 2 --only '{_SCHEMES}' --workers 2 --cache {{cache}}",
        "schemes.py --quick --models conv --seeds 1 --only lossless --cache {cache}", 20, "Inshrinkerator 5, figure 1; ExCP",
    ),
    Experiment(
        "bound_few", f"bound.py --only {_SOME} --seeds 1 --workers 2 --cache {{cache}}",
        "bound.py --quick --only matrix-factorization --seeds 1 --cache {cache}", 20, "ten restores of eight trainings",
    ),
    Experiment("schemes_kept", "schemes.py --table", "schemes.py --table", 1, "as schemes_few, from the kept hours"),
    Experiment("bound_kept", "bound.py --table listed", "bound.py --table listed", 1, "as bound_few, from the kept hours"),
    Experiment("lossless", "lossless.py --steps 300", "lossless.py --steps 2 --every 1 --width 32 --layers 1", 5, "exact coders"),
    Experiment("auto_speed", "auto_speed.py", "auto_speed.py --width 32 --matrices 2 --small 3", 5, "speed of the coders"),
    Experiment(
        "memory", "memory.py --schemes auto,lossless --scratch /tmp", "memory.py --width 64 --layers 1 --vocabulary 300 --schemes lossless",
        10, "memory of a save",
    ),
    Experiment("sharded_scale", "sharded_scale.py", "sharded_scale.py --width 64 --layers 1", 5, "7 to 405 billion parameters"),
]  # fmt: skip


def tables(text: str) -> Iterator[Row]:
    """Read the Markdown tables of an output: ``table`` is the line before, or else the first heading; ``what`` is the first cell."""
    title, headings, what = "", None, ""
    for line in text.splitlines():
        if line.startswith("- "):
            continue
        if not line.startswith("|"):
            title, headings = (line.strip(" #*") or title) if headings is None else line.strip(" #*"), None
            continue
        first, *cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if headings is None:
            title, headings = title or first, []
            for cell in cells:
                name = cell or f"{headings[-1]}, of the first"
                headings.append(f"{name} ({headings.count(name) + 1})" if name in headings else name)
        elif set(line) - set("|-: "):
            what = first or what  # as above
            yield {"table": title, "what": what, **dict(zip(headings, cells, strict=True))}


def written(path: Path, rows: Sequence[Row]) -> None:
    """Write a file whose columns are those of all rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, [*columns], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[Row]:
    """Read a file; there is nothing in one that is missing."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def sources(script: str) -> str:
    """Another text whenever the library or the script has changed."""
    return library_digest() + hashlib.sha256((HERE / script).read_bytes()).hexdigest()[:6]


def run(experiment: Experiment, folder: Path, quick: bool, patience: float) -> Row:
    """Run an experiment, and keep its tables; the row says with what, and how it ended."""
    cache = folder / "cells" / f"{experiment.name}.csv"
    command = experiment.quick if quick else experiment.command
    script, *arguments = shlex.split(command.format(cache=cache))
    head = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    began, env = time.monotonic(), os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, text=True, check=False, env=env,
            timeout=60 * experiment.minutes * patience,
        )  # fmt: skip
        ended, text = "ok" if done.returncode == 0 else f"failed ({done.returncode})", done.stdout
    except subprocess.TimeoutExpired:
        ended, text = f"stopped after {patience * experiment.minutes:g} minutes", ""
    if ended == "ok":
        ended = "ok" if (found := [*tables(text)]) else "printed no table"
        written(folder / f"{experiment.name}.csv", found)
        print(text, flush=True)
    return {
        "experiment": experiment.name, "ended": ended, "seconds": f"{time.monotonic() - began:.0f}", "commit": head,
        "command": command, "sources": sources(script), "gives": experiment.gives,
    }  # fmt: skip


# --- the page -----------------------------------------------------------------------------------------------

_MISSING = "not run yet"
_PLACE = re.compile(r"\{(\w+)\|([^|{}]*)\|([^{}]+)\}")


def place(found: re.Match[str]) -> str:
    """Look up ``{file|column=value;column=value|column}``; conditions are the beginnings of cells. What was not run says so."""
    file, conditions, column = found.groups()
    wanted = [condition.split("=", 1) for condition in conditions.split(";") if condition]
    rows = read(RESULTS / f"{file}.csv")
    for row in rows:
        if all(row.get(name, "").startswith(value) for name, value in wanted):
            return row[column]
    if not rows:
        return _MISSING
    raise KeyError(f"{file}.csv has no row with {conditions}")


def papers() -> None:
    """Print the papers' rows, with ours from the files of results."""
    rows, missing = [], []
    for row in read(RESULTS / "papers.csv"):
        name, ours = f"{row['paper']}, {row['row']}", _PLACE.sub(place, row["ours"])
        if _MISSING in ours:
            missing.append(name)
        else:
            rows.append([name, row["theirs"], ours])
    show("row | theirs | ours", rows)
    print(f"\n{_MISSING}: {'; '.join(missing) or 'none'}")


def peers() -> None:
    """Print what the page shows of the peers: medians."""
    columns = ("ratio", "write", "read", "waits, ms", "cold restore, CPU s", "save at 0.1")
    rows = [row for row in read(RESULTS / "peers.csv") if row["table"].startswith("Peers")]
    medians = [[row["what"], *(row[name].split(" (")[0] for name in columns)] for row in rows]
    show("peer | ratio | write | read | waits, ms | cold, s | save, s/GB", medians)


TABLES = {"papers": papers, "peers": peers}


def figures(folder: Path) -> None:
    """Draw where a picture says more than its table: rework with its intervals, and seconds by link."""
    import matplotlib.pyplot as plt

    for name, title, label, columns in (
        ("rework", "Rework", "steps made again, 95 % intervals", {"rework, steps": ""}),
        (
            "peers",
            "Peers",
            "seconds per GB of state, saved over a link",
            {"save at 0.6 GB/s": "0.6 GB/s", "save at 0.1": "0.1 GB/s"},
        ),
    ):
        found = [row for row in read(folder / f"{name}.csv") if row["table"].startswith(title)]
        rows = [row for row in found if "-" not in [row[column] for column in columns]]
        if not rows:
            continue
        figure, axes = plt.subplots(figsize=(8, 0.5 + 0.35 * len(rows)))
        for number, (column, label_of) in enumerate(columns.items()):
            numbers = [[float(n) for n in re.findall(r"-?[\d.]+", row[column])[:3]] or [0.0] for row in rows]
            at = [place + 0.4 * number for place in range(len(rows))]
            errors = [[max(0.0, n[0] - min(n)) for n in numbers], [max(0.0, max(n) - n[0]) for n in numbers]]
            axes.barh(at, [n[0] for n in numbers], 0.38, xerr=errors, label=label_of)
        names = [f"{row['what'].split(' with')[0]} {row.get('kept by') or ''}" for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        if len(columns) > 1:
            axes.legend()
        figure.savefig(folder / f"{name}.svg", bbox_inches="tight")
        plt.close(figure)


def main() -> None:
    options = parsed(
        __doc__, only=[e.name for e in EXPERIMENTS], quick=False, again=False, keep=False, list=False, table="", patience=1.0
    )  # fmt: skip
    if options.table:
        return TABLES[options.table]()
    if options.list:
        rows = [[e.name, e.minutes, e.command, e.gives] for e in EXPERIMENTS]
        return show("experiment | at most minutes | command | gives", rows)
    folder = ROOT / "build" / "evidence" / ("quick" if options.quick else "")
    runs = {row["experiment"]: row for row in read(folder / "runs.csv")}
    for experiment in EXPERIMENTS:
        if experiment.name not in options.only:
            continue
        before = runs.get(experiment.name, {})
        script, _, _ = (experiment.quick if options.quick else experiment.command).partition(" ")
        if options.again or (before.get("ended"), before.get("sources")) != ("ok", sources(script)):
            print(f"\n## {experiment.name}\n", flush=True)
            runs[experiment.name] = run(experiment, folder, options.quick, options.patience)
            written(folder / "runs.csv", [*runs.values()])
    figures(folder)
    if options.keep:
        for file in folder.glob("*.csv"):
            name = "evidence.csv" if file.name == "runs.csv" else file.name
            (RESULTS / name).write_bytes(file.read_bytes())
    columns = ("experiment", "ended", "seconds", "commit", "command")
    show(" | ".join(columns), [[row[name] for name in columns] for row in runs.values()], "Runs")
    if late := [row["experiment"] for row in runs.values() if row["ended"] != "ok"]:
        sys.exit(f"not complete: {', '.join(late)}")
    return None


if __name__ == "__main__":
    main()
