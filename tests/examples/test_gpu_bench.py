"""The GPU's bench, without one: that it runs, prints what it measures, and outlives a section that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "gpu.py"
SECTIONS = ("plain", "saves", "measured", "restore", "steps", "adopt", "exchange")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="it reads the process's memory from /proc, and sets alarms"
)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCH), "--device", "cpu", "--quick", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def table(text: str, first: str) -> list[dict[str, str]]:
    """The rows of the table whose first column is named so."""
    lines = iter(text.splitlines())
    head = next(line for line in lines if line.startswith(f"| {first} |"))
    names = [name.strip() for name in head.strip("|").split("|")]
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append(dict(zip(names, cells, strict=True)))
    return rows


def test_saves_are_measured_beside_other_ways(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    done = run("--only", "plain,saves", "--out", str(page), "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    ways = table(done.stdout, "without this library")
    names = [way["without this library"].split()[0] for way in ways]
    assert names == ["a"] * 2 + ["torch.save"] * 2 + ["torch.distributed.checkpoint.async_save"] * 3
    for name in ("training waits, ms", "in steps", "GB/s"):
        assert all(float(way[name]) > 0 for way in ways), ways
    saves = table(done.stdout, "scheme")
    kinds = [(save["scheme"], save["save"]) for save in saves]
    assert kinds[:2] == [("lossless", "first base"), ("lossless", "delta")]
    assert ("auto", "first base") in kinds
    for save in saves:
        assert float(save["host waits, ms"]) >= float(save["of them reported, ms"]) > 0, save
        assert float(save["encode, s"]) > 0, save
        assert float(save["ratio"]) > 1, save
        float(save["3 steps with it take longer by, ms"])  # by chance less than nothing, on a busy machine
    assert table(page.read_text(), "scheme") == saves
    assert [left.name for left in tmp_path.iterdir()] == ["gpu.md"]


@pytest.mark.slow
def test_a_section_that_takes_too_long_is_left_for_the_next_one(tmp_path: Path) -> None:
    done = run("--only", "plain,restore", "--limit", "0.01", "--folder", str(tmp_path))
    assert done.returncode > 0
    for name in ("plain", "restore"):
        assert f"### {name}" in done.stdout
        assert f"{name} failed: TimeOver" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_every_section_has_its_table(tmp_path: Path) -> None:
    done = run("--folder", str(tmp_path), "--limit", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[4:] for line in done.stdout.splitlines() if line.startswith("### ")] == list(SECTIONS)
    assert "failed" not in done.stdout
    measured = table(done.stdout, "AdamW")
    assert {row["AdamW"] for row in measured} == {"fused", "foreach"}
    assert all(float(row["evaluations, s"]) > 0 for row in measured), measured
    assert measured[0]["probed steps"] != "none"
    adopted = table(done.stdout, "evaluated")
    assert {"no", "yes"} == {row["evaluated"] for row in adopted}
    assert all(float(row["adopt, s"]) > 0 for row in adopted), adopted
    restored = table(done.stdout, "stored by")
    assert [row["stored by"] for row in restored] == ["torch.save", *["lossless"] * 2, *["auto"] * 2]
    assert all(float(row["resume, s"]) > float(row["of it decoding, s"]) > 0 for row in restored[1:])
    logs = table(done.stdout, "log")
    assert [int(row["replayed steps"]) for row in logs[:3]] == [0, 7, 10], logs
    assert all(float(row["bits per parameter and step"]) > 0 for row in logs if row["steps"] != "0"), logs
    exchanged = table(done.stdout.partition("### exchange")[2], "scheme")
    assert all(float(row["blocked, ms"]) > float(row["exchange, ms"]) > 0 for row in exchanged), exchanged
