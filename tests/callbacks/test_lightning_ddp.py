"""Two or three processes on a CPU, interrupted and continued."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_models import assert_same

from shrinkpoint.store.run import RunStore

PROGRAM = Path(__file__).parents[1] / "support" / "lightning_ddp.py"


def run(folder: Path, *arguments: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LOCAL_", "MASTER"))
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def result(folder: Path, name: str, rank: int) -> Any:
    return torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_with_stateful_loaders_continue_bit_by_bit(tmp_path: Path) -> None:
    run(tmp_path, "stateful")
    step = result(tmp_path, "rest", 0)["trace"][0][2]
    assert step in (3, 6)  # the launcher may kill the save of step 6
    for rank in (0, 1):
        whole, rest = result(tmp_path, "whole", rank), result(tmp_path, "rest", rank)
        assert whole["trace"][step:] == rest["trace"]
        assert_same(whole["final"], rest["final"])
        assert rest["best"] == f"{tmp_path}/run#step=12"
    assert result(tmp_path, "whole", 0)["trace"] != result(tmp_path, "whole", 1)["trace"]


def test_three_processes_continue_bit_by_bit(tmp_path: Path) -> None:
    run(tmp_path, "plain", "error", "3")
    step = result(tmp_path, "rest", 0)["trace"][0][2]
    assert step in (3, 6)
    for rank in range(3):
        whole, rest, control = (result(tmp_path, name, rank) for name in ("whole", "rest", "control"))
        assert whole["trace"][step:] == rest["trace"]
        assert_same(whole["final"], rest["final"])
        # The same batches, whose gradients are summed in the order of a fresh DDP.
        assert [row[:4] for row in control["trace"]] == [row[:4] for row in rest["trace"]]
        with pytest.raises(AssertionError):
            assert_same(whole["final"]["weights"], control["final"]["weights"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_processes_that_adopt_continue_bit_by_bit(tmp_path: Path) -> None:
    """All of them take over what the first one has stored; without adoption the continued run is another one."""
    for how in ("adopt", "no-adopt"):
        (tmp_path / how).mkdir()
        run(tmp_path / how, "plain", how, "3")
        step = result(tmp_path / how, "rest", 0)["trace"][0][2]
        assert step in (3, 6)
        weights = [result(tmp_path / how, "whole", rank)["final"]["weights"] for rank in range(3)]
        for other in weights[1:]:
            assert_same(weights[0], other)
        for rank in range(3):
            whole, rest = (result(tmp_path / how, name, rank) for name in ("whole", "rest"))
            if how == "adopt":
                assert whole["trace"][step:] == rest["trace"]
                assert_same(whole["final"], rest["final"])
            else:
                with pytest.raises(AssertionError):
                    assert_same(whole["final"]["weights"], rest["final"]["weights"])
    manifests = [manifest.meta["adoption"] for manifest in RunStore(f"{tmp_path}/adopt/run").manifests()]
    assert any(one["planned"] for one in manifests)


@pytest.mark.slow
def test_three_processes_continue_bit_by_bit_from_a_step_log(tmp_path: Path) -> None:
    """The first process logs the gradients, and each one's remainder; all continue from the newest segment."""
    run(tmp_path, "plain", "log", "3")
    step = result(tmp_path, "rest", 0)["trace"][0][2]
    assert step in (7, 8)  # the checkpoints are of steps 3 and 6; the launcher may kill the writer
    for rank in range(3):
        whole, rest = result(tmp_path, "whole", rank), result(tmp_path, "rest", rank)
        assert whole["trace"][step:] == rest["trace"]
        assert_same(whole["final"], rest["final"])
    assert len({str(result(tmp_path, "whole", rank)["trace"]) for rank in range(3)}) == 3


def gradient_bits(folder: Path) -> float:
    """Bits per element and step of the gradients in a log; nothing else of its segments."""
    bits = elements = 0
    for path in folder.rglob("*.steps"):
        data = path.read_bytes()
        head = json.loads(data[80 : 80 + int.from_bytes(data[16:24], "little")])
        sizes = [8 * getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in head["tensors"]]
        for event in (event for record in head["records"] for event in record["events"]):
            for gradient in event["gradients"]:
                parts = [gradient] if isinstance(gradient, int) else [gradient["gaps"], gradient["values"]]
                bits += sum(sizes[part] for part in parts)
                elements += math.prod(
                    head["tensors"][gradient][1] if isinstance(gradient, int) else gradient["shape"]
                )
    return bits / elements


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook", ["feedback", *(pytest.param(hook, marks=pytest.mark.long) for hook in ("top", "PowerSGD"))]
)
def test_three_processes_that_compress_their_gradients(hook: str, tmp_path: Path) -> None:
    """What a hook feeds back is each process's own, and continued too; left out, the run is another one."""
    run(tmp_path, "plain", "log", "3", hook)
    step = result(tmp_path, "rest", 0)["trace"][0][2]
    assert step in (7, 8)  # the checkpoints are of steps 3 and 6
    for rank in range(3):
        whole, rest, control = (result(tmp_path, name, rank) for name in ("whole", "rest", "control"))
        assert whole["trace"][step:] == rest["trace"]
        assert_same(whole["final"], rest["final"])
        assert control["trace"][0][2] in (3, 6)  # from the checkpoint, without the log
        if hook == "top":
            assert_same(whole["final"], control["final"])
        else:
            with pytest.raises(AssertionError):
                assert_same(whole["final"]["weights"], control["final"]["weights"])
    bits = gradient_bits(tmp_path / "log")
    print(f"{hook}: {bits:.2f} bits per element and step")
    assert bits < (2 if hook != "PowerSGD" else 33)


@pytest.mark.slow
def test_a_hook_whose_state_cannot_be_found_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"hidden.*top_with_hidden_feedback keeps a state of its own"):
        run(tmp_path, "plain", "log", "2", "hidden")
