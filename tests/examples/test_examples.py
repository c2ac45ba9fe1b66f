"""The examples run as their readers would run them: as scripts, in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("lightning")


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / script), *map(str, arguments)]


def run(script: str, *arguments: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command(script, *arguments),
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
        env=os.environ | {"COLUMNS": "100"},
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- the demo -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long  # CI makes the demo itself
def test_demo_kills_resumes_and_reports(tmp_path):
    out = tmp_path / "demo-out"
    shown = run("demo.py", "--quick", "--threads", 1, "--out", out)

    settings = json.loads((out / "001" / "run-2.settings.json").read_text())
    first, second = (
        [json.loads(line) for line in (out / "001" / f"{name}.events.jsonl").read_text().splitlines()]
        for name in ("run-1", "run-2")
    )
    assert first[-1]["event"] != "end", "the first process was not killed"
    resumed = next(event["step"] for event in second if event["event"] == "start")
    assert 0 < resumed <= max(event["step"] for event in first if event["event"] == "train")
    assert second[-1]["event"] == "end"
    assert second[-1]["step"] == settings["config"]["steps"]
    assert f"resumed by itself from step {resumed}" in shown

    table = (out / "table.md").read_text()
    kinds = re.findall(r"^\| \d+ \| (base|delta) \|", table, flags=re.MULTILINE)
    assert kinds[0] == "base"
    assert len(kinds) >= 4
    assert ElementTree.parse(out / "demo.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_ends_the_demo_and_its_training(tmp_path):
    demo = subprocess.Popen(
        command("demo.py", "--quick", "--out", tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        # what a shell starts in the background ignores SIGINT, and so do its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    events = tmp_path / "001" / "reference.events.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (events.exists() and events.read_text().endswith("\n")):
            assert demo.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        shown, _ = demo.communicate(timeout=180)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert "Stopped" in shown
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(events.read_text().splitlines()[0])["pid"], 0)


# --- the other scripts --------------------------------------------------------------------------------------


def run_until_killed(arguments: list[str], step: int) -> int:
    """Start a script that prints its steps, kill it after one of them; returns the step it started from."""
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        started = -1
        for line in process.stdout:
            if line.startswith("start "):
                started = int(line.split()[1])
            if line.startswith(f"step {step} "):
                process.kill()
    assert process.returncode == -signal.SIGKILL
    return started


@pytest.mark.slow
def test_plain_loop_resumes_after_a_kill(tmp_path):
    script = command(
        "plain_pytorch.py", tmp_path / "run", "--tiny", "--steps", 60, "--every", 10, "--busy", "wait"
    )
    assert run_until_killed(script, 47) == 0
    done = subprocess.run(script, capture_output=True, check=False, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 0 < int(re.search(r"^start (\d+)$", done.stdout, flags=re.MULTILINE)[1]) <= 47
    assert "validation loss" in done.stdout


def test_plain_loop_adds_at_most_ten_lines():
    lines = (EXAMPLES / "plain_pytorch.py").read_text().splitlines()
    assert 0 < sum(re.search(r"# \+(  # fmt: skip)?$", line) is not None for line in lines) <= 10


@pytest.mark.slow
def test_lightning_script_is_short_and_continues(tmp_path):
    assert len((EXAMPLES / "lightning_gpt.py").read_text().splitlines()) <= 100
    first = run("lightning_gpt.py", tmp_path / "run", "--steps", 10, "--every", 5)
    assert "step 10: validation loss" in first
    again = run("lightning_gpt.py", tmp_path / "run", "--steps", 15, "--every", 5)
    assert "step 15: validation loss" in again


@pytest.mark.slow
def test_composer_script_is_short_and_continues(tmp_path):
    pytest.importorskip("composer")
    assert len((EXAMPLES / "composer_gpt.py").read_text().splitlines()) <= 110
    first = run("composer_gpt.py", tmp_path / "run", "--steps", 10, "--every", 5)
    assert "batch 10: validation loss" in first
    again = run("composer_gpt.py", tmp_path / "run", "--steps", 15, "--every", 5)
    assert "batch 15: validation loss" in again


@pytest.mark.slow
def test_hugging_face_is_short_and_continues_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    assert len((EXAMPLES / "huggingface.py").read_text().splitlines()) <= 90
    first = run("huggingface.py", tmp_path / "run", "--steps", 10, "--every", 5)
    assert "step 10" in first
    again = run("huggingface.py", tmp_path / "run", "--steps", 15, "--every", 5)
    assert "step 15" in again
    assert not list(tmp_path.glob("hf-output/checkpoint-*"))


# --- several stores -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_demo_in_several_stores_loses_two_of_them(tmp_path):
    # as by default, a relative folder: behind a comma it is no URL by itself
    shown = run("demo.py", "--quick", "--stores", "--threads", 1, "--out", ".", cwd=tmp_path)
    told = (tmp_path / "001" / "stores.txt").read_text()
    assert told in shown
    assert "resumed by itself from step" in shown
    assert re.search(
        r"bucket-b was deleted after step \d+\. The training went on, and said:\n    store 2 ", told
    )
    assert told.count("write it again with `shrinkpoint stores --heal`") == 2  # before the kill and after it
    assert "store 2 was blank and belongs to the run now" in told
    assert "1 store may be lost now; parity 1" in told
    assert told.endswith("bucket-a was deleted: the last checkpoint was restored from the other two.\n")
    assert not (tmp_path / "001" / "run" / "bucket-a").exists()
    assert re.search(r"last checkpoint +[+-][0-9.]+ %", shown)


# --- sharded ------------------------------------------------------------------------------------------------


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "{ranks}", "{script}", "{url}")
SHARDED = {
    "sharded_fsdp2.py": (
        (*TORCHRUN, "--every", "20"),
        ("2 ranks, from step 0 to 20", "3 ranks, from step 20 to 30", "step 30: delta"),
    ),
    "sharded_dcp.py": (
        (*TORCHRUN, "--every", "10"),
        ("2 ranks, from step 0 to 20", "step 20: delta", "3 ranks, from step 20 to 30", "step 30: base"),
    ),
    "sharded_lightning.py": (
        ("{script}", "{url}", "--devices", "{ranks}"),
        ("2 ranks, to step 20: {url}#step=20", "3 ranks, to step 30: {url}#step=30"),
    ),
    "sharded_composer.py": (
        ("-m", "composer.cli.launcher", "-n", "{ranks}", "{script}", "{url}", "--every", "10"),
        ("2 ranks, to step 20: {url}#step=20", "3 ranks, to step 30: {url}#step=30"),
    ),
    "sharded_huggingface.py": (
        (*TORCHRUN, "--every", "10"),
        ("step 20: validation loss", "continuing {url} from step 20", "step 30: validation loss"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [name if name == "sharded_fsdp2.py" else pytest.param(name, marks=pytest.mark.long) for name in SHARDED],
)
def test_sharded_examples_continue_on_more_ranks(script: str, tmp_path: Path) -> None:
    pytest.importorskip("composer" if "composer" in script else "torch")
    pytest.importorskip("accelerate" if "huggingface" in script else "torch")
    arguments, shown = SHARDED[script]
    names, printed = {"script": EXAMPLES / script, "url": tmp_path / "run"}, ""
    for ranks, steps in ((2, 20), (3, 30)):
        command = [sys.executable, *(each.format(ranks=ranks, **names) for each in arguments)]
        done = subprocess.run(
            [*command, "--steps", str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            timeout=240,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout
        printed += done.stdout
    for each in shown:
        assert each.format(**names) in printed
