"""The GPU's bench, without one: that it runs, and prints what it measures."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads the process's memory from /proc")


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


@pytest.mark.slow
@pytest.mark.long
def test_every_section_has_its_table() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    sections = [line[4:] for line in done.stdout.splitlines() if line.startswith("### ")]
    assert sections == ["plain", "saves", "restore", "adopt", "exchange"]
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
    adopted = table(done.stdout, "evaluated")
    assert {"no", "yes"} == {row["evaluated"] for row in adopted}
    assert all(float(row["adopt, s"]) > 0 for row in adopted), adopted
    restored = table(done.stdout, "stored by")
    assert [row["stored by"] for row in restored] == ["torch.save", *["lossless"] * 2, *["auto"] * 2]
    assert all(
        float(row["resume, s"]) > float(row["of it reading and decoding, s"]) > 0 for row in restored[1:]
    )
    exchanged = table(done.stdout.partition("### exchange")[2], "scheme")
    assert all(float(row["blocked, ms"]) > float(row["exchange, ms"]) > 0 for row in exchanged), exchanged
