"""A learning rate that the script has changed since the checkpoint: the line that says so gives a way that works, whatever the scheduler."""

import warnings

import pytest
import torch
from support.options import grouped
from torch.optim import lr_scheduler

from shrinkpoint import Checkpointer

_SCHEDULERS = {
    "none": lambda optimizer, lr: None,
    "lambda": lambda optimizer, lr: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "step": lambda optimizer, lr: lr_scheduler.StepLR(optimizer, 3),
    "multiplied": lambda optimizer, lr: lr_scheduler.MultiplicativeLR(optimizer, lambda n: 0.95),
    "cosine": lambda optimizer, lr: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "restarts": lambda optimizer, lr: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "one cycle": lambda optimizer, lr: lr_scheduler.OneCycleLR(optimizer, lr, total_steps=30),
    "cycles": lambda optimizer, lr: lr_scheduler.CyclicLR(optimizer, lr, 3 * lr, 3, cycle_momentum=False),
    "sequence": lambda optimizer, lr: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)],
        [4],
    ),
    "chained": lambda optimizer, lr: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}  # fmt: skip


def _made(kind, lr, url):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = _SCHEDULERS[kind](optimizer, lr)
    more = {} if scheduler is None else {"scheduler": scheduler}
    return optimizer, scheduler, Checkpointer(url, model, optimizer, **grouped(scheme="lossless", **more))


def _rates(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


def _all(scheduler):
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", ()):
            yield from _all(inner)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("kind", _SCHEDULERS)
def test_the_way_to_another_rate_works_with_the_scheduler_that_there_is(tmp_path, kind):
    optimizer, scheduler, checkpointer = _made(kind, 0.1, tmp_path)
    _rates(optimizer, scheduler, 5)
    now = optimizer.param_groups[0]["lr"]
    checkpointer.save(5, wait=True)
    checkpointer.close()

    optimizer, scheduler, checkpointer = _made(kind, 0.2, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer.resume()
    [message] = [str(one.message) for one in caught]
    assert optimizer.param_groups[0]["lr"] == now
    [group], advice = optimizer.param_groups, message.rpartition("after resuming")[2]
    if kind == "none":
        assert "set lr in optimizer.param_groups" in message
        group["lr"] = 0.2
    else:
        assert f"the rate is {now:g} now" in message
        assert "multiply by 2 after" in message
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if f"{name} " in advice or f"{name}," in advice:
                group[name] *= 2
        for each in _all(scheduler):
            for name in ("base_lrs", "max_lrs"):
                if f"{name} " in advice and hasattr(each, name):
                    setattr(each, name, [2 * rate for rate in getattr(each, name)])
                    assert type(each).__name__ in advice
    changed = _rates(optimizer, scheduler, 12)
    optimizer, scheduler, _ = _made(kind, 0.2, tmp_path / "fresh")
    assert changed == pytest.approx(_rates(optimizer, scheduler, 17)[5:])
