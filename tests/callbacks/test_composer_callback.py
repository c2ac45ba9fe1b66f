"""What Composer's callback does from its first save to its last: when it saves, what it keeps and logs, and that it serves again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from shrinkpoint.config import Advanced

pytest.importorskip("composer")

from composer import Time
from composer.core import Event, State
from composer.loggers import InMemoryLogger
from support.composer_callbacks import WHOLE, At, Make, first, steps, url_of
from support.composer_models import Crash, Setup, assert_same, fit
from typer.testing import CliRunner

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.cli.app import app

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def by_predicate(state: State, event: Event) -> bool:
    return event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) in (4, 9)


@pytest.mark.parametrize(
    ("interval", "options", "expected"),
    [
        ("5ba", {}, [5, 10, 15, 20, 25, 30, 32]),
        ("1ep", {}, [8, 16, 24, 32]),
        (2, {}, [16, 32]),
        (Time.from_batch(20), {}, [20, 32]),
        ("0.25dur", {}, [8, 16, 24, 32]),
        ("80sp", {}, [10, 20, 30, 32]),
        ("0.48k tok", {}, [20, 32]),
        (by_predicate, {}, [4, 9, 32]),
        (lambda *_: True, {}, list(range(1, 33))),
    ],
)
def test_saves_by_every_kind_of_interval(
    saving: Make, interval: Any, options: dict[str, Any], expected: list[int]
) -> None:
    callback = saving(save_interval=interval, save_top_k=-1, **options)
    fit(callback)
    assert steps(callback) == expected
    assert callback.last_model_path == callback.best_model_path == f"{url_of(callback)}#step={expected[-1]}"


@pytest.mark.parametrize("monitor", ["Accuracy", "metrics/eval/Accuracy"])
def test_keeps_the_newest_and_the_best(saving: Make, monitor: str) -> None:
    callback = saving(save_interval="1ep", monitor=monitor, mode="max", keep_last=1)
    outcome = fit(callback, setup=Setup(eval_interval="1ep"))
    accuracy = dict(outcome.evaluations)
    best = max(accuracy, key=accuracy.__getitem__)  # of equals, the oldest
    assert callback.best_model_path == f"{url_of(callback)}#step={best}"
    assert callback.last_model_path == f"{url_of(callback)}#step={WHOLE}"
    assert set(steps(callback)) == {best, WHOLE}


def test_loggers_get_the_saves_and_keep_their_own(saving: Make) -> None:
    def logged(*callbacks: Any) -> dict[str, Any]:
        logger = InMemoryLogger()
        fit(*callbacks, loggers=[logger])
        return {
            name: [(int(time.batch), float(value)) for time, value in values]
            for name, values in logger.data.items()
        }

    without, rows = logged(), logged(saving())
    ours = {name: rows.pop(name) for name in list(rows) if name.startswith("checkpoint/")}
    assert rows == without
    assert [value for _, value in ours["checkpoint/step"]] == [5, 10, 15, 20, 25, 30, 32]
    # Some loggers drop what comes for an earlier batch than they have seen.
    assert all(batch >= saved for batch, saved in ours["checkpoint/step"])
    assert {"checkpoint/ratio", "checkpoint/bytes", "checkpoint/blocked_s"} <= ours.keys()


def test_the_run_keeps_its_own_name(saving: Make) -> None:
    fit(saving(), Crash(6), run_name="one")
    names: list[str] = []
    fit(saving(), At(Event.FIT_START, lambda state: names.append(state.run_name)), run_name="two")
    assert names == ["two"]


def test_a_callback_serves_one_trainer_after_another(saving: Make) -> None:
    callback = saving(resume="never", save_interval="1ep")
    fit(callback)
    assert callback.last_model_path.endswith(f"#step={WHOLE}")
    path = callback.last_model_path
    fit(callback, setup=Setup(duration="1ep"))
    assert callback.last_model_path == path.replace("step=32", "step=8")
    fit(callback, Crash(20))
    assert first(fit(saving())) == 16


def test_an_interrupted_callback_serves_again(saving: Make) -> None:
    callback = saving()
    fit(callback, Crash(7, sigterm=True))
    outcome = fit(callback)
    assert first(outcome) == 7
    assert outcome.finished


def test_it_can_be_copied_before_it_is_used(saving: Make) -> None:
    callback = copy.deepcopy(saving())
    fit(callback, Crash(6))
    assert steps(callback) == [5]


def test_nothing_of_the_training_is_kept_after_close(saving: Make) -> None:
    callback = saving(scheme="inshrinkerator", save_interval="4ba")
    fit(callback)
    run = callback._session.run
    assert run.probe.kept.batches == []
    assert run._gradients.take([]) is None
    assert run._saver is None


def test_two_callbacks_on_two_runs(saving: Make) -> None:
    def other() -> CompressedCheckpoint:
        return CompressedCheckpoint(
            "memory://composer/two-b", save_interval="1ep", scheme="lossless", advanced=Advanced(busy="wait")
        )

    fit(saving(), other(), Crash(13))
    assert steps(saving()) == [5, 10]
    assert steps(other()) == [8]
    assert first(fit(saving(), other(), Crash(14))) in (8, 10)


def test_the_command_line_reads_a_run(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    outcome = fit(
        CompressedCheckpoint(run, save_interval="1ep", scheme="lossless", advanced=Advanced(busy="wait"))
    )
    cli = CliRunner()
    listed = cli.invoke(app, ["ls", run])
    assert listed.exit_code == 0
    assert "32" in listed.output
    assert cli.invoke(app, ["verify", run]).exit_code == 0
    exported = cli.invoke(app, ["export", f"{run}#step=32", str(tmp_path / "out.pt")])
    assert exported.exit_code == 0, exported.output
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(dict(loaded["state"]["model"]), outcome.final["model"])
    assert cli.invoke(app, ["export", run, str(tmp_path / "out.safetensors")]).exit_code == 0
