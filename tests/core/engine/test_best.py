"""Which checkpoint of a loop of one's own is the best: how it is kept, and addressed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import NoCheckpointError


def trained(
    url: Path, losses: dict[int, float], total: int, resume: bool = True, **options: Any
) -> shrinkpoint.Checkpointer:
    """A loop that validates at some steps only, and gives what it knows then."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"scheme": "lossless", "busy": "wait", "grace_s": 0, "monitor": "val_loss", **options}
    checkpointer = shrinkpoint.Checkpointer(str(url), model, optimizer, **grouped(**given))
    for step in range(checkpointer.resume() if resume else 0, total):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        metrics = {"val_loss": losses[step + 1]} if step + 1 in losses else None
        checkpointer.step(step + 1, metrics=metrics)
        checkpointer.flush()
    checkpointer.close()
    return checkpointer


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_the_best_stays_and_is_an_address_everywhere(tmp_path: Path) -> None:
    url = tmp_path / "run"
    trained(url, {4: 3.0, 8: 1.0, 12: 1.0, 16: 2.0}, 18, every=2, save_top_k=1, keep_last=1)
    best = f"{url}#best"
    assert sorted(row["step"] for row in run("ls", str(url))["checkpoints"]) == [8, 18]
    assert run("show", best)["checkpoint"]["step"] == 8  # of equals, the older
    assert run("diff", best, f"{url}#newest")["a"]["step"] == 8
    assert run("export", best, str(tmp_path / "best.safetensors"))["step"] == 8
    assert run("export", best, str(tmp_path / "best.ckpt"))["step"] == 8
    assert run("verify", best)["sound"] == 1
    assert shrinkpoint.load(best)["step"] == 8
    weights = shrinkpoint.load_weights(best)
    assert torch.equal(weights["weight"], shrinkpoint.load_weights(f"{url}#step=8")["weight"])


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
@pytest.mark.parametrize(("mode", "best"), [("min", 10), ("max", 5)])
def test_a_metric_between_two_saves_is_saved(tmp_path: Path, mode: str, best: int) -> None:
    """Where steps that are due and steps with a metric never meet, nothing could be the best."""
    done = trained(tmp_path / "run", {5: 3.0, 10: 1.0}, 12, every=3, mode=mode, save_top_k=-1)
    assert [report.step for report in done.reports()] == [3, 5, 6, 9, 10, 12]
    assert shrinkpoint.load(f"{tmp_path / 'run'}#best")["step"] == best


def test_the_best_of_another_training_in_the_run_is_not_meant(tmp_path: Path) -> None:
    trained(tmp_path / "run", {2: 1.0}, 2, every=2)
    with pytest.warns(shrinkpoint.ShrinkpointWarning, match="does not continue"):
        trained(tmp_path / "run", {2: 5.0, 4: 6.0}, 4, resume=False, every=2)
    assert run("show", f"{tmp_path / 'run'}#best")["checkpoint"]["metrics"] == {"val_loss": 5.0}


def test_the_step_is_always_known(tmp_path: Path) -> None:
    trained(tmp_path / "run", {}, 4, every=1, monitor="step", mode="max")
    assert shrinkpoint.load(f"{tmp_path / 'run'}#best")["step"] == 4


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_where_the_metric_was_never_given_the_best_is_not_known(tmp_path: Path) -> None:
    trained(tmp_path / "run", {}, 2, every=2)
    with pytest.raises(NoCheckpointError, match=r"#best: none of its 1 .* with the metric 'val_loss'"):
        shrinkpoint.load_weights(f"{tmp_path / 'run'}#best")


def test_all_are_kept_unless_something_is_said(tmp_path: Path) -> None:
    done = trained(tmp_path / "run", {}, 6, every=1, monitor=None)
    assert len(done.reports()) == 6
    for step in range(1, 7):
        assert shrinkpoint.load(f"{tmp_path / 'run'}#step={step}")["step"] == step
