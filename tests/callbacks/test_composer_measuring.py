"""How Composer's callback measures the quality of a save, and averages gradients, without training noticing."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("composer")

from composer import DataSpec
from composer.core import Event, State
from support import composer_models
from support.composer_callbacks import At, Make, first, url_of
from support.composer_data import BATCH, Points
from support.composer_models import Crash, Setup, Tiny, assert_continues, assert_same, fit
from support.reports import saver_of
from torch.utils.data import DataLoader

from shrinkpoint.engine.request import SaveRequest
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver

SEEN: list[Any] = []
"""Not an attribute: what a measurement changes in the model and its class is put back."""


class Watched(Tiny):
    """Notes the batches on which it is evaluated in the midst of training, by their indices and sizes."""

    def loss(self, outputs: Any, batch: Any, *rest: Any) -> Any:
        if not self.training:
            SEEN.append(batch[0].tolist())
        return super().loss(outputs, batch, *rest)


@pytest.mark.parametrize("microbatch", [None, 4])
@pytest.mark.parametrize("eval_interval", ["1ba", None])
def test_the_loss_is_measured_on_what_the_model_gets(
    saving: Make, monkeypatch: pytest.MonkeyPatch, eval_interval: str | None, microbatch: int | None
) -> None:
    monkeypatch.setattr("support.composer_models.Tiny", Watched)
    SEEN.clear()
    setup = Setup(width=512, eval_interval=eval_interval, microbatch=microbatch)
    outcome = fit(saving(scheme="inshrinkerator", save_interval="10ba"), setup=setup)
    trained = [list(indices) for row in outcome.trace[:2] for indices, _ in row[3]][:2]
    held_out = [list(range(BATCH)), list(range(BATCH, 2 * BATCH))]
    expected = held_out if eval_interval else trained
    assert SEEN
    assert all(batch in expected for batch in SEEN)
    assert {len(batch) for batch in SEEN} == {BATCH if eval_interval else microbatch or BATCH}


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
    monkeypatch.setattr("shrinkpoint.session.probe.world", lambda: SimpleNamespace(size=2))
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
def test_an_optimizer_that_computes_the_loss_goes_on(saving: Make, options: dict[str, str]) -> None:
    setup = Setup(**options, scheduler="none", duration="2ep")  # type: ignore[arg-type]
    whole = fit(setup=setup)
    fit(saving(), Crash(7), setup=setup)
    rest = fit(saving(), setup=setup, seed=9)
    assert first(rest) == 5
    assert_continues(whole, rest)


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
        saver, average = saver_of(callback), callback._session.run._gradients._average
        accept, update = saver.accept, average.update

        def watched(request: SaveRequest) -> Any:
            seen.append(request.gradients)
            return accept(request)

        def counted(*args: Any) -> Any:
            updates.append(int(state.timestamp.batch))
            return update(*args)

        saver.accept, average.update = watched, counted  # type: ignore[method-assign]

    setup = Setup(optimizer=optimizer, algorithms=algorithms, duration="1ep", scheduler="none")
    names = dict(Tiny(setup).named_parameters()).keys()
    fit(callback, At(Event.FIT_START, start), setup=setup)
    assert [None if gradients is None else gradients.keys() for gradients in seen] == [
        names if given else None
    ] * 2
    assert updates == (
        list(range(1, 9)) if given else []
    )  # once a batch, however often its loss was computed
