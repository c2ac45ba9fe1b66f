import gc
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import support.baseline_schemes  # noqa: F401 - for a scheme of theirs
import torch
from support.containers import identical
from support.mixed_optimizer import MixedSGD
from support.options import grouped
from support.training import OPTIMIZERS, TinyMLP, train
from torch import nn

import shrinkpoint
from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.coding.encode import encode_state
from shrinkpoint.config import Advanced, SaverConfig
from shrinkpoint.errors import (
    ConfigError,
    NoCheckpointError,
    RunMismatchError,
    ShrinkpointWarning,
    StateMismatchError,
)
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")


class Prepared:
    """A loader that accelerate has prepared, without a state unless it is asked for one."""

    use_stateful_dataloader = False

    def state_dict(self):
        raise AttributeError("'DataLoader' object has no attribute 'dl_state_dict'")

    load_state_dict = state_dict


class Run:
    """One process of a training: made afresh, it knows nothing but the URL."""

    def __init__(self, url, optimizer="AdamW", model_class=TinyMLP, **options):
        torch.manual_seed(17)
        random.seed(17)
        np.random.seed(17)
        self.model = model_class()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        options = {
            "scheme": "lossless",
            "every": 2,
            "scheduler": self.scheduler,
            **options,
        }
        self.checkpointer = Checkpointer(str(url), self.model, self.optimizer, **grouped(**options))
        self.losses = []

    def step(self, step):
        noise = torch.rand(1).item() + random.random() + np.random.rand()
        self.optimizer.zero_grad()
        loss = self.model.loss(step) * (1 + noise)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step(loss.item())
        self.losses.append(loss.item())

    def train(self, until, **options):
        start = self.checkpointer.resume()
        for step in range(start, until):
            self.step(step)
            self.checkpointer.step(step + 1)
            self.checkpointer.flush()
        self.checkpointer.close()
        return start


@pytest.mark.parametrize("scheme", ["lossless", "auto"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_find_channels_last_as_they_left_them(tmp_path, name, scheme):
    """They read moments as these lie in memory: in another order, each element would get another one's moment."""

    def process():
        torch.manual_seed(3)
        model = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        more = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.02, fused=True, **more)
        adopt = 2 if scheme == "auto" else False
        return (
            model,
            optimizer,
            Checkpointer(str(tmp_path), model, optimizer, every=3, scheme=scheme, adopt=adopt),
        )

    def step(model, optimizer, seed):
        images = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "there is no way to evaluate|training waits for")
        model, optimizer, first = process()
        for seed in range(3):
            step(model, optimizer, seed)
            first.step(seed + 1)
        first.close()
        again, other, second = process()
        assert second.resume() == 3
        second.close()
    for key, value in other.state[again.weight].items():
        assert value.stride() == optimizer.state[model.weight][key].stride()
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(again, other, seed)
    assert identical(again.state_dict(), model.state_dict())


def test_every_counts_from_the_start_after_a_resume_in_between(tmp_path):
    run = Run(tmp_path, every=None)
    run.checkpointer.save(4, wait=True)
    run.checkpointer.close()
    again = Run(tmp_path, every=3)
    assert again.train(until=10) == 4
    assert [r.step for r in again.checkpointer.reports()] == [6, 9, 10]


def test_metrics_are_those_of_the_step_though_the_loop_goes_on_with_its_tensor(tmp_path):
    run, loss = Run(tmp_path, every=10), torch.tensor(0.5)
    run.step(0)
    run.checkpointer.step(1, metrics={"loss": loss})
    loss.fill_(99)
    run.checkpointer.close()
    (report,) = run.checkpointer.reports()
    assert report.metrics == {"loss": 0.5}


def test_other_optimizers_are_refused_before_anything_is_loaded(tmp_path):
    Run(tmp_path).train(until=2)
    model = TinyMLP()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for optimizer, message in (
        ([torch.optim.AdamW([p]) for p in model.parameters()], "holds 1 optimizers, and this run has 4"),
        (OPTIMIZERS["AdamW-fused-groups"](model), "parameter groups"),
    ):
        other = Checkpointer(str(tmp_path), model, optimizer)
        with pytest.raises(StateMismatchError, match=message):
            other.resume()
        other.close()
    assert identical(dict(model.state_dict()), before)


def test_a_foreign_folder_is_refused_before_training(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RunMismatchError, match="something else"):
        Run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_several_optimizers(tmp_path):
    def make():
        model = TinyMLP()
        inner = torch.optim.AdamW(model.inner.parameters())
        outer = torch.optim.SGD(model.outer.parameters(), lr=0.1, momentum=0.9)
        return model, [inner, outer], Checkpointer(str(tmp_path), model, [inner, outer], scheme="lossless")

    model, optimizers, checkpointer = make()
    for seed in range(3):
        for optimizer in optimizers:
            train(model, optimizer, [seed])
    checkpointer.save(3, wait=True)
    checkpointer.close()
    model_again, optimizers_again, again = make()
    assert again.resume() == 3
    assert identical(dict(model_again.state_dict()), dict(model.state_dict()))
    for one, other in zip(optimizers_again, optimizers, strict=True):
        assert identical(one.state_dict(), other.state_dict())


def test_restored_optimizers_do_not_share_memory_with_what_the_saver_holds(tmp_path):
    Run(tmp_path).train(until=2)
    again = Run(tmp_path)
    assert again.train(until=6) == 2
    third = Run(tmp_path)
    assert third.checkpointer.resume() == 6
    assert identical(third.optimizer.state_dict(), again.optimizer.state_dict())


def test_states_that_are_missing_on_either_side_are_told(tmp_path):
    Run(tmp_path).train(until=2)
    again = Run(tmp_path)
    model, optimizer = again.model, again.optimizer
    sampler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    checkpointer = Checkpointer(str(tmp_path), model, optimizer, sampler=sampler)
    with pytest.warns(ShrinkpointWarning) as caught:
        assert checkpointer.resume() == 2
    messages = sorted(str(warning.message) for warning in caught)
    assert messages == [
        "'sampler' is not in the checkpoint: its state is not restored",
        "'scheduler' is not in this run: its state is not restored",
    ]
    assert all(warning.filename == __file__ for warning in caught)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a positive"),
        ({"every": "500"}, "every must be a positive number of steps, or None, not '500'"),
        ({"every": True}, "every must be a positive"),
        ({"loader": Prepared()}, "loader=.*accelerate has prepared, does not restore its order exactly"),
        ({"loader": [1, 2]}, r"loader=\[1, 2\]: Checkpointer has no such option.*Other keyword arguments"),
        ({"config": SaverConfig()}, "config=.*no such option; give its fields"),
        ({"save_last": False}, "save_last=False: .*the last steps are always saved"),
        ({"near": "/x"}, r"near='/x': .*give url=shrinkpoint.Stores\(..., near=...\)"),
        ({"options": 3}, "options=3: .*give them as scheme="),
        ({"keep_last": -3}, "keep_last must be a positive integer"),
        ({"evaluate": 3.0}, "evaluate must be a function that returns a loss, or None, not 3.0"),
        (
            {"evaluate": lambda: 1.0, "train_loss": torch.ones(2)},
            "train_loss must be a function .* not a Tensor",
        ),
        ({"clip_grad_norm": "1"}, "clip_grad_norm must be a positive number, or None, not '1'"),
        ({"clip_grad_norm": 0}, "clip_grad_norm must be a positive number"),
        ({"advanced": 3}, "advanced=3 must be shrinkpoint.Advanced"),
        ({"advanced": {"busy": "never"}}, "busy must be"),
        ({"advanced": {"bsuy": "wait"}}, "Advanced has no option 'bsuy' .did you mean busy"),
        ({"shceme": "lossless"}, "shceme='lossless': .*did you mean scheme"),
        (
            {"loader": torch.utils.data.DataLoader([1])},
            r"=a DataLoader: \S+ has no such option\. .*StatefulDataLoader",
        ),
        ({"scheduler": None}, "scheduler=None: .*StatefulDataLoader, and never None"),
    ],
)
def test_bad_options(tmp_path, options, message):
    model = TinyMLP()
    with pytest.raises(ConfigError, match=message):
        Checkpointer(
            str(tmp_path / "run"), model, torch.optim.SGD(model.parameters(), lr=1), **grouped(**options)
        )
    assert not (tmp_path / "run").exists()


def test_a_checkpoints_address_names_no_run(tmp_path):
    model = TinyMLP()
    with pytest.raises(ConfigError, match="must name a run without '#'"):
        Checkpointer(str(tmp_path / "run#step=3"), model, torch.optim.SGD(model.parameters(), lr=1))
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_loop_still_finishes_the_save_without_evaluations(tmp_path):
    run = Run(tmp_path)
    calls = []
    checkpointer = Checkpointer(
        str(tmp_path), run.model, run.optimizer, evaluate=lambda: calls.append(1) or 1.0
    )

    def loop():
        with checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert [r.step for r in checkpointer.reports()] == [1]
    assert not calls


def test_why_no_steps_can_be_tried_is_told_once(tmp_path):
    model = TinyMLP()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient)
    options = {"evaluate": lambda: model.loss(0), "train_loss": model.loss, "busy": "wait"}
    options["scheme"] = "inshrinkerator"
    checkpointer = Checkpointer(
        str(tmp_path), model, torch.optim.SGD(model.parameters()), **grouped(**options)
    )
    with pytest.warns(ShrinkpointWarning, match="hooks on their gradients"):
        checkpointer.save(1)
    checkpointer.save(2)
    checkpointer.close()


def test_a_training_loss_needs_an_evaluation(tmp_path):
    model = TinyMLP()
    with pytest.raises(ConfigError, match="train_loss is of use with evaluate="):
        Checkpointer(str(tmp_path), model, torch.optim.SGD(model.parameters()), train_loss=model.loss)


# ---- the last step, skipped saves, signals


def saved_steps(run):
    return [report.step for report in run.checkpointer.reports()]


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 7]), (7, [7]), (8, [7])])
def test_closing_saves_the_last_step(tmp_path, every, steps):
    run = Run(tmp_path, every=every)
    run.train(until=7)
    assert saved_steps(run) == steps
    again = Run(tmp_path, every=every)
    assert again.train(until=7) == 7
    assert identical(again.model.state_dict(), run.model.state_dict())
    assert saved_steps(again) == []  # it is stored already


def test_the_last_step_is_saved_after_the_evaluations_of_the_save_before_it(tmp_path):
    run = Run(tmp_path)
    run.checkpointer = Checkpointer(
        str(tmp_path / "run"),
        run.model,
        run.optimizer,
        every=2,
        evaluate=lambda: run.model.loss(0),
        advanced=Advanced(guards=False),
    )
    run.train(until=5)
    assert saved_steps(run) == [2, 4, 5]


@pytest.fixture
def reference(monkeypatch):
    """Encoding waits until the event is set."""
    free, encode = threading.Event(), encode_state

    def waiting(*args, **options):
        free.wait(60)
        return encode(*args, **options)

    monkeypatch.setattr("shrinkpoint.engine.background.encode_state", waiting)
    yield free
    free.set()


def test_skipped_saves_are_told_once_and_the_last_is_made_up_for(tmp_path, reference, capsys):
    run = Run(tmp_path, every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShrinkpointWarning)
        for step in range(9):
            run.step(step)
            run.checkpointer.step(step + 1)
        reference.set()
        run.checkpointer.close()
    assert saved_steps(run) == [1, 9]
    [message] = [str(warning.message) for warning in caught]
    assert re.match(r"a save is skipped, since that of step 1 .* under way.*busy='wait'", message)
    assert "shrinkpoint: 8 saves were skipped" in capsys.readouterr().err


def test_weights_that_changed_after_the_last_step_are_not_saved_as_its(tmp_path):
    run = Run(tmp_path, every=2)
    for step in range(3):
        run.step(step)
        run.checkpointer.step(step + 1)
        run.checkpointer.flush()
    run.model.load_state_dict(TinyMLP().state_dict())  # the best ones of before, say
    with pytest.warns(
        ShrinkpointWarning,
        match=r"last step, 3, is not saved, for the weights .* call save\(3, wait=True\) right",
    ):
        run.checkpointer.close()
    assert saved_steps(run) == [2]


def replace_one(model):
    parameter = next(model.parameters())
    parameter.data = torch.zeros_like(parameter)


replacing = pytest.mark.parametrize(
    "change", [replace_one, lambda model: model.to(torch.bfloat16), nn.Module.double]
)


@replacing
def test_weights_that_were_replaced_after_the_last_step_are_not_saved_as_its(tmp_path, change):
    """Torch does not count that as a change of them."""
    run = Run(tmp_path, every=2)
    for step in range(3):
        replace_one(run.model)  # before a step it is a part of that
        run.step(step)
        run.checkpointer.step(step + 1)
        run.checkpointer.flush()
    change(run.model)
    with pytest.warns(
        ShrinkpointWarning, match="last step, 3, is not saved, for the weights .* another dtype"
    ):
        run.checkpointer.close()
    assert saved_steps(run) == [2]


@replacing
@pytest.mark.filterwarnings("default::shrinkpoint.errors.ShrinkpointWarning")
def test_weights_that_an_evaluation_replaced_and_put_back_are_saved(tmp_path, change):
    run, calls = Run(tmp_path), []

    def evaluate():
        calls.append(run.model)
        kept = [parameter.data for parameter in run.model.parameters()]
        change(run.model)
        for parameter, data in zip(run.model.parameters(), kept, strict=True):
            parameter.data = data.clone()
        return float(run.model.loss(5))

    given = {"every": 2, "scheme": "uniform", "evaluate": evaluate, "busy": "wait"}
    checkpointer = Checkpointer(tmp_path / "other", run.model, run.optimizer, **grouped(**given))
    for step in range(3):
        run.step(step)
        checkpointer.step(step + 1)
    before = len(calls)
    checkpointer.flush()
    assert len(calls) > before
    checkpointer.close()
    assert [report.step for report in checkpointer.reports()] == [2, 3]


def test_nothing_is_saved_while_an_error_is_handled(tmp_path):
    run = Run(tmp_path, every=2)

    def loop():
        try:
            for step in range(3):
                run.step(step)
                run.checkpointer.step(step + 1)
                run.checkpointer.flush()
            raise ZeroDivisionError
        finally:
            run.checkpointer.close()

    with (
        pytest.warns(ShrinkpointWarning, match="3, is not saved, for ZeroDivisionError"),
        pytest.raises(ZeroDivisionError),
    ):
        loop()
    assert saved_steps(run) == [2]


LOOP = """
import signal, sys, time
import torch
import shrinkpoint

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this process was started under
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = shrinkpoint.Checkpointer(sys.argv[1], model, optimizer, every=10**6, scheme="lossless")
for step in range(checkpointer.resume(), 10**6):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(step + 1)
    print(step + 1, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "statuses"), [(signal.SIGINT, (1, -signal.SIGINT)), (signal.SIGTERM, (128 + signal.SIGTERM,))]
)
def test_a_signal_saves_the_step_under_way_and_ends_the_process(tmp_path, number, statuses):
    program, url, errors = tmp_path / "loop.py", tmp_path / "run", tmp_path / "errors"
    program.write_text(LOOP)
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(program), str(url)], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    last = 0
    try:
        for line in process.stdout:
            last = int(line)
            if last == 5:
                process.send_signal(number)
        process.wait(timeout=120)
    finally:
        process.kill()
    err = errors.read_text()
    assert process.returncode in statuses, err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    [manifest] = RunStore(str(url)).manifests()
    assert manifest.step in (last, last + 1)
    assert f"{number.name}: the run is saved" in err


def test_signals_are_watched_before_the_loop_forks_its_workers(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run = Run(tmp_path)
    run.checkpointer.resume()
    assert signal.getsignal(signal.SIGTERM) != before
    run.checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.filterwarnings("default::shrinkpoint.errors.ShrinkpointWarning")
def test_the_process_ends_as_asked_whatever_the_save_raises(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.checkpointer.resume()

    def broken(*args, **options):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(run.checkpointer.saver, "accept", broken)
    signal.raise_signal(signal.SIGTERM)
    with (
        pytest.warns(ShrinkpointWarning, match="step 1 could not be saved: RuntimeError: CUDA error"),
        pytest.raises(SystemExit) as ended,
    ):
        run.checkpointer.step(1)
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("early", [False, True])
def test_a_signal_in_close_ends_the_process_after_the_last_save(tmp_path, monkeypatch, number, early):
    before = signal.getsignal(number)
    run = Run(tmp_path)
    for step in range(3):
        run.step(step)
        run.checkpointer.step(step + 1)
    if early:
        signal.raise_signal(number)
    flush, sent = run.checkpointer.saver.flush, [early]

    def asked(*arguments):
        if not sent[0]:
            sent[0] = True
            signal.raise_signal(number)
        return flush(*arguments)

    monkeypatch.setattr(run.checkpointer.saver, "flush", asked)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        run.checkpointer.close()
    assert RunStore(str(tmp_path)).manifests()[0].step == 3
    assert signal.getsignal(number) == before
    run.checkpointer.close()  # as an outer finally would


def test_a_log_that_cannot_be_closed_leaves_no_store_open(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", every=50, step_log="exact", log_url=str(tmp_path / "log"))
    run.checkpointer.resume()

    def broken(*, whole):
        raise RuntimeError("the log")

    closed = []
    monkeypatch.setattr(run.checkpointer.step_log, "close", broken)
    monkeypatch.setattr(run.checkpointer.saver, "close", lambda: closed.append(True))
    with pytest.raises(RuntimeError, match="the log"):
        run.checkpointer.close()
    assert closed == [True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_ends_the_process_where_a_with_block_ends(tmp_path, number):
    before = signal.getsignal(number)
    run = Run(tmp_path)

    def train():
        with run.checkpointer:
            run.step(0)
            run.checkpointer.step(1)
            signal.raise_signal(number)

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train()
    assert RunStore(str(tmp_path)).manifests()[0].step == 1
    assert signal.getsignal(number) == before


def test_a_second_signal_in_close_ends_it_at_once(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.step(0)
    run.checkpointer.step(1)
    run.checkpointer.step(3)
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr(run.checkpointer._termination, "_clock", lambda: next(clock))

    def asked(*arguments):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr(run.checkpointer.saver, "flush", asked)
    with pytest.raises(SystemExit):
        run.checkpointer.close()


def test_a_best_metric_that_is_never_given_is_missed_and_nothing_removed(tmp_path):
    run = Run(tmp_path, monitor="val_los", save_top_k=1, keep_last=1, grace_s=0, every=1)
    with pytest.warns(ShrinkpointWarning, match=r"monitor='val_los' is not among .*step 1 \(val_loss\)"):
        run.checkpointer.step(1, metrics={"val_loss": 1.0})
    for step in range(2, 5):
        run.checkpointer.flush()
        run.checkpointer.step(step, metrics={"val_loss": float(step)})  # once is enough
    run.checkpointer.close()
    assert [manifest.step for manifest in RunStore(str(tmp_path)).manifests()] == [4, 3, 2, 1]


def test_a_step_to_resume_must_be_a_number(tmp_path):
    with pytest.raises(ConfigError, match="step='5' must be a whole number"):
        Run(tmp_path).checkpointer.resume("5")


def test_signals_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run = Run(tmp_path)
    run.checkpointer.step(1)
    assert signal.getsignal(signal.SIGINT) != before
    run.checkpointer.close()
    assert signal.getsignal(signal.SIGINT) == before
    other = Run(tmp_path)
    other.checkpointer.step(1)
    other.checkpointer.flush()
    del other
    gc.collect()
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (TinyMLP(), None, "optimizer must be a torch.optim.Optimizer, or a list of them, not None"),
        (TinyMLP(), [None], "not None"),
        (TinyMLP(), list(TinyMLP().parameters()), "not a Parameter"),
        (None, None, "model must be a torch.nn.Module, not None"),
        (torch.optim.SGD(TinyMLP().parameters()), TinyMLP(), "model must be a torch.nn.Module, not a SGD"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused_at_once(tmp_path, model, optimizer, message):
    with pytest.raises(ConfigError, match=message):
        Checkpointer(str(tmp_path / "run"), model, optimizer)
    assert not (tmp_path / "run").exists()


def test_swapped_arguments_print_no_tensors(tmp_path):
    state = TinyMLP().state_dict()
    messages = []
    for call in (
        lambda: shrinkpoint.save(str(tmp_path / "file"), state),
        lambda: shrinkpoint.load(state),
        lambda: Checkpointer(TinyMLP(), str(tmp_path / "run"), []),
        lambda: Run(tmp_path / "run").checkpointer.save(state),
        lambda: Run(tmp_path / "other").checkpointer.save(1, metrics={"loss": torch.ones(5000)}),
        lambda: Checkpointer(str(tmp_path / "run"), TinyMLP(), [], sampler=state),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        messages.append(str(raised.value))
    assert not [message for message in messages if "tensor(" in message or len(message) > 2000], messages
    assert messages[0] == "path must be a path or URL, not an OrderedDict: save(state, path)"


def test_a_learning_rate_that_resuming_overrides_is_told(tmp_path):
    def make(lr, *, scheduled=False):
        model = TinyMLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        more = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)} if scheduled else {}
        url = str(tmp_path / f"run-{scheduled}")
        return optimizer, Checkpointer(url, model, optimizer, **grouped(scheme="lossless", **more)), more

    for scheduled in (False, True):
        optimizer, checkpointer, more = make(0.1, scheduled=scheduled)
        optimizer.step()
        for scheduler in more.values():
            scheduler.step()
        checkpointer.save(1, wait=True)
        checkpointer.close()
        make(0.1, scheduled=scheduled)[1].resume()  # the same: nothing to tell, wherever a scheduler stands
        optimizer, checkpointer, _ = make(0.2, scheduled=scheduled)
        with pytest.warns(
            ShrinkpointWarning, match=r"lr=0.2, which.*SGD, is replaced by the checkpoint's 0.1"
        ) as caught:
            checkpointer.resume()
        assert len(caught) == 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 if scheduled else 0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_in_several_processes_are_warned_that_they_would_stop_each_other(tmp_path, monkeypatch, rank):
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", rank)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Run(tmp_path / "run")
    messages = [str(one.message) for one in told if one.category is ShrinkpointWarning]
    assert ["process 1 of 2" in message for message in messages] == [True] * rank
    assert all(one.filename == __file__ for one in told)


def test_the_default_device_is_the_trainings_own(tmp_path):
    def made():
        model = nn.Linear(4, 4, device="cpu")
        model.register_buffer("nothing", torch.empty(0, device="cpu"))
        return model, torch.optim.SGD(model.parameters(), momentum=0.9)

    with torch.device("meta"):
        model, optimizer = made()
        checkpointer = Checkpointer(tmp_path, model, optimizer, scheme="lossless")
        checkpointer.save(1, wait=True)
        checkpointer.close()
        again, other = made()
        assert Checkpointer(tmp_path, again, other).resume() == 1
    assert identical(dict(again.state_dict()), dict(model.state_dict()))


def milestones(optimizer):
    """At the eighth step it asks the second one's Counter of milestones for its elements."""
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
    drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, drops], [8])


def averaging(optimizer, strategy):
    return torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=9, anneal_strategy=strategy)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(
    "schedule", [milestones, partial(averaging, strategy="cos"), partial(averaging, strategy="linear")]
)
def test_schedules_that_hold_others_and_functions_are_continued(tmp_path, schedule):
    def run():
        model = TinyMLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = schedule(optimizer)
        checkpointer = Checkpointer(
            tmp_path, model, optimizer, every=5, scheme="lossless", scheduler=scheduler
        )
        rates = {}
        for step in range(checkpointer.resume(), 12):
            optimizer.step()
            scheduler.step()
            rates[step] = optimizer.param_groups[0]["lr"]
            if step < 5:
                checkpointer.step(step + 1)
        checkpointer.close()
        return rates

    whole, rest = run(), run()
    assert list(rest) == list(range(5, 12))
    assert rest == {step: whole[step] for step in rest}


def measured(url):
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    x = torch.randn(32, 16)
    return Checkpointer(
        url,
        model,
        torch.optim.AdamW(model.parameters()),
        every=2,
        evaluate=lambda: model(x).pow(2).mean(1),
        advanced=Advanced(busy="wait"),
    )


def test_one_that_is_dropped_without_close_ends_its_save_and_lets_go_of_the_model(tmp_path):
    checkpointer = measured(tmp_path / "run")
    checkpointer.resume()
    saver, model = checkpointer.saver, weakref.ref(checkpointer._objects.model)
    checkpointer.step(2)  # asks for evaluations, which nobody will make
    del checkpointer
    assert saver._worker.join(60)
    assert [report.step for report in saver.reports()] == [2]
    del saver
    gc.collect()
    assert model() is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("given", ["the same", "a link", "the target", "behind dots", "one of several"])
def test_another_one_of_the_same_run_waits_for_the_save_under_way(tmp_path, given):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    one, other = {
        "the same": ("run", "run"),
        "a link": ("run", "link"),
        "the target": ("link", "run"),
        "behind dots": ("run", "run/../link"),
        "one of several": ("link", "run"),
    }[given]
    several = [tmp_path / "second", tmp_path / "third"] if given == "one of several" else []

    def made(name):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* will be lost together")
            return measured([tmp_path / name, *several] if several else tmp_path / name)

    first = made(one)
    first.resume()
    first.step(2)
    second = made(other)  # as a notebook's cell that is run again
    assert second.resume() == 2
    second.step(4)
    second.close()
    assert "a later saver of this process" in first.reports()[0].reason
    assert [report.step for report in second.reports()] == [4]


@pytest.mark.filterwarnings("ignore:Please use quant_min")
def test_observers_of_quantization_aware_training_are_resized(tmp_path):
    def trained(steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        torch.ao.quantization.prepare_qat(model.train(), inplace=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        checkpointer = Checkpointer(tmp_path / "run", model, optimizer, scheme="lossless")
        begun = checkpointer.resume()
        for _ in range(begun, steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).pow(2).mean().backward()
            optimizer.step()
        checkpointer.save(steps, wait=True)
        checkpointer.close()
        return begun, dict(model.state_dict())

    first = trained(2)
    again = trained(2)
    assert again[0] == 2
    assert identical(again[1], first[1])
    other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    other.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(other.train(), inplace=True)
    with pytest.raises(StateMismatchError, match=r"of other shapes: 2.weight is \(3, 6\) here"):
        Checkpointer(tmp_path / "run", other, torch.optim.SGD(other.parameters())).resume()


def mixed_run(url, until, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    optimizer = MixedSGD(model.parameters())
    with Checkpointer(str(url), model, optimizer, every=5, scheme="lossless") as checkpointer:
        for step in range(checkpointer.resume(), until):
            optimizer.zero_grad()
            model(torch.randn(16, 8, dtype=dtype)).pow(2).mean().backward()
            optimizer.step()
            checkpointer.step(step + 1)
            checkpointer.flush()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_state_of_weights_in_another_dtype_is_converted_with_them(tmp_path):
    mixed_run(tmp_path, 6)
    with pytest.warns(ShrinkpointWarning, match="another dtype"):
        state = mixed_run(tmp_path, 5, torch.float64)["optimizer"]["state"][0]
    assert state["master"].dtype is torch.float64


@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", ["step", "save"])
def test_calls_of_several_threads_are_made_one_after_another(tmp_path, monkeypatch, call):
    run = Run(tmp_path, every=1, busy="wait")
    run.checkpointer.resume()
    take, inside = Snapshotter.take, threading.Event()

    def slowly(*arguments):
        inside.set()
        time.sleep(0.1)  # the second call is made by then
        return take(*arguments)

    monkeypatch.setattr(Snapshotter, "take", slowly)
    accepted, errors = [], []

    def go(step):
        try:
            accepted.append(getattr(run.checkpointer, call)(step))
        except Exception as error:  # noqa: BLE001 - is looked at below
            errors.append(error)

    threads = [threading.Thread(target=go, args=(step,)) for step in (1, 2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    run.checkpointer.close()
    assert not errors
    assert [one.step for one in accepted] == [1, 2]
    assert [report.step for report in run.checkpointer.reports()] == [1, 2]
    assert Run(tmp_path).checkpointer.resume() == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", ["step", "save", "close", "flush"])
def test_a_call_by_an_evaluation_is_refused(tmp_path, call):
    """It would wait for the save that waits for the evaluation."""
    run, errors = Run(tmp_path), []

    def evaluate():
        try:
            getattr(checkpointer, call)(*([2] if call in ("step", "save") else []))
        except ConfigError as error:
            errors.append(error)
            raise
        return float(run.model.loss(5))

    options = {"every": 1, "busy": "wait", "scheme": "uniform", "evaluate": evaluate}
    checkpointer = Checkpointer(str(tmp_path / "other"), run.model, run.optimizer, **grouped(**options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that evaluations fail
        assert checkpointer.save(1, wait=True).step == 1
        checkpointer.close()
    assert f"{call} was called " in str(errors[0])
    assert [report.step for report in checkpointer.reports()] == [1]


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        ("4", None, "step='4' must be a whole number"),
        (4.5, None, "step=4.5 must be a whole number"),
        (4, [1], r"metrics=\[1\] must be a dict of numbers by name"),
        (4, {"loss": "low"}, r"metrics\['loss'\]='low' must be one number"),
    ],
)
@pytest.mark.parametrize("monitored", [False, True])
@pytest.mark.parametrize("due", [False, True])
def test_a_wrong_step_or_metric_is_refused_at_once_and_the_last_step_is_saved(
    tmp_path, step, metrics, message, due, monitored
):
    """Where none is due as well: at the end the last step could not be saved with it."""
    more = {"monitor": "loss", "save_top_k": 2} if monitored else {}
    run = Run(tmp_path, every=2 if due else 100, **more)
    run.checkpointer.resume()
    run.checkpointer.step(3, metrics={"loss": 1.0})
    for call in (run.checkpointer.step, run.checkpointer.save):
        with pytest.raises(ConfigError, match=message):
            call(step, metrics=metrics)
    run.checkpointer.close()
    assert [report.step for report in run.checkpointer.reports()] == [3]


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_steps_may_be_numbers_of_numpy_and_torch(tmp_path, kind):
    run = Run(tmp_path, every=2)
    run.checkpointer.resume()
    step = kind(0)
    for _ in range(5):
        step += 1  # a tensor is counted up in place: the step before must not be one with it
        run.checkpointer.step(step)
        run.checkpointer.flush()
    run.checkpointer.close()
    assert [report.step for report in run.checkpointer.reports()] == [2, 4, 5]
    again = Run(tmp_path)
    assert again.checkpointer.resume(kind(4)) == 4
    with pytest.raises(NoCheckpointError, match="step 3; "):
        again.checkpointer.resume(kind(3))
