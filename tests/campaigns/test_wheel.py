"""Hugging Face's Trainer, accelerate and LightningCLI as new users try them: the built wheel, in an environment without this tree.

The environment has the packages of this one, but shrinkpoint from the wheel alone. Each script is in `tests/support/new_users`, is
killed with -9 once a checkpoint is there, and is started again with the same command.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wheels import built, environment, installed

ROOT = Path(__file__).parents[2]
USERS = ROOT / "tests" / "support" / "new_users"
LONGEST_S = 1500  # with the compilation of all coders, on a machine that does other things too

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", name="python")
def _python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    return installed(built(folder), folder / "venv")


def test_shrinkpoint_comes_from_the_wheel(python: Path, tmp_path: Path) -> None:
    code = """
import importlib.util, json, sys, shrinkpoint
print(json.dumps([shrinkpoint.__file__, sys.path, [importlib.util.find_spec(n) is None for n in ("core", "callbacks")]]))
"""
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, check=True, text=True
    )
    file, path, absent = json.loads(done.stdout)
    assert Path(file).is_relative_to(python.parents[1])
    assert str(ROOT) not in path
    assert not [each for each in path if "editable" in each or each.endswith("build/pkg")]
    assert absent == [True, True]
    assert (python.parent / "shrinkpoint").exists()


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Iterator[Path]:
    """Where a user works: no file of this project but the script."""
    for name in os.listdir(USERS):
        if name.endswith((".py", ".yaml")):
            shutil.copy(USERS / name, tmp_path / name)
    yield tmp_path
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (["trainer.py"], "transformers"),
        (["loop.py"], "accelerate"),
        (["cli.py", "fit", "--config", "cli.yaml"], "jsonargparse"),
    ],
    ids=["Trainer", "accelerate", "LightningCLI"],
)
def test_a_killed_script_continues_when_it_is_started_again(
    python: Path, folder: Path, command: list[str], needs: str
) -> None:
    pytest.importorskip(needs)
    killed = start(python, folder, command)
    wait_for_commit(killed, folder)
    killed.kill()
    first = steps(killed.communicate(timeout=60)[0])
    again = start(python, folder, command)
    output, errors = again.communicate(timeout=LONGEST_S)
    assert again.returncode == 0, errors[-4000:]
    second = steps(output)
    assert first[0] == 1
    assert second[0] > 1, errors[-4000:]
    assert (second[0] - 1) % 10 == 0
    assert second == list(range(second[0], 41))
    assert output.splitlines()[-1] == "done 40"
    assert "Traceback" not in errors
    listed = subprocess.run(
        [python.parent / "shrinkpoint", "ls", "run", "--json"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        check=True,
        text=True,
    )
    assert max(each["step"] for each in json.loads(listed.stdout)["checkpoints"]) == 40


def start(python: Path, folder: Path, command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [python, *command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_commit(process: "subprocess.Popen[str]", folder: Path) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not list((folder / "run" / "commits").glob("*.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps(output: str) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")]
