"""Measure what the suite catches: change one place of core/ at a time, and run the tests that cover it.

    python tests/mutation.py map FOLDER [PYTEST ARGUMENT ...]     # which tests run which lines; adds to the map
    python tests/mutation.py places FOLDER --count 200            # FOLDER/places.json: the changes, by a fixed seed
    python tests/mutation.py run FOLDER TREE                      # FOLDER/caught.csv; TREE is a copy that may be changed

The map needs `coverage` beside the packages of the tests. A line of a kernel or of a module's body, which no test is seen
to run, has the tests that run lines with the names which its statement binds.
"""

import argparse
import ast
import contextlib
import csv
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS, BUDGET_S = 30, 30.0  # of one change: the most tests, and their recorded time
CPU_S, LIMIT_S = 90, 900.0  # allowed to each of its processes, and to all
OPERATORS: Mapping[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "+"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


CHILD = """
import coverage, os

def name():
    current = coverage.Coverage.current()
    if current is not None and os.path.exists("{now}"):
        current.switch_context(open("{now}").read())

coverage.process_startup()
name()
os.register_at_fork(after_in_child=name)
"""


class Change(NamedTuple):
    """Bytes `start` to `stop` of a file become `new`; `text` is the changed line, to find it again."""

    file: str
    line: int
    start: int
    stop: int
    old: str
    new: str
    text: str


class Recorder:
    """A plugin of pytest that tells `coverage` which test runs, here and in its processes, and keeps how long it took."""

    def __init__(self, coverage: Any, now: Path) -> None:
        self.coverage, self.now = coverage, now
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.now.write_text(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


def record(folder: Path, arguments: list[str]) -> None:
    """Run the tests once and write the map: file, line -> tests."""
    import coverage

    folder.mkdir(parents=True, exist_ok=True)
    settings = (
        f"[run]\ninclude = {ROOT}/core/*\nparallel = true\ndata_file = {folder}/data\npatch = fork, _exit\n"
    )
    (folder / "coveragerc").write_text(settings)
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(CHILD.format(now=folder / "now"))
    os.environ["COVERAGE_PROCESS_START"] = str(folder / "coveragerc")
    os.environ["PYTHONPATH"] = f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(folder / "site"))
    measured = coverage.Coverage(config_file=str(folder / "coveragerc"))
    recorder = Recorder(measured, folder / "now")
    measured.start()
    pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[recorder])
    measured.stop()
    measured.save()
    measured.combine()
    data, file = measured.get_data(), folder / "map.json"
    known = json.loads(file.read_text()) if file.exists() else {"seconds": {}, "covered": {}}
    known["seconds"] |= {test: s for test, s in recorder.seconds.items() if test not in recorder.failed}
    for measured_file in data.measured_files():
        lines = known["covered"].setdefault(str(Path(measured_file).relative_to(ROOT)), {})
        for line, tests in data.contexts_by_lineno(measured_file).items():
            lines[str(line)] = sorted({*lines.get(str(line), ()), *tests} & known["seconds"].keys())
    file.write_text(json.dumps(known))
    for each in folder.glob("data*"):
        each.unlink()


def changes(file: Path) -> Iterator[Change]:
    """Every change of a file, in no message, annotation, decorator or docstring."""
    source = file.read_bytes()
    lines = source.split(b"\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def place(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def change(start: int, stop: int, new: str) -> Change:
        line = source.count(b"\n", 0, start) + 1
        old, text = source[start:stop].decode(), lines[line - 1].decode().strip()
        return Change(str(file.relative_to(ROOT)), line, start, stop, old, new, text)

    def operator(kind: type, left: Any, right: Any) -> Iterator[Change]:
        if kind in OPERATORS:
            old, new = OPERATORS[kind]
            begin = place(left)[1]
            found = re.search(re.escape(old).replace(r"\ ", r"\s+"), source[begin : place(right)[0]].decode())
            if found:
                yield change(begin + found.start(), begin + found.end(), new)

    def walk(node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Assert():
                if isinstance(node, ast.Raise):
                    yield change(*place(node), "pass")
                return
            case ast.Call(func=ast.Name(id="warn" | "TypeVar")):
                return
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
                yield change(*place(node), "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield change(*place(node), "pass")
            case ast.Compare():
                for kind, left, right in zip(
                    node.ops, [node.left, *node.comparators], node.comparators, strict=False
                ):
                    yield from operator(type(kind), left, right)
            case ast.BinOp():
                yield from operator(type(node.op), node.left, node.right)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from operator(type(node.op), left, right)
            case ast.UnaryOp(op=ast.Not()):
                yield change(place(node)[0], place(node)[0] + len("not"), "")
            case ast.Constant(value=bool()):
                yield change(*place(node), str(not node.value))
            case ast.Constant(value=int() | float()):
                yield change(
                    *place(node), repr(node.value + 1 if isinstance(node.value, int) else node.value * 2 + 1)
                )
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from walk(child)

    yield from walk(ast.parse(source))


def sample(folder: Path, count: int) -> None:
    """Write `count` changes: one each of lines drawn evenly from all of core/ that can be changed."""
    lines: dict[tuple[str, int], list[Change]] = defaultdict(list)
    for file in sorted(ROOT.joinpath("core").rglob("*.py")):
        for each in changes(file):
            lines[each.file, each.line].append(each)
    draw = random.Random(0)
    drawn = [draw.choice(lines[key]) for key in draw.sample(sorted(lines), count)]
    (folder / "places.json").write_text(json.dumps([each._asdict() for each in drawn], indent=1))


class Map:
    """Which tests to run for a change: quick ones first, of as many files as possible."""

    def __init__(self, folder: Path) -> None:
        read = json.loads((folder / "map.json").read_text())
        self.seconds, self.covered = read["seconds"], read["covered"]

    @cache  # noqa: B019 - one map a process
    def naming(self, name: str, depth: int = 0) -> frozenset[str]:
        """Tests that run a line with this name in it."""
        tests: set[str] = set()
        for file in sorted(ROOT.joinpath("core").rglob("*.py")):
            text = file.read_text()
            if name not in text:
                continue
            covered = self.covered.get(str(file.relative_to(ROOT)), {})
            for number, line in enumerate(text.split("\n"), 1):
                if re.search(rf"\b{name}\b", line) and str(number) in covered:
                    tests.update(covered[str(number)])
            if not tests and depth < 3:  # kernels that only other kernels call
                for statement in ast.parse(text).body:
                    calls = isinstance(statement, ast.FunctionDef) and statement.name != name
                    if calls and re.search(rf"\b{name}\b", ast.unparse(statement)):
                        tests |= self.naming(statement.name, depth + 1)
        return frozenset(tests)

    def of(self, change: Change, among: frozenset[str] | None = None) -> list[str]:
        """The tests to run, of these alone if any are given."""
        tests = set(self.covered.get(change.file, {}).get(str(change.line), ()))
        inside = [
            node
            for node in ast.walk(ast.parse((ROOT / change.file).read_text()))
            if isinstance(node, ast.stmt) and node.lineno <= change.line <= (node.end_lineno or 0)
        ]
        if not tests or not any(isinstance(node, ast.FunctionDef) for node in inside):
            for node in inside:
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                bound = [each.id for each in targets if isinstance(each, ast.Name)] + [
                    getattr(node, "name", "")
                ]
                tests |= {test for name in filter(None, bound) for test in self.naming(name)}
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests if among is None else tests & among, key=lambda t: (self.seconds[t], t)):
            by_file[test.split("::")[0]].append(test)
        ranked = sorted(
            (rank, self.seconds[test], test) for each in by_file.values() for rank, test in enumerate(each)
        )
        chosen: list[str] = []
        budget = BUDGET_S
        for _, seconds, test in ranked:
            if len(chosen) < TESTS and (seconds <= budget or not chosen):
                chosen.append(test)
                budget -= seconds
        return chosen


class First:
    """A plugin of pytest that keeps the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (import)"


def tried(change: Change, tests: list[str], tree: Path) -> str:
    """Return the first test that fails with the change, "time" if it takes all that is allowed, else nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        os.chdir(tree)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        first = First()
        code = 1
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[first]))
        finally:
            os.write(writing, (first.failed or ("" if code == 0 else f"exit {code}")).encode())
            os._exit(0)
    os.close(writing)
    ends, ended, status = time.monotonic() + LIMIT_S, 0, 0
    while not ended and time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        return said.read() if ended and not os.WIFSIGNALED(status) else "time"


def run(folder: Path, tree: Path, kept: frozenset[str] | None) -> None:
    """Try every change in `tree`, a copy of this tree with its own build/links, and add a row for each to caught.csv.

    Of tests that are kept, and of those that are not: the latter run where the former catch nothing.
    """
    import hypothesis  # noqa: F401 - imported here once, not by each child
    import numba  # noqa: F401
    import torch  # noqa: F401

    covered = Map(folder)
    file = folder / "caught.csv"
    done = {row[0] for row in csv.reader(file.open())} if file.exists() else set()
    sys.path.insert(0, str(tree / "build" / "links"))
    os.environ["PYTHONPATH"] = str(tree / "build" / "links")
    others = frozenset(covered.seconds) - kept if kept is not None else frozenset()
    for number, fields in enumerate(json.loads((folder / "places.json").read_text())):
        change = Change(**fields)
        groups = [covered.of(change, kept), covered.of(change, others)]
        if str(number) in done or not any(groups):
            continue
        target, began = tree / change.file, time.monotonic()
        original, stamp = target.read_bytes(), target.stat().st_mtime
        target.write_bytes(original[: change.start] + change.new.encode() + original[change.stop :])
        os.utime(
            target, (stamp + 1000 + number, stamp + 1000 + number)
        )  # no compiled file of another change counts
        kernels = "kernels" in change.file or change.file.endswith("tables.py")
        os.environ["NUMBA_CACHE_DIR"] = str(folder / "numba" / (str(number) if kernels else "all"))
        caught: list[str] = []
        try:
            for tests in groups:
                caught.append(tried(change, tests, tree) if tests else "")
                if caught[-1]:
                    break
        finally:
            target.write_bytes(original)
            os.utime(target, (stamp, stamp))
        row = [number, f"{change.file}:{change.line}", change.text, change.old, change.new, *map(len, groups)]
        with file.open("a", newline="") as rows:
            csv.writer(rows).writerow([*row, *[*caught, ""][:2], round(time.monotonic() - began, 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("job", choices=["map", "places", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kept", type=Path, help="a file with the names of the tests that are kept")
    chosen, rest = parser.parse_known_args()
    if chosen.job == "map":
        record(chosen.folder.resolve(), rest)
    elif chosen.job == "places":
        sample(chosen.folder, chosen.count)
    else:
        kept = chosen.kept and frozenset(chosen.kept.read_text().split("\n"))
        run(chosen.folder.resolve(), Path(rest[0]).resolve(), kept)


if __name__ == "__main__":
    main()
