"""Which checkpoints stay, and which is the best: as the Trainer's own arguments say, beside its own checkpoints."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.options import grouped

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.transformers_models import Setup, train
from transformers import Trainer
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ShrinkpointWarning

SCORES = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 9.0, 12: 8.0}


class Scored(Trainer):  # type: ignore[misc]
    """Its evaluations follow a script by step."""

    last: "Scored"

    def __init__(self, **more: Any) -> None:
        Scored.last = self
        super().__init__(compute_metrics=lambda _: {"score": SCORES[self.state.global_step]}, **more)


def fitted(folder: Path, *callbacks: Any, resume: Any = None, **arguments: Any) -> Scored:
    given = {"max_steps": 12, "save_steps": 2, "eval_steps": 2, **arguments}
    setup = Setup(masking=False, arguments=tuple(given.items()))
    train(setup, str(folder), *callbacks, trainer_class=Scored, resume=resume)
    return Scored.last


def saving(url: str, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        url, **grouped(**{"scheme": "lossless", "busy": "wait", "grace_s": 0, **options})
    )


def listed(url: str | Path) -> list[dict[str, Any]]:
    found = CliRunner().invoke(app, ["ls", str(url), "--json"])
    assert found.exit_code == 0, found.output
    rows: list[dict[str, Any]] = json.loads(found.stdout)["checkpoints"]
    return rows


def step_of(path: str | None) -> int | None:
    return None if path is None else int(path.replace("=", "-").rpartition("-")[2])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"save_total_limit": 2},
        {"metric_for_best_model": "score"},
        {"metric_for_best_model": "score", "greater_is_better": False, "save_total_limit": 1},
        {"metric_for_best_model": "score", "greater_is_better": False, "save_total_limit": 2},
        {"metric_for_best_model": "score", "greater_is_better": True, "save_total_limit": 3},
        {"metric_for_best_model": "score", "greater_is_better": False, "save_steps": 4},
        {
            "metric_for_best_model": "score",
            "greater_is_better": False,
            "save_total_limit": 2,
            "load_best_model_at_end": True,
        },
    ],
    ids=str,
)
def test_the_trainers_arguments_mean_what_they_mean_there(tmp_path: Path, arguments: dict[str, Any]) -> None:
    theirs = fitted(tmp_path / "theirs", **arguments)
    url = f"memory://transformers-best/{uuid.uuid4()}"
    callback = saving(url)
    ours = fitted(tmp_path / "ours", callback, **arguments)
    folders = sorted(
        int(folder.name.rpartition("-")[2]) for folder in (tmp_path / "theirs").glob("checkpoint-*")
    )
    limit = arguments.get("save_total_limit")
    ends = (
        {12} if limit == 1 else set()
    )  # the Trainer removes it once it has ended: no longer training could go on
    assert {row["step"] for row in listed(url)} == {*folders, *ends}
    best = step_of(theirs.state.best_model_checkpoint)
    assert step_of(ours.state.best_model_checkpoint) == best
    assert ours.state.best_metric == theirs.state.best_metric
    if best is not None:
        assert step_of(callback.best_model_path) == best
        assert shrinkpoint.load(f"{url}#best")["trainer"]["global_step"] == best


def test_the_callbacks_own_options_win(tmp_path: Path) -> None:
    url = f"memory://transformers-best/{uuid.uuid4()}"
    fitted(tmp_path, saving(url, monitor="score", mode="max", save_top_k=2, keep_last=1), save_total_limit=5)
    assert sorted(row["step"] for row in listed(url)) == [10, 12]


def test_the_model_alone_is_saved_where_the_trainer_asks_for_it(tmp_path: Path) -> None:
    url = f"memory://transformers-best/{uuid.uuid4()}"
    fitted(tmp_path, saving(url), save_only_model=True)
    assert all(row["weights_only"] for row in listed(url))


def test_the_best_is_known_again_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path / "run"
    arguments = {"metric_for_best_model": "score", "greater_is_better": False, "save_total_limit": 2}
    fitted(tmp_path / "out", saving(str(url)), **{**arguments, "max_steps": 8})
    capsys.readouterr()
    trainer = fitted(tmp_path / "out", saving(str(url)), **arguments)
    assert f"continuing {url} from step 8" in capsys.readouterr().err
    assert trainer.state.best_model_checkpoint == f"{url}#step=4"
    assert sorted(row["step"] for row in listed(url)) == [4, 12]
    callback = saving(str(url))
    with pytest.warns(ShrinkpointWarning, match="is complete: it ended at step 12"):
        fitted(tmp_path / "out", callback, **arguments)
    assert (step_of(callback.last_model_path), step_of(callback.best_model_path)) == (12, 4)


@pytest.mark.parametrize("monitor", ["step", "epoch"])
def test_steps_and_epochs_are_known(tmp_path: Path, monitor: str) -> None:
    url = f"memory://transformers-best/{uuid.uuid4()}"
    fitted(tmp_path, saving(url, monitor=monitor, mode="min", keep_last=1), eval_strategy="no")
    assert sorted(row["step"] for row in listed(url)) == [2, 12]


def test_the_best_is_an_address_of_a_resume(tmp_path: Path) -> None:
    url = f"memory://transformers-best/{uuid.uuid4()}"
    options = {"monitor": "score", "save_top_k": -1}
    fitted(tmp_path, saving(url, **options))
    trainer = fitted(tmp_path, saving(url, **options), resume=f"{url}#best")
    assert trainer.state.log_history[2]["step"] <= 4
    assert len([row for row in listed(url) if row["step"] == 6]) == 2
