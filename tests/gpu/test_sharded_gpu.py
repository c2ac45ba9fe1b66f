"""Sharded trainings on one GPU: saved, and continued by other processes, on the GPU and on a mesh of CPUs.

Every launch has a time limit.
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.sharded import launch

from gpu.device import DEVICE, ON_GPU
from gpu.ranks import EVERY, dcp_loads, dcp_saves, part

LIMIT_S = 100.0
NCCL, BOTH, GLOO = (
    ("nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo") if ON_GPU else ("gloo", "gloo", "gloo")
)
UNTIL = 4

LOSSLESS = {"scheme": "lossless"}
ON_HOST = {"backend": "gloo", "device": "cpu"}
number = itertools.count()


def ranks(program: Callable[..., Any], world: int, folder: Path, url: str, *arguments: Any) -> Any:
    """The first rank's answer."""
    meeting = str(folder / f"group-{next(number)}")
    return launch(program, world, folder, meeting, url, *arguments, limit_s=LIMIT_S)[0]


def on_device(backend: str | None, **more: Any) -> dict[str, Any]:
    return {"backend": backend, "device": DEVICE, **more}


def assert_continues(whole: dict[str, Any], rest: dict[str, Any]) -> None:
    """A process that has trained on, and one that was started again."""
    assert rest["began"] == UNTIL
    for key in ("losses", "end", "devices"):
        assert rest[key] == whole[key], key
    assert rest["restored"] == whole["saved"]
    assert rest["devices_then"] == whole["devices"]


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A lossless run of one rank."""
    folder = tmp_path_factory.mktemp("made")
    return folder / "run", ranks(part, 1, folder, str(folder / "run"), on_device(BOTH), LOSSLESS, UNTIL)


def test_lossless_with_both_backends(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, whole = made
    assert [(step, kind) for step, kind, *_ in whole["reports"]] == [(2, "base"), (4, "delta")]
    assert whole["devices"]["emb.weight.exp_avg"] == whole["devices"]["count"] == DEVICE
    assert whole["devices"]["emb.weight.step"] == "cpu"
    shutil.copytree(run, tmp_path / "run")
    assert_continues(whole, ranks(part, 1, tmp_path, str(tmp_path / "run"), on_device(BOTH), LOSSLESS, UNTIL))


@pytest.mark.parametrize(
    ("how", "options"),
    [
        (on_device(NCCL, fused=True), LOSSLESS),
        (on_device(None), LOSSLESS),
        (on_device(BOTH, offload=True), LOSSLESS),
        (on_device(NCCL, fused=True), {"adopt": 8}),
    ],
    ids=["fused", "default backend", "offloaded", "adopting"],
)
def test_continues(how: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    whole = ranks(part, 1, tmp_path, url, how, options, UNTIL)
    place = "cpu" if how.get("offload") else DEVICE
    assert whole["devices"]["emb.weight"] == whole["devices"]["emb.weight.exp_avg"] == place
    assert whole["devices"]["emb.weight.step"] == (place if how.get("fused") else "cpu")
    assert_continues(whole, ranks(part, 1, tmp_path, url, how, options, UNTIL))


def test_on_a_mesh_of_cpus_and_back(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, whole = made
    shutil.copytree(run, tmp_path / "run")
    url = str(tmp_path / "run")
    there = ranks(part, 1, tmp_path, url, ON_HOST, LOSSLESS, UNTIL + EVERY)
    assert there["began"] == UNTIL
    assert there["restored"] == whole["saved"]
    assert set(there["devices"].values()) == {"cpu"}
    back = ranks(part, 1, tmp_path, url, on_device(BOTH), LOSSLESS, UNTIL + EVERY)
    assert back["began"] == UNTIL + EVERY
    assert back["restored"] == there["saved"]
    assert back["devices"] == whole["devices"]


def test_the_pair_for_torchs_own_checkpoints(tmp_path: Path) -> None:
    url, how = str(tmp_path / "run"), on_device(BOTH)
    true, places, reports = ranks(dcp_saves, 1, tmp_path, url, how)
    assert reports == [(1, "base"), (2, "delta"), (3, "delta")]
    assert ranks(dcp_loads, 1, tmp_path, url, how) == [(wanted, places) for wanted in true]
