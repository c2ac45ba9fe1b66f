"""Steps from a saved state, taken and taken back in the midst of a Composer run, leave no trace in it."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from support.options import grouped

pytest.importorskip("composer")

from composer import Callback
from composer.algorithms import GradientClipping
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from support.composer_models import ALGORITHMS, Outcome, Setup, assert_same, fit
from support.reports import saver_of
from torch.amp.grad_scaler import GradScaler

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.integrations.composer.adapter import ComposerAdapter
from shrinkpoint.integrations.composer.schedule import Settings
from shrinkpoint.integrations.composer.state import stored_state
from shrinkpoint.session.probe import LossProbe, StepProbe, scale_of

MARKS = (1, 3)
PROBED: dict[str, Any] = {
    "scheme": "inshrinkerator",
    "guards": False,  # its noise is far wider than movement: all would be exact, and nothing would be tried
    "busy": "wait",
    "save_interval": "4ba",
    "max_degradation": 0.9,
    "restore_budget": 1,
    "search_overhead": float("inf"),
    "probe_steps": 4,
}


class Stepping(Callback):  # type: ignore[misc]
    """Goes on from a checkpoint of some batches before, again and again."""

    def __init__(self, *, steps: int = 4) -> None:
        self.adapter = ComposerAdapter(Settings.build(url="memory://none", save_interval="1ep"))
        self.probe = LossProbe(self.adapter)
        self.steps = StepProbe(self.probe, steps=steps)
        self.losses: list[list[float]] = []
        self.offered: list[bool] = []

    def fit_start(self, state: Any, logger: Any) -> None:
        self.adapter.run = state
        self.steps.starts()

    def batch_start(self, state: Any, logger: Any) -> None:
        self.first = True

    def before_forward(self, state: Any, logger: Any) -> None:
        self.probe.kept.see_training(state.batch)
        self.steps.recent.see(state.batch, first=self.first)
        self.first = False

    def eval_before_forward(self, state: Any, logger: Any) -> None:
        self.probe.kept.see_validation(state.batch)

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) % 3 and int(state.timestamp.batch_in_epoch):
            return
        checkpoint = copy.deepcopy(stored_state(state, []))
        resumed = self.steps.resumed()
        self.offered.append(resumed is not None)
        if resumed is not None:
            losses = list(resumed(checkpoint, MARKS))
            assert losses == resumed(checkpoint, MARKS)
            self.losses.append(losses)


def same(one: Outcome, other: Outcome) -> None:
    assert one.finished
    assert one.trace == other.trace
    assert one.evaluations == other.evaluations
    assert_same(one.final, other.final)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(duration="2ep", metered=True),
        Setup(duration="2ep", microbatch=3, optimizer="DecoupledAdamW"),
        Setup(duration="2ep", optimizer="SGD", eval_interval=None),
    ],
    ids=["plain", "parts of batches", "no evaluation"],
)
def test_leaves_no_trace(setup: Setup) -> None:
    stepping = Stepping()
    probed = fit(stepping, setup=setup)
    same(fit(setup=setup), probed)
    assert len(stepping.losses) > 3
    assert all(len(set(losses)) == len(MARKS) for losses in stepping.losses)


def test_gradients_are_clipped_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []

    def clip(model: Any, kind: str, threshold: float, *, fsdp_enabled: bool) -> None:
        apply_gradient_clipping(model, kind, threshold, fsdp_enabled)
        norms.append(float(sum(p.grad.square().sum() for p in model.parameters())) ** 0.5)

    monkeypatch.setattr("shrinkpoint.integrations.composer.adapter.apply_gradient_clipping", clip)
    monkeypatch.setitem(ALGORITHMS, "clipping", lambda: [GradientClipping("norm", 1e-3)])
    setup = Setup(duration="1ep", algorithms="clipping")
    stepping = Stepping()
    same(fit(setup=setup), fit(stepping, setup=setup))
    assert len(norms) == 2 * len(stepping.losses) * MARKS[-1]
    assert norms == pytest.approx([1e-3] * len(norms), rel=1e-2)


@pytest.mark.parametrize("algorithms", ["MixUp", "EMA"])
def test_offers_nothing_where_algorithms_take_part_in_a_step(algorithms: str) -> None:
    stepping = Stepping()
    setup = Setup(duration="1ep", algorithms=algorithms)
    same(fit(setup=setup), fit(stepping, setup=setup))
    assert set(stepping.offered) == {algorithms == "EMA"}


def test_offers_nothing_without_batches() -> None:
    stepping = Stepping(steps=0)
    fit(stepping, setup=Setup(duration="1ep"))
    assert not any(stepping.offered)


@pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")
def test_a_real_run_is_measured_after_resumed_steps_and_does_not_notice() -> None:
    setup = Setup(width=512, duration="2ep")
    callback = CompressedCheckpoint("memory://composer-steps/on", **grouped(**PROBED))
    reports: list[Any] = []

    class Reading(Callback):  # type: ignore[misc]
        def fit_end(self, state: Any, logger: Any) -> None:
            reports.extend(saver_of(callback).reports())

    same(fit(setup=setup), fit(callback, Reading(), setup=setup))
    assert {"2", "4"} in [set(report.resumed) for report in reports], reports


def test_a_step_that_fails_is_told_once_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(width=512, duration="2ep")
    plain = fit(setup=setup)

    def fail(*_: Any) -> Any:
        raise MemoryError("too little")

    monkeypatch.setattr("shrinkpoint.integrations.composer.adapter._total", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(
            plain,
            fit(CompressedCheckpoint("memory://composer-steps/failing", **grouped(**PROBED)), setup=setup),
        )
    told = [str(w.message) for w in caught if w.category is ShrinkpointWarning]
    assert len(told) == 1, told
    assert "MemoryError: too little" in told[0]


def test_losses_are_scaled_as_in_training() -> None:
    """The scaler itself stays as it is."""
    for scaler, scale in (
        (None, 1.0),
        (GradScaler("cpu", init_scale=8.0), 8.0),
        (GradScaler("cpu", enabled=False), 1.0),
    ):
        state: Any = SimpleNamespace(scaler=scaler)
        assert scale_of(state.scaler) == scale
