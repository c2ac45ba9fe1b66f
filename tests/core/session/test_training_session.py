"""One run on one process: choosing, saving, waiting, making up for failures. Two processes: tests of the callbacks."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.constant import Constant
from support.options import grouped

from shrinkpoint.errors import ShrinkpointWarning, StoreError
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.store.writer import RunWriter

Make = Callable[..., TrainingSession]


@pytest.fixture(name="session")
def _session(request: pytest.FixtureRequest) -> Make:
    """Makes sessions of one run in memory, of this test's own."""
    url = f"memory://run-session/{request.node.name}".replace("[", "-").replace("]", "")

    def make(*, options: dict[str, Any] | None = None, **given: Any) -> TrainingSession:
        settings = RunSettings.build(
            url=url, **grouped(**{"scheme": "lossless", "busy": "wait"} | (options or {})), **given
        )
        return TrainingSession(settings, Given())

    return make


class Given(Constant):
    """A training that stands at the step that it is given, with these metrics."""

    given: Mapping[str, float] = MappingProxyType({})

    def state(self) -> dict[str, Any]:
        return {"model": {"w": torch.full((4,), float(self.step))}, "optimizers": []}

    def metrics(self) -> dict[str, float]:
        return dict(self.given)


def save(run: TrainingSession, step: int, *, metrics: Mapping[str, float] = MappingProxyType({})) -> Any:
    run.adapter.step, run.adapter.given = step, metrics
    return run.save()


class Hold:
    """Keeps a session's commits from ending until `let_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free = threading.Event()
        commit = RunWriter.commit

        def held(*arguments: Any, **options: Any) -> Any:
            self._free.wait(60)
            return commit(*arguments, **options)

        monkeypatch.setattr(RunWriter, "commit", held)

    def let_go(self) -> None:
        self._free.set()


def steps(run: TrainingSession) -> list[int]:
    return sorted(manifest.step for manifest in run.saver.store.manifests())


def test_travels_to_other_processes_before_it_starts(session: Make) -> None:
    run = session()
    pickle.loads(pickle.dumps(run))
    copy.deepcopy(run).open()
    run.close()
    run.fail()
    assert run.attend() == []


def test_saves_and_knows_the_best(session: Make) -> None:
    run = session(monitor="loss")
    run.open()
    assert run.choose() is None
    for step, loss in ((1, 0.5), (2, 0.7)):
        assert save(run, step, metrics={"loss": loss})
    run.finish()
    url = run.settings.url
    assert (run.best.best_path, run.best.last_path) == (f"{url}#step=1", f"{url}#step=2")
    assert [report.step for report in run.attend()] == [1, 2]
    assert run.attend() == []


def test_continues_and_remembers(session: Make) -> None:
    first = session(monitor="loss")
    for step, loss in ((1, 0.5), (2, 0.7)):
        save(first, step, metrics={"loss": loss})
    first.finish()
    again = session(monitor="loss")
    again.open()
    for run in (again, session(resume="must")):
        chosen = run.choose()
        assert chosen is not None
        assert chosen.step == 2
    again.remember()
    assert again.best == first.best
    assert session(resume="never").choose() is None


def test_a_measured_step_that_is_skipped_is_told_once(session: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = session(options={"busy": "skip"}, monitor="loss")
    hold = Hold(monkeypatch)
    save(run, 1, metrics={"loss": 0.6})
    with pytest.warns(ShrinkpointWarning) as caught:
        assert [save(run, 2, metrics={"loss": 0.5}) for _ in range(2)] == [False, False]
    assert sum("has loss=0.5 and is not saved" in str(each.message) for each in caught) == 1
    hold.let_go()
    run.finish()


def test_a_monitor_that_is_not_logged_at_every_save_is_not_missing(session: Make) -> None:
    run = session(monitor="loss")
    save(run, 1, metrics={"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(run, 2, metrics={})
        run.finish()
        again = session(monitor="loss")
        manifest = again.choose()
        assert manifest is not None
        again.restore(manifest)
        again.remember()
        save(again, 3, metrics={})
        again.finish()


def test_a_failing_evaluation_is_told_once_and_costs_no_checkpoint(session: Make) -> None:
    run = session(options={"scheme": "inshrinkerator"})
    run.adapter.model = torch.nn.Linear(256, 256)
    run.adapter.state = lambda: {"model": run.adapter.model.state_dict(), "optimizers": []}

    def fails(*_: Any, **options: Any) -> float:
        raise RuntimeError("no batch")

    run.adapter.loss = fails
    run.probe.kept.see_training(0)

    def save_measured(step: int) -> None:
        save(run, step)
        run.finish()

    with pytest.warns(ShrinkpointWarning, match="cannot be measured.*no batch"):
        save_measured(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_measured(2)
    assert steps(run) == [1, 2]


@pytest.mark.parametrize("error", [StoreError, RuntimeError])
def test_after_an_error_it_finishes_and_warns(
    session: Make, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    closed: list[float | None] = []

    def cannot() -> None:
        raise error("the disk is full")

    run = session()
    save(run, 1)
    close = run.saver.close
    monkeypatch.setattr(run.saver, "close", lambda seconds: closed.append(seconds) or close(seconds))
    with pytest.warns(ShrinkpointWarning, match="the last checkpoint was not saved: the disk is full"):
        run.fail(save=cannot)
    assert closed == [60.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.fail()
    assert steps(run) == [1]


def test_after_an_error_it_does_not_wait_for_ever(session: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = session()
    hold = Hold(monkeypatch)
    save(run, 1)
    with pytest.warns(ShrinkpointWarning, match="still running after 0 s"):
        run.fail(0.0)
    hold.let_go()
    run.close()
    assert steps(run) == [1]


def test_an_outline_has_shapes_only(session: Make) -> None:
    run = session()
    assert run.outline(("model",)) is None
    save(run, 1)
    run.finish()
    outline = run.outline(("model", "optimizer"))
    assert outline is not None
    assert outline.keys() == {"model"}
    assert outline["model"]["w"].shape == (4,)
    assert outline["model"]["w"].is_meta
