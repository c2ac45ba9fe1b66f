"""A Lightning run that logs its steps continues, bit by bit, from a later step than its last checkpoint's."""

import itertools
import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.lightning_models import Crash, Outcome, Setup, Tiny, assert_continues, assert_same, fit
from support.options import grouped
from support.reports import saver_of

import shrinkpoint
from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.steps.options import StepLog


class TwoOptimizers(Tiny):
    """Manual optimization: two optimizers, the second one at every other batch."""

    def __init__(self, setup: Setup | None = None) -> None:
        super().__init__(setup)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward((self.other(batch[1]) - self.net(batch[1]).detach()).square().mean())
            second.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net.parameters(), lr=1e-2),
            torch.optim.SGD(self.other.parameters(), lr=1e-2, momentum=0.9),
        ]


def scaled() -> MixedPrecision:
    """As ``precision="16-mixed"`` on a GPU; the first steps are skipped, until the scale is small enough."""
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    )


class Accumulating(TwoOptimizers):
    """Manual optimization that accumulates over two batches, and has gradients left where a segment may end."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = Tiny.training_step(self, batch, batch_idx)
        first, second = self.optimizers()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(first, 0.1, "norm")
            first.step()
            first.zero_grad()
        self.manual_backward((self.other(batch[1]) - self.net(batch[1]).detach()).square().mean())
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()
        return loss.detach()


class CompiledStep(Tiny):
    """As a user compiles it: after the scheduler, which refuses to wrap a compiled step."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        optimizer = configured["optimizer"]
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        return configured


class CompiledNet(Tiny):
    """The forward and the backward pass are compiled."""

    def __init__(self, setup: Setup | None = None) -> None:
        super().__init__(setup)
        self.net.compile(backend="aot_eager")


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 2, "max_epochs": 8, "gradient_clip_val": 0.1},
    "validation in mid epoch": {"val_check_interval": 0.5},
    "no validation": {"limit_val_batches": 0},
    "bfloat16": {"precision": "bf16-mixed"},
    "stateful": {"setup": {"stateful": True}},
    "plateau": {"setup": {"plateau": "val_loss"}},
    "manual": {"module": TwoOptimizers},
    "fused": {"setup": {"optimizer": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)}},
    "scaler": {"plugins": scaled, "gradient_clip_val": 0.1},
    "scaler, fused": {
        "plugins": scaled,
        "setup": {"optimizer": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)},
    },
    "scaler, manual": {"plugins": scaled, "module": TwoOptimizers},
    "accumulation, manual": {"module": Accumulating, "max_epochs": 8},
    "compiled step": {"module": CompiledStep},
    "compiled module": {"module": CompiledNet},
}
COMPILED_ANEW = ("compiled step",)
"""Lightning gives each step another closure, for which it is compiled again, until torch no longer tries."""


def train(case: str, *callbacks: Callback, **more: Any) -> Outcome:
    torch.set_num_threads(1)
    options = dict(CASES[case])
    setup = Setup(**options.pop("setup", {}))
    monitor = None if options.get("limit_val_batches") == 0 else "val_loss"
    pl.seed_everything(more.get("seed", 1), verbose=False)
    module = options.pop("module", Tiny)(setup)
    if "plugins" in options:
        options["plugins"] = options["plugins"]()
    return fit(*callbacks, module=module, monitor=monitor, **options, **more)


@cache
def whole(case: str) -> Outcome:
    return train(case)


def saving(folder: Path, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        f"{folder}/run",
        **grouped(
            **{
                "every_n_train_steps": 10,
                "scheme": "lossless",
                "busy": "wait",
                "step_log": StepLog(segment_steps=2, overhead=None),
                "log_url": f"{folder}/log",
                **options,
            }
        ),
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in COMPILED_ANEW else case for case in CASES],
)
def test_continues_bit_by_bit_from_the_log(case: str, tmp_path: Path) -> None:
    crash = 24 if "manual" in case else 25
    train(case, saving(tmp_path), Crash(crash))
    rest = train(case, saving(tmp_path), seed=999)
    step = rest.trace[0][2]
    assert 20 < step <= crash
    assert_continues(whole(case), rest)


def test_a_scaler_skips_steps_and_unscales_within_the_fused_optimizer(tmp_path: Path) -> None:
    """So that the cases of it say something."""
    for case, inside in (("scaler", False), ("scaler, fused", True)):
        scales: list[float] = []

        class Look(Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                scales.append(trainer.precision_plugin.scaler.get_scale())  # noqa: B023

        callback = saving(tmp_path / case.replace(", ", "-"))
        train(case, callback, Look(), Crash(25))
        assert scales[0] < 2.0**20
        assert any(later > before for before, later in itertools.pairwise(scales))
        names = {
            name
            for path in (tmp_path / case.replace(", ", "-") / "log").rglob("*.steps")
            for record in _header(path)["records"]
            for event in record["events"]
            for name in event["attributes"]
        }
        assert names == ({"grad_scale", "found_inf"} if inside else set())


def _header(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(data[80 : 80 + int.from_bytes(data[16:24], "little")])


class ValidatesOthers(Callback):
    """Validates other weights than are trained, and puts these back."""

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.stored = [p.detach().clone() for p in module.parameters()]
        for parameter in module.parameters():
            parameter.data.mul_(0.5)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter, value in zip(module.parameters(), self.stored, strict=True):
            parameter.data.copy_(value)


def test_weights_that_are_swapped_for_a_validation(tmp_path: Path) -> None:
    often = {"val_check_interval": 0.25}
    undisturbed = train("plain", ValidatesOthers(), **often)
    train("plain", ValidatesOthers(), saving(tmp_path), Crash(25), **often)
    rest = train("plain", ValidatesOthers(), saving(tmp_path), seed=999, **often)
    assert 20 < rest.trace[0][2] <= 25
    assert_continues(undisturbed, rest)


def test_kill_9(tmp_path: Path) -> None:
    class Kill(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 18:
                saver_of(callback).flush()
                callback._session.run.log.flush()  # what is written does not depend on the machine's speed
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        callback = saving(tmp_path)
        train("plain", callback, Kill())
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    rest = train("plain", saving(tmp_path), seed=999)
    assert 16 <= rest.trace[0][2] <= 18
    assert_continues(whole("plain"), rest)


def test_the_checkpoint_of_a_step_is_not_replayed(tmp_path: Path) -> None:
    train("plain", saving(tmp_path), Crash(25))
    rest = train("plain", saving(tmp_path), seed=999, ckpt_path=f"{tmp_path}/run#step=10")
    assert rest.trace[0][2] == 10
    assert_continues(whole("plain"), rest)


def test_an_average_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.steps.training._ALLOWANCE", 40 * 1024)
    if not hasattr(pl.callbacks, "WeightAveraging"):
        pytest.skip("this Lightning has no WeightAveraging")
    averaging = pl.callbacks.EMAWeightAveraging()
    with pytest.warns(ShrinkpointWarning, match="the step log is off: 'the training' contains"):
        fit(saving(tmp_path), averaging, setup=Setup(width=2000), max_epochs=1)


def test_a_small_log(tmp_path: Path) -> None:
    class Weights(Callback):
        def __init__(self) -> None:
            self.seen: dict[int, dict[str, torch.Tensor]] = {}

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            callback._session.run.log.flush()
            self.seen[trainer.global_step] = {k: v.clone() for k, v in module.state_dict().items()}

    weights = Weights()
    log = StepLog(kind="small", segment_steps=1, overhead=None)
    callback = saving(tmp_path, step_log=log, log_url=None)
    fit(callback, weights, setup=Setup(width=400), max_epochs=3)
    assert (tmp_path / "run" / "steps").is_dir()
    found = shrinkpoint.load_weights(f"{tmp_path}/run#step=23")
    true, base = weights.seen[23], weights.seen[20]
    assert found.keys() == true.keys()
    error = (found["net.0.weight"] - true["net.0.weight"]).norm()
    assert 0 < error < (base["net.0.weight"] - true["net.0.weight"]).norm()
    assert_same({"b": found["net.1.running_mean"]}, {"b": true["net.1.running_mean"]})
