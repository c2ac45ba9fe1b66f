"""What Composer's callback does where saving or training fails."""

from typing import Any

import pytest

pytest.importorskip("composer")

from composer import Callback
from composer.core import Event, State
from support.composer_callbacks import WHOLE, At, Make, first, steps, url_of
from support.composer_models import Crash, Setup, assert_same, build, fit
from support.reports import saver_of

from shrinkpoint.errors import CannotRepresentError, ShrinkpointWarning, StoreError
from shrinkpoint.saver import Saver
from shrinkpoint.store.writer import RunWriter


def broken(monkeypatch: pytest.MonkeyPatch, *, times: int = 10**6) -> At:
    """Makes so many commits fail from the start of training on."""

    def start(state: State) -> None:
        commit, left = RunWriter.commit, [times]

        def fail(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                return commit(*arguments, **options)
            raise StoreError("the disk is full")

        monkeypatch.setattr(RunWriter, "commit", fail)

    return At(Event.FIT_START, start)


def test_a_save_at_sigterm_that_fails_is_made_up_for(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = saving(save_interval="1000ba")
    with pytest.warns(ShrinkpointWarning, match="the disk is full"):
        fit(callback, broken(monkeypatch, times=1), Crash(13, sigterm=True))
    assert steps(callback) == [13]


def test_a_busy_store_is_not_waited_for(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    callback = saving(save_interval="1ba", busy="skip", save_top_k=-1)
    gate, skipped = threading.Event(), []

    def start(state: State) -> None:
        commit = RunWriter.commit
        monkeypatch.setattr(RunWriter, "commit", lambda *a, **k: gate.wait(60) and commit(*a, **k))

    def look(state: State) -> None:
        if int(state.timestamp.batch) == 20:
            skipped.append(saver_of(callback).skipped)
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
