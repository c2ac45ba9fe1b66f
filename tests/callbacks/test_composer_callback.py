"""What Composer's callback promises beside exact resumption: refusals, failures, logs, and leaving others alone."""

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("composer")

from composer import Callback, ComposerModel, DataSpec, Time, Trainer
from composer.core import Event, State
from composer.loggers import InMemoryLogger
from support import composer_models
from support.composer_data import BATCH, LENGTH, Points
from support.composer_models import (
    OPTIMIZERS,
    Crash,
    Outcome,
    Preempted,
    Setup,
    Tiny,
    assert_same,
    build,
    fit,
)
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.cli.app import app
from shrinkpoint.errors import (
    CannotRepresentError,
    ConfigError,
    NoCheckpointError,
    SaveFailedError,
    ShrinkpointWarning,
    StateMismatchError,
    StoreError,
)
from shrinkpoint.integrations.composer import state as composer_state
from shrinkpoint.integrations.composer.resume import require_supported
from shrinkpoint.saver import Saver

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

Make = Callable[..., CompressedCheckpoint]

WHOLE = 4 * LENGTH
"""Batches of a `Setup`'s run."""


@pytest.fixture(name="saving")
def _saving(request: pytest.FixtureRequest) -> Make:
    """Makes callbacks that save to one run in memory, of this test's own."""
    torch.set_num_threads(1)
    url = f"memory://composer/{request.node.name}".replace("[", "-").replace("]", "")

    def make(**options: Any) -> CompressedCheckpoint:
        return CompressedCheckpoint(
            url, **{"scheme": "lossless", "busy": "wait", "save_interval": "5ba", **options}
        )

    return make


def url_of(callback: CompressedCheckpoint) -> str:
    return callback._session.settings.run.url


def steps(callback: CompressedCheckpoint) -> list[int]:
    return sorted(manifest.step for manifest in Saver(url_of(callback)).store.manifests())


def first(outcome: Outcome) -> int:
    """The first batch that was trained on."""
    batch: int = outcome.trace[0][2]
    return batch


class At(Callback):  # type: ignore[misc]
    """Does something at each event of a kind."""

    def __init__(self, event: Event, action: Callable[[State], Any]) -> None:
        self.event = event
        self.action = action

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        if event is self.event:
            self.action(state)


# ---- when it saves, and what it keeps and tells


def by_predicate(state: State, event: Event) -> bool:
    return event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) in (4, 9)


@pytest.mark.parametrize(
    ("interval", "options", "expected"),
    [
        ("5ba", {}, [5, 10, 15, 20, 25, 30, 32]),
        ("5ba", {"save_last": False}, [5, 10, 15, 20, 25, 30]),
        ("1ep", {}, [8, 16, 24, 32]),
        (2, {}, [16, 32]),
        (Time.from_batch(20), {}, [20, 32]),
        ("0.25dur", {}, [8, 16, 24, 32]),
        ("80sp", {}, [10, 20, 30, 32]),
        ("0.48k tok", {}, [20, 32]),
        (by_predicate, {}, [4, 9, 32]),
        (by_predicate, {"save_last": False}, [4, 9]),
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
    best = max(reversed(accuracy), key=accuracy.__getitem__)  # of equals, the newest
    assert callback.best_model_path == f"{url_of(callback)}#step={best}"
    assert callback.last_model_path == f"{url_of(callback)}#step={WHOLE}"
    assert set(steps(callback)) == {best, WHOLE}


def test_a_metric_that_is_not_logged_is_told_once(saving: Make) -> None:
    with pytest.warns(ShrinkpointWarning, match="'no_such' had not been logged") as told:
        fit(saving(monitor="no_such"))
    assert sum("no_such" in str(warning.message) for warning in told) == 1


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
    assert [value for _, value in ours["checkpoint/batch"]] == [5, 10, 15, 20, 25, 30, 32]
    # Some loggers drop what comes for an earlier batch than they have seen.
    assert all(batch >= saved for batch, saved in ours["checkpoint/batch"])
    assert {"checkpoint/ratio", "checkpoint/bytes", "checkpoint/blocked_s"} <= ours.keys()


def test_the_run_keeps_its_own_name(saving: Make) -> None:
    fit(saving(), Crash(6), run_name="one")
    names: list[str] = []
    fit(saving(), At(Event.FIT_START, lambda state: names.append(state.run_name)), run_name="two")
    assert names == ["two"]


# ---- continuing, or not


def test_resume_never_starts_afresh_and_must_refuses(saving: Make) -> None:
    with pytest.raises(NoCheckpointError, match="resume='must'"):
        fit(saving(resume="must"))
    assert first(fit(saving(), Crash(6))) == 0
    assert first(fit(saving(resume="must"), Crash(7))) == 5
    assert first(fit(saving(resume="never"), Crash(7))) == 0


def test_a_learning_rate_that_resuming_replaces_is_told(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(saving(), Crash(6))
    monkeypatch.setitem(OPTIMIZERS, "Adam", lambda parameters: [torch.optim.Adam(parameters, lr=2e-2)])
    with pytest.warns(
        ShrinkpointWarning, match=r"resume: lr=0.02, .*Adam, is replaced by the checkpoint's 0.01"
    ):
        fit(saving(), Crash(7))


@pytest.mark.parametrize(("duration", "longer", "interval"), [("4ep", "5ep", "1ep"), ("32ba", "36ba", "5ba")])
def test_a_finished_run_has_nothing_left_to_train(
    saving: Make, duration: str, longer: str, interval: str
) -> None:
    fit(saving(save_interval=interval), setup=Setup(duration=duration))
    before = steps(saving())
    with (
        pytest.warns(ShrinkpointWarning, match="is complete: max_duration"),
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
        ShrinkpointWarning, match=r"ba6.pt' takes precedence.*batch 6, although memory://.* has batch 10"
    ):
        again = fit(saving(save_interval="7ba"), Crash(8), load_path=older)
    assert first(again) == 6
    assert first(fit(saving(), Crash(9))) == 7  # what was saved last, although it is an earlier batch


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


@pytest.mark.parametrize("options", [{}, {"resume": "never"}, {"load_path": "own"}], ids=str)
def test_another_models_run_is_neither_continued_nor_saved_to(
    saving: Make, options: dict[str, str], tmp_path: Path
) -> None:
    fit(saving(), Crash(6))
    before = steps(saving())
    more = {}
    if "load_path" in options:
        fit(
            Crash(4),
            setup=Setup(width=8),
            save_folder=str(tmp_path),
            save_interval="3ba",
            save_filename="own",
        )
        more["load_path"] = str(tmp_path / "own")
    with pytest.raises(StateMismatchError, match=r"net\.0\.weight is \(8, 8\) here and \(16, 8\) there"):
        fit(saving(resume=options.get("resume", "auto")), setup=Setup(width=8), **more)
    assert steps(saving()) == before


class Renamed(Tiny):
    """Lacks the batch norm's parameters under their names, and has others instead."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.gain = torch.nn.Parameter(torch.ones(1))
        del self.net[1]


def test_missing_and_foreign_parameters_are_named(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(saving(), Crash(6))
    monkeypatch.setattr("support.composer_models.Tiny", Renamed)
    with pytest.raises(
        StateMismatchError, match=r"missing in the checkpoint: gain.*unknown to this model: net\.1"
    ):
        fit(saving())


def test_another_optimizer_is_refused(saving: Make) -> None:
    fit(saving(), Crash(6))
    with pytest.raises(StateMismatchError, match="contains a run with Adam, and this one has SGD"):
        fit(saving(), setup=Setup(optimizer="SGD"))


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize(
    ("more", "writer"),
    [({"pytorch-lightning_version": "2.6"}, "Lightning's callback"), ({}, "another program")],
)
def test_another_programs_run_is_refused(saving: Make, more: Any, writer: str, resume: Any) -> None:
    with Saver(url_of(saving())).store.writer():
        pass
    saver = Saver(url_of(saving()))
    saver.save({"state_dict": {"w": torch.ones(3)}, **more}, step=3, wait=True)
    saver.close()
    with pytest.raises(
        StateMismatchError, match=f"written by {writer}, not by Composer's.*shrinkpoint export"
    ):
        fit(saving(resume=resume))


def test_a_loops_run_is_refused(saving: Make) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(
        url_of(saving()), model, torch.optim.SGD(model.parameters()), scheme="lossless"
    ) as loop:
        loop.save(1, wait=True)
    with pytest.raises(StateMismatchError, match="not by Composer's"):
        fit(saving())


def test_a_newer_version_is_refused(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(composer_state, "_VERSION", 3)
        fit(saving(), Crash(6))
    with pytest.raises(StateMismatchError, match="upgrade shrinkpoint"):
        fit(saving())


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
            assert callback._session.run.saver.flush(60)  # step 10 may be on its way still
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


# ---- one callback, several trainers


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
    session = callback._session
    assert session._probe.kept.batches == []
    assert session._gradients.take([]) is None
    assert session.run._saver is None


def test_two_callbacks_on_one_run_are_refused(saving: Make) -> None:
    with pytest.raises(ConfigError, match="two CompressedCheckpoint"):
        fit(saving(), saving())


def test_two_callbacks_on_two_runs(saving: Make) -> None:
    def other() -> CompressedCheckpoint:
        return CompressedCheckpoint(
            "memory://composer/two-b", save_interval="1ep", scheme="lossless", busy="wait"
        )

    fit(saving(), other(), Crash(13))
    assert steps(saving()) == [5, 10]
    assert steps(other()) == [8]
    assert first(fit(saving(), other(), Crash(14))) in (8, 10)


# ---- what cannot work is said before training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_interval": "often"}, "save_interval='often' cannot be read"),
        ({"save_interval": "0ba"}, "greater than 0"),
        ({"save_interval": True}, "save_interval"),
        ({"resume": "yes"}, "resume='yes'"),
        ({"autoresume": True}, "give resume: 'auto'"),
        ({"save_overwrite": True}, "a run is never overwritten"),
        ({"overwrite": True}, "a run is never overwritten"),
        ({"num_checkpoints_to_keep": 3}, "give keep_last"),
        ({"save_num_checkpoints_to_keep": 3}, "give keep_last"),
        ({"save_folder": "here"}, "give url"),
        ({"every_n_train_steps": 3}, "give save_interval"),
        ({"save_weights_only": True}, "give weights_only=True"),
        ({"save_intervall": "1ep"}, "did you mean save_interval"),
        ({"save_top_k": 2}, "save_top_k=2 ranks by a metric"),
        ({"scheme": "zip"}, "scheme"),
        ({"probe_batches": 0}, "probe_batches=0"),
        ({"save_last": None}, "save_last=None"),
        ({"storage_options": "key"}, "storage_options='key' must be a dict"),
    ],
    ids=str,
)
def test_options_are_checked_at_once(saving: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        saving(**options)


@pytest.mark.parametrize("url", ["", "/", "memory://run#step=5", None, 7])
def test_a_url_that_is_none(url: Any) -> None:
    with pytest.raises(ConfigError, match="url="):
        CompressedCheckpoint(url)


@pytest.mark.parametrize("url", ["nosuch://bucket/run", "memory:/run"])
def test_a_url_that_leads_nowhere(url: str) -> None:
    with pytest.raises((ConfigError, StoreError)):
        build(CompressedCheckpoint(url), setup=Setup(), seed=1)


def test_an_unwritable_store_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError):
        build(CompressedCheckpoint(str(tmp_path / "file")), setup=Setup(), seed=1)


def test_shards_of_fsdp1_are_refused_with_the_way_out() -> None:
    from composer.utils import FSDP2Config, FSDPConfig

    def state(config: Any, *, monolith: bool = False) -> Any:
        return SimpleNamespace(fsdp_config=config, load_monolith_rank0_only=monolith)

    with pytest.raises(
        ConfigError, match=r"\['state_dict_type'\]='sharded'.*FSDP_VERSION=2, or it to 'full'"
    ):
        require_supported(state(FSDPConfig(state_dict_type="sharded")))
    with pytest.raises(ConfigError, match="load_monolith_rank0_only"):
        require_supported(state(FSDPConfig(state_dict_type="full"), monolith=True))
    require_supported(state(FSDPConfig(state_dict_type="full")))
    require_supported(state(FSDP2Config(state_dict_type="full")))
    require_supported(state(FSDP2Config()))  # Composer's default: each rank's own shards
    require_supported(state(None))


def test_without_composer_it_can_be_imported_and_says_what_to_install() -> None:
    program = """
import sys
sys.modules["composer"] = None
from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import MissingDependencyError
try:
    CompressedCheckpoint("run")
except MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "shrinkpoint[composer]"' in done.stdout


# ---- failures in the midst of training


def broken(callback: CompressedCheckpoint, monkeypatch: pytest.MonkeyPatch, *, times: int = 10**6) -> At:
    """Makes so many commits fail from the start of training on."""

    def start(state: State) -> None:
        committer = callback._session.run.saver._committer
        commit, left = committer.commit, [times]

        def fail(job: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                return commit(job)
            raise StoreError("the disk is full")

        monkeypatch.setattr(committer, "commit", fail)

    return At(Event.FIT_START, start)


def test_failed_saves_warn_and_then_stop_training(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = saving(max_failures=3)
    with (
        pytest.warns(ShrinkpointWarning, match="the disk is full"),
        pytest.raises(SaveFailedError, match="in a row"),
    ):
        fit(callback, broken(callback, monkeypatch))


@pytest.mark.parametrize("interval", ["32ba", "1000ba"])
def test_a_last_save_that_fails_is_made_up_for(
    saving: Make, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    callback = saving(save_interval=interval)
    with pytest.warns(ShrinkpointWarning, match="the disk is full"):
        outcome = fit(callback, broken(callback, monkeypatch, times=1))
    assert outcome.finished
    assert steps(callback) == [WHOLE]


def test_a_last_save_that_fails_for_good_ends_in_an_error(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = saving(save_interval="1000ba", max_failures=2)
    with pytest.raises(SaveFailedError, match="the disk is full"):
        fit(callback, broken(callback, monkeypatch))


def test_a_save_at_sigterm_that_fails_is_made_up_for(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = saving(save_interval="1000ba")
    with pytest.warns(ShrinkpointWarning, match="the disk is full"):
        fit(callback, broken(callback, monkeypatch, times=1), Crash(13, sigterm=True))
    assert steps(callback) == [13]


def test_a_busy_store_is_not_waited_for(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    callback = saving(save_interval="1ba", busy="skip", save_top_k=-1)
    gate, skipped = threading.Event(), []

    def start(state: State) -> None:
        committer = callback._session.run.saver._committer
        commit = committer.commit
        monkeypatch.setattr(committer, "commit", lambda job: gate.wait(60) and commit(job))

    def look(state: State) -> None:
        if int(state.timestamp.batch) == 20:
            skipped.append(callback._session.run.saver.skipped)
            gate.set()

    fit(callback, At(Event.FIT_START, start), At(Event.BATCH_END, look))
    assert skipped == [18]  # batches 2 to 19
    assert {1, WHOLE} <= set(steps(callback))


class Boom(RuntimeError):
    pass


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_after_an_error_the_save_under_way_is_finished(saving: Make, error: type[BaseException]) -> None:
    def fail(state: State) -> None:
        if int(state.timestamp.batch) == 12:
            raise error

    with pytest.raises(error):
        fit(saving(), At(Event.BEFORE_BACKWARD, fail))
    assert steps(saving()) == [5, 10]
    assert first(fit(saving(), Crash(12))) == 10


def test_sigterm_saves_exactly_and_ends_the_process_as_without_us(saving: Make) -> None:
    callback = saving(scheme="inshrinkerator", save_interval="1000ba")
    trainer, _ = build(callback, Crash(13, sigterm=True), setup=Setup(width=512), seed=1)
    with pytest.raises(SystemExit) as end:
        trainer.fit()
    assert end.value.code == 143
    live = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
    trainer.close()
    restored = Saver(url_of(callback)).restore(13)
    assert restored is not None
    assert_same(dict(restored.state.to_object()["state"]["model"]), live)


def test_a_predicate_that_fails_ends_training_with_its_error(saving: Make) -> None:
    def broken_predicate(state: State, event: Event) -> bool:
        raise Boom

    with pytest.raises(Boom):
        fit(saving(save_interval=broken_predicate))


class Unstorable(Callback):  # type: ignore[misc]
    def state_dict(self) -> dict[str, Any]:
        return {"lock": object()}


def test_a_state_that_cannot_be_stored_is_named(saving: Make) -> None:
    with pytest.raises(CannotRepresentError, match=r"Unstorable.*lock"):
        fit(saving(), Unstorable())


# ---- measuring the quality, and the gradients


def test_saving_is_invisible_to_training(saving: Make) -> None:
    wide = Setup(width=512)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        plain = fit(setup=wide)
        logger = InMemoryLogger()
        saved = fit(
            saving(scheme="inshrinkerator", save_top_k=-1, save_interval="4ba"), setup=wide, loggers=[logger]
        )
    assert plain.trace == saved.trace
    assert plain.evaluations == saved.evaluations
    assert_same(plain.final, saved.final)
    assert len(logger.data["checkpoint/degradation"]) == 8


class Watched(Tiny):
    """Notes the batches on which it is evaluated in the midst of training, by their indices and sizes."""

    seen_by_probe: list[Any]

    def loss(self, outputs: Any, batch: Any, *rest: Any) -> Any:
        if not self.training:
            self.seen_by_probe.append(batch[0].tolist())
        return super().loss(outputs, batch, *rest)


@pytest.mark.parametrize("microbatch", [None, 4])
@pytest.mark.parametrize("eval_interval", ["1ba", None])
def test_the_loss_is_measured_on_what_the_model_gets(
    saving: Make, monkeypatch: pytest.MonkeyPatch, eval_interval: str | None, microbatch: int | None
) -> None:
    monkeypatch.setattr("support.composer_models.Tiny", Watched)
    monkeypatch.setattr(Watched, "seen_by_probe", [], raising=False)
    setup = Setup(width=512, eval_interval=eval_interval, microbatch=microbatch)
    outcome = fit(saving(scheme="inshrinkerator", save_interval="10ba"), setup=setup)
    trained = [list(indices) for row in outcome.trace[:2] for indices, _ in row[3]][:2]
    held_out = [list(range(BATCH)), list(range(BATCH, 2 * BATCH))]
    expected = held_out if eval_interval else trained
    assert Watched.seen_by_probe
    assert all(batch in expected for batch in Watched.seen_by_probe)
    assert {len(batch) for batch in Watched.seen_by_probe} == {
        BATCH if eval_interval else microbatch or BATCH
    }


class Scaled(Tiny):
    """Only learns from batches that were transformed on the device."""

    def forward(self, batch: Any) -> Any:
        assert batch[1].abs().max() > 100
        return super().forward(batch)


def test_the_batches_that_are_kept_have_been_transformed(
    saving: Make, monkeypatch: pytest.MonkeyPatch, warned_in_background: list[Warning]
) -> None:
    monkeypatch.setattr("support.composer_models.Tiny", Scaled)

    def data() -> DataSpec:
        return DataSpec(
            DataLoader(Points(), batch_size=BATCH),
            microbatch_transforms=lambda batch: [batch[0], batch[1] * 1000, batch[2]],
        )

    # A DataSpec that wraps a loader cannot be wrapped again.
    monkeypatch.setattr("support.composer_models.DataSpec", lambda made, **_: made)
    monkeypatch.setitem(composer_models.DATA, "transformed", data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        for more in ({}, {"eval_dataloader": data(), "eval_interval": "1ba"}):
            fit(
                saving(scheme="inshrinkerator", resume="never"),
                setup=Setup(width=512, eval_interval=None, duration="1ep", data="transformed"),
                **more,
            )
    (told,) = warned_in_background  # the second run began beside the first one
    assert "that this training does not continue" in str(told)
    warned_in_background.clear()


class Talkative(Tiny):
    """Its loss is gathered from all processes."""

    def loss(self, outputs: Any, batch: Any, *rest: Any) -> Any:
        loss = super().loss(outputs, batch, *rest)
        torch.distributed.all_reduce(loss.detach())
        return loss


@pytest.fixture(name="_connected")
def _with_a_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_connected")
def test_a_loss_that_asks_the_other_processes_is_not_waited_for(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.composer_models.Tiny", Talkative)
    monkeypatch.setattr("shrinkpoint.loop.alone.world_size", lambda: 2)
    with pytest.warns(
        ShrinkpointWarning, match=r"cannot be measured.*communicates with the other processes \(allreduce_"
    ):
        assert fit(saving(scheme="inshrinkerator"), setup=Setup(width=512)).finished


class Lossless(Tiny):
    """Tells a loss in training only."""

    def loss(self, outputs: Any, batch: Any, *rest: Any) -> Any:
        return super().loss(outputs, batch, *rest) if self.training else None


def test_a_loss_that_cannot_be_measured_is_told_once(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.composer_models.Tiny", Lossless)
    callback = saving(scheme="inshrinkerator")
    with pytest.warns(ShrinkpointWarning) as told:
        outcome = fit(callback, setup=Setup(width=512))
    assert sum("cannot be measured" in str(warning.message) for warning in told) == 1
    restored = Saver(url_of(callback)).restore()
    assert restored is not None
    assert_same(dict(restored.state.to_object()["state"]["model"]), outcome.final["model"])


@pytest.fixture(name="_closures")
def _with_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers that compute the loss several times a batch."""
    from composer.algorithms import SAM

    def lbfgs(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=4)]

    monkeypatch.setitem(composer_models.OPTIMIZERS, "LBFGS", lbfgs)
    monkeypatch.setitem(composer_models.ALGORITHMS, "SAM", lambda: [SAM(rho=0.05)])


@pytest.mark.usefixtures("_closures")
@pytest.mark.parametrize(
    "options", [{"optimizer": "LBFGS"}, {"optimizer": "SGD", "algorithms": "SAM"}], ids=str
)
def test_an_optimizer_that_composer_cannot_load_is_told(saving: Make, options: dict[str, str]) -> None:
    setup = Setup(**options, scheduler="none", duration="2ep")  # type: ignore[arg-type]
    with pytest.warns(ShrinkpointWarning, match="Composer cannot load the state of"):
        fit(saving(), Crash(7), setup=setup)
    with pytest.raises(StateMismatchError, match=r"cannot load the state of .*resume='never'"):
        fit(saving(), setup=setup)
    assert first(fit(saving(resume="never"), Crash(7), setup=setup)) == 0


@pytest.mark.usefixtures("_closures")
@pytest.mark.parametrize(
    ("optimizer", "algorithms", "given"),
    [
        ("Adam", "none", False),
        ("SGD", "none", True),
        ("SGD", "SAM", True),
        ("plain SGD", "none", True),
        ("LBFGS", "none", True),
    ],
)
def test_gradients_are_averaged_where_the_optimizer_does_not(
    saving: Make, optimizer: str, algorithms: str, given: bool
) -> None:
    callback = saving(scheme="inshrinkerator", save_interval="4ba")
    seen: list[Any] = []
    updates: list[int] = []

    def start(state: State) -> None:
        saver, average = callback._session.run.saver, callback._session._gradients._average
        save, update = saver.save, average.update

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["gradients"])
            return save(*args, **kwargs)

        def counted(*args: Any) -> Any:
            updates.append(int(state.timestamp.batch))
            return update(*args)

        saver.save, average.update = watched, counted  # type: ignore[method-assign]

    setup = Setup(optimizer=optimizer, algorithms=algorithms, duration="1ep", scheduler="none")
    names = dict(Tiny(setup).named_parameters()).keys()
    fit(callback, At(Event.FIT_START, start), setup=setup)
    assert [None if gradients is None else gradients.keys() for gradients in seen] == [
        names if given else None
    ] * 2
    assert updates == (
        list(range(1, 9)) if given else []
    )  # once a batch, however often its loss was computed


# ---- data and models of other kinds


class Classifier(ComposerModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any, *_: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator))
        for _ in range(6)
    ]


class Indexed:
    """A sequence of batches, iterable by its numbers alone."""

    def __getitem__(self, index: int) -> Any:
        return batches()[index]

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize(
    "data", [batches, Indexed, lambda: iter(batches()), lambda: DataLoader(TensorDataset(*batches()[0]), 2)]
)
def test_any_iterable_will_do(saving: Make, data: Callable[[], Any]) -> None:
    weights: list[Any] = []

    def run(*callbacks: Any, seed: int) -> None:
        torch.manual_seed(seed)
        model = Classifier()
        trainer = Trainer(
            model=model,
            train_dataloader=DataSpec(data(), get_num_samples_in_batch=lambda _: 8),
            optimizers=torch.optim.Adam(model.parameters(), 0.1),
            max_duration="6ba",
            device_train_microbatch_size=8,
            callbacks=list(callbacks),
            progress_bar=False,
            seed=seed,
            device="cpu",
        )
        try:
            trainer.fit()
            weights.append(model.net.weight.detach().clone())
        except Preempted:
            pass
        finally:
            trainer.close()

    run(seed=1)
    run(saving(save_interval="2ba"), Crash(3), seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the order of the samples", ShrinkpointWarning)
        run(saving(save_interval="2ba"), seed=2)
    assert_same(weights[0], weights[1])


def test_a_language_model_of_transformers(saving: Make, warned_in_background: list[Warning]) -> None:
    pytest.importorskip("transformers")
    from composer.models import HuggingFaceModel
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(256, (16, 12), generator=torch.Generator().manual_seed(0))

    def run(*callbacks: Any, seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=256, n_positions=16, n_embd=64, n_layer=2, n_head=2, loss_type="ForCausalLM"
        )
        model = HuggingFaceModel(GPT2LMHeadModel(config))
        data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=4, shuffle=True),  # type: ignore[arg-type]
            eval_dataloader=DataLoader(data[:4], batch_size=4),  # type: ignore[arg-type]
            eval_interval="1ba",
            optimizers=torch.optim.AdamW(model.parameters(), 1e-3),
            max_duration="2ep",
            callbacks=list(callbacks),
            progress_bar=False,
            seed=seed,
            device="cpu",
            **options,
        )
        try:
            trainer.fit()
        except Preempted:
            pass
        finally:
            trainer.close()
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole = run(seed=1)
    run(saving(save_interval="3ba"), Crash(5), seed=1)
    assert_same(whole, run(saving(save_interval="3ba"), seed=2))

    logger = InMemoryLogger()
    measured = saving(scheme="inshrinkerator", resume="never")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        run(measured, seed=1, loggers=[logger])
    told, *exact = map(str, warned_in_background)
    assert "that this training does not continue" in told
    assert all("is stored exactly: " in each for each in exact)
    warned_in_background.clear()
    assert logger.data["checkpoint/degradation"]
    manifest = Saver(url_of(measured)).store.manifests()[0]
    weights = 4 * sum(value.numel() for name, value in whole.items() if name != "model.lm_head.weight")
    assert manifest.meta["save"]["raw_sections"]["weight"] == weights  # tied ones once


def test_the_command_line_reads_a_run(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    outcome = fit(CompressedCheckpoint(run, save_interval="1ep", scheme="lossless", busy="wait"))
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


def test_a_run_of_weights_alone_goes_on_with_a_fresh_optimizer(saving: Make) -> None:
    fit(saving(weights_only=True), Crash(7))
    [manifest] = Saver(url_of(saving())).store.manifests()
    assert set(manifest.meta["save"]["sections"]) <= {"weight", "buffer", "other"}
    with pytest.warns(ShrinkpointWarning, match="resumed weights of step 5 .*it starts anew"):
        outcome = fit(saving(weights_only=True), Crash(6))
    assert first(outcome) == 5
