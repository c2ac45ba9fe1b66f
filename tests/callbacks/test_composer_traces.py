"""Measuring by the model's own loss leaves no trace in what it writes down."""

import warnings
from typing import Any

import pytest

pytest.importorskip("composer")

from composer import Callback
from composer.loggers import InMemoryLogger
from support import composer_models
from support.composer_callbacks import Make
from support.composer_models import Setup, Tiny, assert_same, fit
from support.traces import CALLS, Traces


class Noting(Callback):  # type: ignore[misc]
    """A callback that the model knows."""

    def __init__(self) -> None:
        self.traces = Traces()


NOTING: list[Noting] = []
MODELS: list[Any] = []


class Recording(Tiny):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.traces, self.outputs = Traces(), [0.0]
        self.noting = NOTING[-1]
        MODELS.append(self)

    def loss(self, outputs: Any, batch: Any, *rest: Any) -> Any:
        loss = super().loss(outputs, batch, *rest)
        value = round(loss.item(), 3)
        self.outputs.append(value)
        self.traces.touch(value)
        self.noting.traces.touch(value)
        if self.logger is not None:
            self.logger.log_metrics({"by_hand": value})
        return loss


@pytest.mark.parametrize("eval_interval", ["3ba", None])
def test_what_the_loss_writes_down_is_as_without_the_callback(
    saving: Make, monkeypatch: pytest.MonkeyPatch, eval_interval: str | None
) -> None:
    monkeypatch.setattr(composer_models, "Tiny", Recording)
    setup = Setup(width=128, eval_interval=eval_interval, duration="3ep")

    def trained(*callbacks: Any) -> tuple[Any, ...]:
        CALLS.clear()
        NOTING.append(Noting())
        logger = InMemoryLogger()
        outcome = fit(NOTING[-1], *callbacks, setup=setup, loggers=[logger])
        model = MODELS[-1]
        names = [name for name in logger.data if name == "by_hand" or name.startswith(("loss", "metrics"))]
        logged = {name: [value for _, value in logger.data[name]] for name in names}
        seen = [model.traces.seen(), NOTING[-1].traces.seen(), str(model.outputs)]
        return [*seen, str(logged), str(outcome.trace), str(outcome.evaluations)], outcome.final, len(CALLS)

    plain = trained()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the quality of checkpoints")
        saved = trained(saving(scheme="auto", save_interval="5ba"))
    assert saved[2] > plain[2]  # it was measured
    assert plain[0] == saved[0]
    assert_same(plain[1], saved[1])
