"""Two or three processes on a CPU, with DDP and FSDP2, interrupted and continued."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("composer")

from support.composer_distributed import OF_THREE, SCENARIOS, Scenario
from support.composer_models import Outcome, assert_continues, assert_same

PROGRAM = Path(__file__).parents[1] / "support" / "composer_distributed.py"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_processes(folder: Path, *names: str, count: int = 2, program: Path = PROGRAM) -> None:
    """Play scenarios in `count` processes; a process that fails ends the others."""
    shared = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "NODE_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "FSDP_VERSION": 2,
        "OMP_NUM_THREADS": 1,
    }
    processes, logs = [], []
    for rank in range(count):
        own = {"RANK": rank, "LOCAL_RANK": rank}
        logs.append(folder / f"log-{rank}.txt")
        with logs[-1].open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(program), str(folder), *names],
                    env=os.environ | {key: str(value) for key, value in (shared | own).items()},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout=250) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * count, "\n".join(log.read_text()[-5000:] for log in logs)


@pytest.fixture(scope="module", name="outcomes")
def _outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Outcome]]]:
    """What each process has seen of each scenario: all are played in one go, for importing Composer takes seconds."""
    folder = tmp_path_factory.mktemp("distributed")
    run_processes(folder, *SCENARIOS)
    return {name: [seen(folder, name, rank) for rank in range(2)] for name in SCENARIOS}


def seen(folder: Path, name: str, rank: int) -> Any:
    return torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


def assert_continues_or_differs(scenario: Scenario, one: dict[str, Outcome]) -> None:
    """Bit by bit, but from lossy checkpoints that the undisturbed run has not taken over."""
    if not scenario.lossy:
        assert_continues(one["whole"], one["rest"])
        return
    with pytest.raises(AssertionError):
        assert_same(one["whole"].final["model"], one["rest"].final["model"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_continue_bit_by_bit(name: str, outcomes: Any) -> None:
    first, second = outcomes[name]
    for one in (first, second):
        assert one["rest"].trace[0][2] == SCENARIOS[name].resumes_at
        assert_continues_or_differs(SCENARIOS[name], one)
    assert first["rest"].trace[0][2] == second["rest"].trace[0][2]
    assert first["whole"].trace != second["whole"].trace
    assert first["whole"].final["model"]


@pytest.mark.slow
def test_the_first_process_tries_steps_and_leaves_no_trace(tmp_path: Path) -> None:
    run_processes(tmp_path, program=PROGRAM.with_name("composer_ddp_probe.py"))
    for rank in range(2):
        one = seen(tmp_path, "probed", rank)
        assert one["plain"].trace == one["probed"].trace
        assert_same(one["plain"].final, one["probed"].final)
        assert not any("cannot be taken" in told for told in one["told"])
        assert rank > 0 or ["2", "4"] in one["resumed"]


@pytest.mark.slow
@pytest.mark.long
def test_three_processes_continue_bit_by_bit(tmp_path: Path) -> None:
    run_processes(tmp_path, *OF_THREE, count=3)
    for name, scenario in OF_THREE.items():
        for rank in range(3):
            one = seen(tmp_path, name, rank)
            resumed_at = one["rest"].trace[0][2]
            if scenario.logs:  # the first process alone has logged the gradients
                assert scenario.resumes_at < resumed_at <= scenario.batch
            else:
                assert resumed_at == scenario.resumes_at
            assert_continues_or_differs(scenario, one)
            if not scenario.control:
                continue
            with pytest.raises(AssertionError):  # the gradients are summed in the order of a fresh DDP
                assert_same(one["whole"].final["model"], one["control"].final["model"])
