"""A run that was interrupted and continues by itself equals one that was not, bit by bit.

The continuing run has another seed and no ckpt_path; the uninterrupted one never sees our callback.
"""

import itertools
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from support.lightning_models import Crash, Outcome, Setup, Tiny, assert_continues, fit
from support.matrices import some_fast
from support.options import grouped

import shrinkpoint
from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.errors import ConfigError, ShrinkpointWarning, StateMismatchError
from shrinkpoint.saver import Saver

FOREVER = 10**6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to save, to be interrupted and to train."""

    every: int
    """Save after so many steps."""
    crash: int
    """Step after which the first run ends."""
    resumes_at: int
    """Step from which the second run must train."""
    sigterm: bool = False
    in_batch: int | None = None
    saving: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


NO_VALIDATION = {"limit_val_batches": 0}
STEPS = {"max_steps": 30, "max_epochs": -1}
SHORT = {"max_epochs": 2}

CASES = {
    "mid epoch": Case(every=5, crash=23, resumes_at=20),
    "last batch of an epoch": Case(every=8, crash=26, resumes_at=24),
    "validation in mid epoch": Case(every=4, crash=23, resumes_at=20, trainer={"val_check_interval": 0.5}),
    "validation across epochs": Case(
        every=3, crash=23, resumes_at=21, trainer={"val_check_interval": 3, "check_val_every_n_epoch": None}
    ),
    "accumulation": Case(every=2, crash=8, resumes_at=6, trainer={"accumulate_grad_batches": 3}),
    "accumulation mid epoch": Case(every=2, crash=5, resumes_at=4, trainer={"accumulate_grad_batches": 3}),
    "max_steps": Case(every=5, crash=18, resumes_at=15, trainer=STEPS),
    "max_steps, last batch": Case(every=8, crash=18, resumes_at=16, trainer=STEPS),
    "max_steps, last batch, no validation": Case(
        every=8, crash=18, resumes_at=16, trainer=STEPS | NO_VALIDATION
    ),
    "no validation": Case(every=5, crash=23, resumes_at=20, trainer=NO_VALIDATION),
    "no validation, last batch": Case(every=8, crash=26, resumes_at=24, trainer=NO_VALIDATION),
    "validation every 2 epochs": Case(
        every=5, crash=23, resumes_at=20, trainer={"check_val_every_n_epoch": 2}
    ),
    "validation every 2 epochs, last batch": Case(
        every=8, crash=26, resumes_at=24, trainer={"check_val_every_n_epoch": 2}
    ),
    "plateau": Case(every=5, crash=23, resumes_at=20, data={"plateau": "val_loss"}),
    "plateau, last batch": Case(every=8, crash=26, resumes_at=24, data={"plateau": "val_loss"}),
    "plateau, last batch, no validation": Case(
        every=8, crash=26, resumes_at=24, trainer=NO_VALIDATION, data={"plateau": "train_loss"}
    ),
    "limited epochs": Case(
        every=6, crash=20, resumes_at=18, trainer={"limit_train_batches": 6} | NO_VALIDATION
    ),
    "loader's own generator": Case(every=5, crash=23, resumes_at=20, data={"generator": True}),
    "loader's own generator, first epoch": Case(every=5, crash=6, resumes_at=5, data={"generator": True}),
    "loader's own generator, last batch": Case(every=8, crash=18, resumes_at=16, data={"generator": True}),
    "stream": Case(every=5, crash=23, resumes_at=20, data={"stream": True}),
    "stream, last batch": Case(every=8, crash=18, resumes_at=16, data={"stream": True}),
    "sigterm": Case(every=FOREVER, crash=13, resumes_at=13, sigterm=True),
    "sigterm, last batch": Case(every=FOREVER, crash=16, resumes_at=16, sigterm=True),
    "sigterm, last batch, no validation": Case(
        every=FOREVER, crash=16, resumes_at=16, sigterm=True, trainer=NO_VALIDATION
    ),
    "sigterm, max_steps, last batch": Case(
        every=FOREVER, crash=16, resumes_at=16, sigterm=True, trainer=STEPS | NO_VALIDATION
    ),
    "sigterm before validation in mid epoch": Case(
        every=FOREVER, crash=12, resumes_at=12, sigterm=True, trainer={"val_check_interval": 0.5}
    ),
    "sigterm in mid accumulation": Case(
        every=FOREVER, crash=4, in_batch=4, resumes_at=4, sigterm=True, trainer={"accumulate_grad_batches": 3}
    ),
    "2 workers": Case(every=5, crash=12, resumes_at=10, trainer=SHORT, data={"workers": 2}),
    "2 workers, last batch": Case(every=8, crash=12, resumes_at=8, trainer=SHORT, data={"workers": 2}),
}


def both_loaders(cases: Iterable[str]) -> list[Any]:
    """Every case with torch's loader or a stateful one in turn; with both in `make test-slow`."""
    fast = [(name, bool(number % 2)) for number, name in enumerate(cases)]
    return some_fast(itertools.product(cases, (False, True)), fast, [])


def train(case: Case, stateful: bool, *callbacks: Any, **more: Any) -> Outcome:
    torch.set_num_threads(1)
    monitor = None if case.trainer.get("limit_val_batches") == 0 else "val_loss"
    setup = Setup(stateful=stateful, **case.data)
    return fit(*callbacks, setup=setup, monitor=monitor, **case.trainer, **more)


@cache
def uninterrupted(name: str, stateful: bool) -> Outcome:
    return train(CASES[name], stateful)


@pytest.mark.parametrize(("name", "stateful"), both_loaders(CASES))
def test_continues_bit_by_bit(name: str, stateful: bool) -> None:
    case = CASES[name]

    def saving() -> CompressedCheckpoint:
        return CompressedCheckpoint(
            f"memory://resume/{name}/{stateful}".replace(" ", "-").replace("'", ""),
            **grouped(every_n_train_steps=case.every, scheme="lossless", busy="wait", **case.saving),
        )

    train(case, stateful, saving(), Crash(case.crash, sigterm=case.sigterm, batch=case.in_batch))
    rest = train(case, stateful, saving(), seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(uninterrupted(name, stateful), rest)


@pytest.mark.parametrize(("crash", "workers"), [(23, 0), (6, 2)])
def test_a_sampler_with_a_generator_of_its_own_continues_bit_by_bit(crash: int, workers: int) -> None:
    case = Case(every=5, crash=crash, resumes_at=5 * (crash // 5), data={"sampler": True, "workers": workers})

    def saving() -> CompressedCheckpoint:
        options = grouped(every_n_train_steps=case.every, scheme="lossless", busy="wait")
        return CompressedCheckpoint(f"memory://resume/sampler/{crash}", **options)

    train(case, False, saving(), Crash(crash))
    rest = train(case, False, saving(), seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(train(case, False), rest)


def test_a_sampler_whose_order_a_stateful_loader_does_not_restore_is_told() -> None:
    case = Case(every=5, crash=23, resumes_at=20, data={"sampler": True})

    def saving() -> CompressedCheckpoint:
        options = grouped(every_n_train_steps=case.every, scheme="lossless", busy="wait")
        return CompressedCheckpoint("memory://resume/stateful-sampler", **options)

    train(case, True, saving(), Crash(case.crash))
    with pytest.warns(ShrinkpointWarning, match="Shuffled draws from a generator of its own"):
        train(case, True, saving(), seed=999)


class Accumulating(Callback):
    """Accumulates the batches of later epochs in pairs."""

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        trainer.accumulate_grad_batches = 1 + (trainer.current_epoch > 0)


def test_accumulation_that_a_hook_sets_continues_bit_by_bit() -> None:
    case = Case(every=5, crash=12, resumes_at=10)

    def saving() -> CompressedCheckpoint:
        options = grouped(every_n_train_steps=case.every, scheme="lossless", busy="wait")
        return CompressedCheckpoint("memory://resume/accumulating", **options)

    train(case, False, saving(), Accumulating(), Crash(case.crash))
    rest = train(case, False, saving(), Accumulating(), seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(train(case, False, Accumulating()), rest)


class ByHand(Tiny):
    """Two optimizers that take turns: in every other step one uses gradients that two backward passes have summed."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.zeros = False, zeros

    def configure_optimizers(self) -> Any:
        halves = self.net[:2].parameters(), self.net[2:].parameters()
        return [torch.optim.Adam(each, 1e-2) for each in halves], []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        (second if batch_idx % 2 else first).step()
        if batch_idx % 2:
            for each in (first, second):
                each.zero_grad(set_to_none=not self.zeros)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("saved", [11, 12])
def test_gradients_that_manual_optimization_has_not_used_continue_bit_by_bit(saved: int, zeros: bool) -> None:
    url = f"memory://resume/by-hand-{saved}-{zeros}"

    def train(*callbacks: Callback, **more: Any) -> Outcome:
        torch.manual_seed(1)
        return fit(*callbacks, monitor=None, module=ByHand(zeros), limit_val_batches=0, **more)

    def saving() -> CompressedCheckpoint:
        return CompressedCheckpoint(url, **grouped(every_n_train_steps=1, scheme="lossless", busy="wait"))

    train(saving(), Crash(saved + 1))  # which is called before
    assert set(shrinkpoint.load(url)["shrinkpoint"]["gradients"]) == (
        {"net.4.weight", "net.4.bias"} if saved % 2 else set()
    )
    rest = train(saving(), seed=999)
    assert rest.trace[0][2] == saved
    assert_continues(train(), rest)


class Evaluating(Callback):
    """Puts the normalization into evaluation mode after the third step, and back after the 13th."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step in (3, 13):
            module.net[1].train(trainer.global_step == 13)


@pytest.mark.parametrize("crash", [7, 14])
def test_parts_in_evaluation_mode_are_so_after_a_save_behind_a_validation(crash: int) -> None:
    case = Case(every=4, crash=crash, resumes_at=4 * (crash // 4), trainer={"val_check_interval": 0.5})

    def saving() -> CompressedCheckpoint:
        options = grouped(every_n_train_steps=case.every, scheme="lossless", busy="wait")
        return CompressedCheckpoint(f"memory://resume/evaluating/{crash}", **options)

    train(case, False, saving(), Evaluating(), Crash(case.crash))
    rest = train(case, False, saving(), Evaluating(), seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(train(case, False, Evaluating()), rest)


class Jittering(Callback):
    """Scales gradients by a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad *= 1 + 0.1 * self.generator.normal()


def test_a_callback_with_a_generator_continues_bit_by_bit() -> None:
    case = Case(every=5, crash=12, resumes_at=10)

    def saving() -> CompressedCheckpoint:
        options = grouped(every_n_train_steps=case.every, scheme="lossless", busy="wait")
        return CompressedCheckpoint("memory://resume/jittering", **options)

    train(case, False, saving(), Crash(case.crash), Jittering())
    assert_continues(train(case, False, Jittering()), train(case, False, saving(), Jittering(), seed=999))


class Undoing(Callback):
    """Loads what was before, as Lightning's tuners do in this hook."""

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        trainer._checkpoint_connector.resume_end()


def test_a_resume_that_a_callback_undoes_is_an_error() -> None:
    case = Case(every=5, crash=12, resumes_at=10)

    def saving() -> CompressedCheckpoint:
        options = grouped(every_n_train_steps=case.every, scheme="lossless", busy="wait")
        return CompressedCheckpoint("memory://resume/undoing", **options)

    train(case, False, saving(), Crash(case.crash))
    with pytest.raises(
        StateMismatchError, match=r"continued from step 10, and is at step 0 .* LearningRateFinder"
    ):
        train(case, False, saving(), Undoing(), seed=999)


ADOPTING = ("mid epoch", "validation in mid epoch", "accumulation mid epoch", "plateau")
"""Cases that the fast suite tries with adoption: nothing of it depends on the data."""
ADOPTING_SLOWLY = (
    "loader's own generator, last batch",
    "stream",
    "sigterm in mid accumulation",
    "2 workers, last batch",
)


@pytest.mark.parametrize(
    ("name", "stateful"),
    some_fast(
        itertools.product(CASES, (False, True)),
        [(name, False) for name in ADOPTING],
        [(name, True) for name in ADOPTING_SLOWLY],
    ),
)
def test_adopting_training_continues_bit_by_bit(name: str, stateful: bool) -> None:
    """With the default scheme, lossy as it is: the undisturbed run has gone on from its checkpoints, too."""
    case = CASES[name]
    url = f"memory://adopt/{name}/{stateful}".replace(" ", "-").replace("'", "")

    def saving(where: str) -> CompressedCheckpoint:
        return CompressedCheckpoint(
            f"{url}/{where}",
            **grouped(every_n_train_steps=case.every, adopt=8, max_degradation=0.5, **case.saving),
        )

    whole = train(case, stateful, saving("whole"))
    train(case, stateful, saving("run"), Crash(case.crash, sigterm=case.sigterm, batch=case.in_batch))
    rest = train(case, stateful, saving("run"), seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(whole, rest)
    manifests = Saver(f"{url}/whole").store.manifests()
    assert any(m.meta["save"]["measured"] == "measured" for m in manifests) or case.every == FOREVER


def adopting(url: str, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        url, **grouped(every_n_train_steps=5, adopt=True, max_degradation=0.5, **options)
    )


@pytest.mark.parametrize("stop", [7, pytest.param(13, marks=pytest.mark.slow), 15])
def test_adopting_training_continues_after_a_signal(stop: int) -> None:
    """Between two planned saves the checkpoint is exact; at one it is the planned save."""
    case, url = Case(every=5, crash=stop, resumes_at=stop, trainer=STEPS), f"memory://adopt-signal/{stop}"
    whole = train(case, False, adopting(f"{url}/whole"))
    train(case, False, adopting(f"{url}/run"), Crash(stop, sigterm=True))
    newest = Saver(f"{url}/run").store.manifests()[0]
    assert newest.meta["adoption"]["planned"] == (stop == 15)
    rest = train(case, False, adopting(f"{url}/run"), seed=999)
    assert rest.trace[0][2] == stop
    assert_continues(whole, rest)


def test_adoption_is_refused_where_it_is_no_replay() -> None:
    by_time = CompressedCheckpoint(
        "memory://refused/time", train_time_interval=timedelta(minutes=1), adopt=True
    )
    with pytest.raises(ConfigError, match="a clock would decide"):
        fit(by_time)
    with pytest.raises(ConfigError, match="as in adopt=200"):
        fit(CompressedCheckpoint("memory://refused/steps", every_n_train_steps=5, adopt=True))


class SignalInValidation(Callback):
    """A SIGTERM that arrives while the run validates, which Lightning then breaks off."""

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 16:
            signal.raise_signal(signal.SIGTERM)


class SignalAfterOurHook(Tiny):
    """A SIGTERM that arrives when the callbacks have seen the batch."""

    armed = False

    def on_train_batch_end(self, *_: Any) -> None:
        if self.armed and self.trainer.global_step == 13:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "options", [{}, {"val_check_interval": 0.5}, {"max_steps": 30, "max_epochs": -1}], ids=str
)
def test_continues_after_a_signal_in_validation(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    url = f"memory://resume/validation/{len(str(options))}"

    def saving() -> CompressedCheckpoint:
        return CompressedCheckpoint(url, every_n_train_steps=FOREVER, scheme="lossless")

    whole = fit(**options)
    fit(saving(), SignalInValidation(), **options)
    rest = fit(saving(), seed=999, **options)
    assert rest.trace[0][2] == 16
    assert_continues(whole, rest)


def test_continues_after_a_signal_between_batches() -> None:
    torch.set_num_threads(1)
    url = "memory://resume/between"
    pl.seed_everything(1, verbose=False)
    whole = fit(module=SignalAfterOurHook())
    pl.seed_everything(1, verbose=False)
    module = SignalAfterOurHook()
    module.armed = True
    fit(CompressedCheckpoint(url, every_n_train_steps=FOREVER, scheme="lossless"), module=module)
    rest = fit(CompressedCheckpoint(url, scheme="lossless"), module=SignalAfterOurHook(), seed=999)
    assert rest.trace[0][2] == 13
    assert_continues(whole, rest)


@dataclass(frozen=True, kw_only=True)
class Longer:
    """One way to end a training that is then to go on for longer."""

    short: dict[str, Any]
    long: dict[str, Any]
    every: int = 7
    saving: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    steps: int
    """After which the first training ends."""


def _steps(**more: Any) -> dict[str, Any]:
    return {"max_epochs": -1} | more


LONGER = {
    "steps, mid epoch": Longer(short=_steps(max_steps=10), long=_steps(max_steps=20), steps=10),
    "steps, mid epoch, no validation": Longer(
        short=_steps(max_steps=10) | NO_VALIDATION, long=_steps(max_steps=20) | NO_VALIDATION, steps=10
    ),
    "steps, last batch": Longer(short=_steps(max_steps=16), long=_steps(max_steps=26), steps=16),
    "steps, last batch, no validation": Longer(
        short=_steps(max_steps=16) | NO_VALIDATION, long=_steps(max_steps=20) | NO_VALIDATION, steps=16
    ),
    "steps, validation there": Longer(
        short=_steps(max_steps=12, val_check_interval=0.5),
        long=_steps(max_steps=20, val_check_interval=0.5),
        steps=12,
    ),
    "steps, saved at every epoch's very end": Longer(
        short=_steps(max_steps=10),
        long=_steps(max_steps=20),
        saving={"every_n_train_steps": None},
        steps=10,
    ),
    "steps, accumulation": Longer(
        short=_steps(max_steps=4, accumulate_grad_batches=3),
        long=_steps(max_steps=8, accumulate_grad_batches=3),
        steps=4,
    ),
    "steps, a checkpoint was due": Longer(
        short=_steps(max_steps=10), long=_steps(max_steps=20), every=5, steps=10
    ),
    "steps, a save is under way": Longer(
        short=_steps(max_steps=10), long=_steps(max_steps=20), saving={"busy": "skip"}, every=9, steps=10
    ),
    "epochs": Longer(short={"max_epochs": 2}, long={"max_epochs": 4}, steps=16),
    "epochs, no validation": Longer(
        short={"max_epochs": 2} | NO_VALIDATION, long={"max_epochs": 4} | NO_VALIDATION, steps=16
    ),
    "epochs, plateau": Longer(
        short={"max_epochs": 2}, long={"max_epochs": 4}, data={"plateau": "val_loss"}, steps=16
    ),
    "epochs, plateau, no validation": Longer(
        short={"max_epochs": 2} | NO_VALIDATION,
        long={"max_epochs": 4} | NO_VALIDATION,
        data={"plateau": "train_loss"},
        steps=16,
    ),
    "epochs, stream": Longer(
        short={"max_epochs": 2}, long={"max_epochs": 4}, data={"stream": True}, steps=16
    ),
    "epochs, then steps": Longer(short={"max_epochs": 2}, long=_steps(max_steps=26), steps=16),
    "steps, then epochs": Longer(short=_steps(max_steps=10), long={"max_epochs": 3}, steps=10),
    "steps, loader's own generator": Longer(
        short=_steps(max_steps=10), long=_steps(max_steps=20), data={"generator": True}, steps=10
    ),
    "steps, 2 workers": Longer(
        short=_steps(max_steps=10), long=_steps(max_steps=18), data={"workers": 2}, steps=10
    ),
}


@pytest.mark.parametrize(("name", "stateful"), both_loaders(LONGER))
def test_trains_longer_as_in_one_go(name: str, stateful: bool) -> None:
    torch.set_num_threads(1)
    case = LONGER[name]
    options = {"every_n_train_steps": case.every, "busy": "wait"} | case.saving

    def saving() -> CompressedCheckpoint:
        url = f"memory://resume/longer/{list(LONGER).index(name)}-{stateful}"
        return CompressedCheckpoint(url, **grouped(scheme="lossless", **options))

    def train(limits: dict[str, Any], *callbacks: Any, **more: Any) -> Outcome:
        monitor = None if limits.get("limit_val_batches") == 0 else "val_loss"
        setup = Setup(stateful=stateful, **case.data)
        return fit(*callbacks, setup=setup, monitor=monitor, **limits, **more)

    whole = train(case.long)
    short = train(case.short, saving())
    assert short.trainer.global_step == case.steps
    rest = train(case.long, saving(), seed=999)
    assert rest.trace[0][2] == case.steps
    assert_continues(whole, rest)


@pytest.fixture(name="ctrl_c")
def _ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which Lightning turns off for good when it has caught one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class CtrlCInValidation(Callback):
    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 16:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "interruption",
    [
        Crash(13, sigterm=True, number=signal.SIGINT),
        Crash(16, sigterm=True, number=signal.SIGINT),
        CtrlCInValidation(),
    ],
    ids=["mid-epoch", "last batch", "validation"],
)
@pytest.mark.parametrize("ours_first", [True, False])
def test_continues_after_a_ctrl_c(
    interruption: Callback, ours_first: bool, ctrl_c: None, request: pytest.FixtureRequest
) -> None:
    torch.set_num_threads(1)
    url = f"memory://resume/ctrl-c/{request.node.name}".replace("[", "-").replace("]", "").replace(" ", "-")
    saving = CompressedCheckpoint(url, every_n_train_steps=FOREVER, scheme="lossless")
    whole = fit()
    interrupted = fit(*([saving, interruption] if ours_first else [interruption, saving]))
    assert interrupted.trainer.interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rest = fit(CompressedCheckpoint(url, scheme="lossless"), seed=999)
    # what comes after our hook is answered at the next batch
    step = 16 if not isinstance(interruption, Crash) else interruption.step
    assert rest.trace[0][2] in (step, step + 1)
    assert_continues(whole, rest)
