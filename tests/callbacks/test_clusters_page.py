"""docs/clusters.md: its recipes save a training that is ended, and start it again, with stand-ins for what a cluster has."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from shrinkpoint.saver import Saver

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^(?: {4}.*\n)+(?:\n*(?: {4}.*\n)+)*", PAGE, re.MULTILINE)

TRAINING = """
import time
from pathlib import Path
import torch
import shrinkpoint

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
advanced = shrinkpoint.Advanced(signals=["SIGUSR1"], deadline_s=60)
checkpointer = shrinkpoint.Checkpointer("run", model, optimizer, every=10**6, scheme="lossless", advanced=advanced)
first = checkpointer.resume()
with open("started", "a") as file:
    file.write(f"{first}\\n")
for step in range(first, 10**9):
    checkpointer.step(step + 1)
    time.sleep(0.01)
"""


@pytest.fixture(name="node")
def _node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a training, and in its `bin` the programs of a cluster."""
    programs = {
        "python": f'exec {sys.executable} "$@"',
        "srun": 'echo $$ > job; exec "$@"',
        "scontrol": 'echo "$@" >> requeued',
        "curl": 'case "$2" in *token) echo secret;; *) grep -q \'token: secret\' <<< "$*" && test -e notice;; esac',
        "sleep": "exec /bin/sleep 0.1",
    }
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def started(node: Path, command: list[str], times: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, cwd=node)
    while not (node / "started").exists() or len((node / "started").read_text().split()) < times:
        assert process.poll() is None
        time.sleep(0.05)
    return process


def assert_saved_and_continued(
    node: Path, command: list[str], end: Callable[[subprocess.Popen[bytes]], None], code: int
) -> None:
    for times in (1, 2):
        process = started(node, command, times)
        end(process)
        assert process.wait() == code
    second = int((node / "started").read_text().split()[1])
    newest, first = sorted(
        (manifest.step for manifest in Saver(str(node / "run")).store.manifests()), reverse=True
    )
    assert second == first > 0
    assert newest > first


def recipe(words: str) -> list[str]:
    [text] = [each for each in RECIPES if words in each]
    return ["bash", "-c", textwrap.dedent(text)]


def test_a_job_of_slurm_is_saved_and_requeued(node: Path) -> None:
    def end(process: subprocess.Popen[bytes]) -> None:
        os.kill(
            int((node / "job").read_text()), signal.SIGUSR1
        )  # the training's, as SLURM signals steps alone

    assert_saved_and_continued(node, recipe("138"), end, 0)
    assert (node / "requeued").read_text() == "requeue 7\n" * 2


def test_a_training_on_a_spot_machine_is_saved_at_the_notice(node: Path) -> None:
    def end(process: subprocess.Popen[bytes]) -> None:
        (node / "notice").touch()
        process.wait()
        (node / "notice").unlink()

    assert_saved_and_continued(node, recipe("instance-action"), end, 128 + signal.SIGTERM)


def test_a_pod_is_saved_and_restarted(node: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure"
    [container] = pod["containers"]
    assert_saved_and_continued(node, container["command"], subprocess.Popen.terminate, 128 + signal.SIGTERM)
