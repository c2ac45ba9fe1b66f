"""`shrinkpoint diff`: two checkpoints of runs and files, tensor by tensor."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import made_run, run, run_json

import shrinkpoint
from shrinkpoint.cli.output import bytes_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(made_run(tmp_path_factory, scheme="lossless"))


def file(path: Path, state: dict[str, Any]) -> str:
    shrinkpoint.save(state, path)
    return str(path)


def test_two_checkpoints_of_a_run(made: str) -> None:
    report = run_json("diff", f"{made}#step=10", f"{made}#step=50")
    assert (report["a"]["step"], report["b"]["step"]) == (10, 50)
    assert (report["a"]["kind"], report["b"]["kind"]) == ("base", "delta")
    assert report["b"]["metrics"]["val_loss"] == 1.0
    assert report["a"]["bytes"] > report["b"]["bytes"] > 0
    tensors = {row["name"]: row for row in report["tensors"]}
    weight = tensors["state_dict/embedding.weight"]
    assert weight["state"] == "differs"
    true = [
        shrinkpoint.Saver(made).restore(step).state.tensors["state_dict/embedding.weight"].double()
        for step in (10, 50)
    ]
    relative = float((true[1] - true[0]).square().mean().sqrt() / true[0].square().mean().sqrt())
    assert weight["relative"] == pytest.approx(relative)
    assert weight["a"]["bytes"] > 0
    assert {"name": "global_step", "a": 10, "b": 50} in report["data"]
    text = run("diff", f"{made}#step=10", f"{made}#step=50").stdout
    for words in (
        "state_dict/embedding.weight",
        "% of the rms",
        "96x32",
        "global_step: 10 in A, 50 in B",
        "loss",
    ):
        assert words in text
    assert bytes_text(report["a"]["bytes"]) in text


def test_the_same_checkpoint(made: str) -> None:
    report = run_json("diff", f"{made}#step=30", f"{made}#step=30")
    assert {row["state"] for row in report["tensors"]} == {"bit-identical"}
    assert report["data"] == []
    count = len(report["tensors"])
    text = run("diff", f"{made}#step=30", f"{made}#step=30").stdout
    assert f"{count} of {count} tensors are bit-identical" in text
    assert "embedding.weight" not in text
    assert "embedding.weight" in run("diff", f"{made}#step=30", f"{made}#step=30", "--all").stdout


def test_files_with_other_tensors(tmp_path: Path) -> None:
    a = file(
        tmp_path / "a.shrink",
        {
            "same": torch.ones(3),
            "gone": torch.ones(2),
            "wide": torch.ones(4),
            "half": torch.ones(4),
            "zero": torch.zeros(4),
            "nan": torch.ones(2),
            "count": torch.tensor(3),
            "complex": torch.tensor([3 + 4j]),
            "lr": 0.1,
        },
    )
    b = file(
        tmp_path / "b.shrink",
        {
            "same": torch.ones(3),
            "new": torch.ones(2),
            "wide": torch.ones(5),
            "half": torch.ones(4).half(),
            "zero": torch.full((4,), 2.0),
            "nan": torch.tensor([1.0, math.nan]),
            "count": torch.tensor(6),
            "complex": torch.tensor([3 + 9j]),
            "lr": 0.2,
            "group": {"decay": 3},
        },
    )
    report = run_json("diff", a, b)
    rows = {row["name"]: row for row in report["tensors"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "same": "bit-identical",
        "gone": "only in A",
        "new": "only in B",
        "wide": "other dtype or shape",
        "half": "other dtype or shape",
        "zero": "differs",
        "nan": "differs",
        "count": "differs",
        "complex": "differs",
    }
    assert (rows["zero"]["rms"], rows["zero"]["relative"]) == (2.0, None)
    assert rows["nan"]["rms"] is None
    assert rows["count"]["relative"] == 1.0
    assert rows["complex"]["relative"] == pytest.approx(1.0)
    assert rows["new"]["a"] is None
    assert report["data"] == [
        {"name": "lr", "a": 0.1, "b": 0.2},
        {"name": "group/decay", "a": None, "b": 3},
    ]
    text = run("diff", a, b).stdout
    for words in (
        "only in A",
        "only in B",
        "float32 / float16",
        "4 / 5",
        "from zeros",
        "NaN or infinity",
        "lr: 0.1",
    ):
        assert words in text


def test_what_is_not_there_is_an_error(made: str, tmp_path: Path) -> None:
    run("diff", made, str(tmp_path / "nothing"), code=1)
    run("diff", made, f"{made}#step=11", code=1)
