"""What Composer's callback continues beside exact resumption: finished runs, Composer's own checkpoints, several calls of fit."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

from composer.core import Event, State
from support.composer_callbacks import WHOLE, At, Make, first, steps, url_of
from support.composer_models import Crash, Setup, assert_same, build, fit
from support.reports import saver_of

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.io.export import export
from shrinkpoint.saver import Saver


@pytest.mark.parametrize(("duration", "longer", "interval"), [("4ep", "5ep", "1ep"), ("32ba", "36ba", "5ba")])
def test_a_finished_run_has_nothing_left_to_train(
    saving: Make, duration: str, longer: str, interval: str
) -> None:
    fit(saving(save_interval=interval), setup=Setup(duration=duration))
    before = steps(saving())
    with (
        pytest.warns(ShrinkpointWarning, match=r"is complete: it ended at step \d+\. Raise max_duration"),
        pytest.raises(ValueError, match="No training would occur"),
    ):
        fit(saving(save_interval=interval), setup=Setup(duration=duration))
    assert steps(saving()) == before
    assert first(fit(saving(save_interval=interval), setup=Setup(duration=longer))) == WHOLE


def test_a_finished_run_whose_last_save_came_before_the_epoch_was_closed_ends_again(saving: Make) -> None:
    one = fit(saving(save_interval="8ba"))
    two = fit(saving(save_interval="8ba"))
    assert two.trace == []
    assert_same(one.final["model"], two.final["model"])


def test_a_load_path_wins(saving: Make, tmp_path: Path) -> None:
    native = {"save_folder": str(tmp_path), "save_interval": "3ba", "save_filename": "ba{batch}.pt"}
    with pytest.warns(ShrinkpointWarning, match="save_folder makes Composer write"):
        fit(saving(), Crash(12), **native)
    older = str(tmp_path / "ba6.pt")
    with pytest.warns(
        ShrinkpointWarning,
        match=r"ba6.pt' \(or autoresume\) takes precedence: memory://.*, which has step 10",
    ):
        again = fit(saving(save_interval="7ba"), Crash(8), load_path=older)
    assert first(again) == 6
    assert first(fit(saving(), Crash(9))) == 7  # what was saved last, although it is an earlier batch


def test_composer_trains_on_from_an_export(saving: Make, tmp_path: Path) -> None:
    """From the same batch as from its own checkpoint; durations begin again, for a file that loads safely has none."""
    callback = saving(save_interval="3ba")
    native = {"save_folder": str(tmp_path), "save_interval": "3ba", "save_filename": "ba{batch}.pt"}
    with pytest.warns(ShrinkpointWarning, match="save_folder makes Composer write"):
        fit(callback, **native)
    export(Saver(url_of(callback)).restore(9).state, tmp_path / "export.pt")
    own, ours = (fit(load_path=str(tmp_path / name)) for name in ("ba9.pt", "export.pt"))
    assert first(ours) == first(own) == 9
    assert len(ours.trace) == len(own.trace) == WHOLE - 9


def test_a_load_path_of_weights_is_where_the_run_began(saving: Make, tmp_path: Path) -> None:
    fit(Crash(4), save_folder=str(tmp_path), save_interval="3ba", save_filename="ba{batch}.pt")
    weights = {"load_path": str(tmp_path / "ba3.pt"), "load_weights_only": True}
    assert first(fit(saving(), Crash(7), **weights)) == 0
    assert first(fit(saving(), Crash(8), **weights)) == 5


@pytest.mark.parametrize("how", ["autoresume", "load_path"])
def test_restarts_from_composers_own_checkpoints_are_one_training(
    saving: Make, tmp_path: Path, how: str
) -> None:
    """Its `keep_last` counts them all; another training's checkpoints stay."""
    fit(saving(save_interval="2ba", resume="never"), Crash(5))
    others = steps(saving())
    native = {
        "save_folder": str(tmp_path),
        "save_interval": "3ba",
        "run_name": "restarted",
        "save_num_checkpoints_to_keep": 1,
    }
    more: dict[str, Any] = {"autoresume": True} if how == "autoresume" else {}
    for batch in (8, 13, 18, 23):
        fit(saving(save_interval="2ba", keep_last=2, resume="never"), Crash(batch), **native, **more)
        if how == "load_path":
            more = {"load_path": str(tmp_path / "latest-rank0.pt")}
    own = steps(saving())
    for step in others:
        own.remove(step)
    assert own == [20, 22]


def test_a_save_folder_beside_it(saving: Make, tmp_path: Path) -> None:
    with pytest.warns(ShrinkpointWarning, match="of its own too"):
        fit(saving(), save_folder=str(tmp_path), save_interval="1ep")
    assert list(tmp_path.glob("*.pt"))
    assert steps(saving())[-1] == WHOLE


def test_an_algorithm_that_changed_the_model_is_applied_when_continuing(saving: Make) -> None:
    fit(saving(), Crash(6), setup=Setup(algorithms="GhostBatchNorm"))
    assert first(fit(saving(), Crash(8))) == 5


def test_a_second_fit_goes_on(saving: Make) -> None:
    callback = saving(save_top_k=-1)
    outcome = fit(callback, setup=Setup(fits=("7ba", "2ep")))
    assert [row[2] for row in outcome.trace] == list(range(16))
    assert steps(callback) == [5, 7, 10, 15, 16]


def test_a_second_fit_may_count_from_nothing(saving: Make) -> None:
    callback = saving(save_interval="1ep", save_top_k=-1)
    trainer, _ = build(callback, setup=Setup(duration="1ep"), seed=1)
    trainer.fit()
    trainer.fit(duration="1ep", reset_time=True)
    trainer.close()
    assert steps(callback) == [8, 8]


def test_evaluating_alone_leaves_the_run_to_its_writer(saving: Make) -> None:
    callback = saving(save_top_k=-1)
    accuracies: list[float] = []

    def evaluate(state: State) -> None:
        if int(state.timestamp.batch) == 12:
            assert saver_of(callback).flush(60)  # step 10 may be on its way still
            trainer, _ = build(saving(), setup=Setup(), seed=3)
            assert int(trainer.state.timestamp.batch) == 10
            trainer.eval()
            accuracies.append(trainer.state.eval_metric_values["Accuracy"].item())
            trainer.close()

    fit(callback, At(Event.BATCH_CHECKPOINT, evaluate))
    assert len(accuracies) == 1
    assert steps(callback) == [5, 10, 15, 20, 25, 30, 32]


def test_metrics_may_be_part_of_the_state(saving: Make) -> None:
    fit(saving(), Crash(6), save_metrics=True)
    assert first(fit(saving(), Crash(8), save_metrics=True)) == 5
