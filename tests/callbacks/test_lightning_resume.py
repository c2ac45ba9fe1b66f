"""A run that was interrupted and continues by itself equals one that was not, bit by bit.

The continuing run has another seed and no ckpt_path; the uninterrupted one never sees our callback.
"""

import signal
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from support.lightning_models import Crash, Outcome, Setup, Tiny, assert_continues, fit

from shrinkpoint.callbacks.lightning import CompressedCheckpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

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
    "at an epoch's very end": Case(
        every=8, crash=26, resumes_at=24, saving={"save_on_train_epoch_end": True}
    ),
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


def train(case: Case, stateful: bool, *callbacks: Any, **more: Any) -> Outcome:
    torch.set_num_threads(1)
    monitor = None if case.trainer.get("limit_val_batches") == 0 else "val_loss"
    setup = Setup(stateful=stateful, **case.data)
    return fit(*callbacks, setup=setup, monitor=monitor, **case.trainer, **more)


@cache
def uninterrupted(name: str, stateful: bool) -> Outcome:
    return train(CASES[name], stateful)


@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "stateful"])
@pytest.mark.parametrize("name", CASES)
def test_continues_bit_by_bit(name: str, stateful: bool) -> None:
    case = CASES[name]

    def saving() -> CompressedCheckpoint:
        return CompressedCheckpoint(
            f"memory://resume/{name}/{stateful}".replace(" ", "-").replace("'", ""),
            every_n_train_steps=case.every,
            scheme="lossless",
            busy="wait",
            **case.saving,
        )

    train(case, stateful, saving(), Crash(case.crash, sigterm=case.sigterm, batch=case.in_batch))
    rest = train(case, stateful, saving(), seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(uninterrupted(name, stateful), rest)


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
