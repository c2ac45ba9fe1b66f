"""A loop whose stateful loader is passed by name continues bit by bit, though its iterator draws a seed from torch's generator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped
from torch import nn

import shrinkpoint

pytest.importorskip("torchdata")

from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

_STEPS = 14
_LENGTH = 5  # steps of an epoch


class _Data(torch.utils.data.Dataset):
    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 4 * _LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        exact = torch.full((6,), float(index)).cos()
        return exact + self.noise * torch.rand(6) if self.noise else exact


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


_ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "shuffle, own generator": lambda: {"shuffle": True, "generator": _generator()},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(4 * _LENGTH))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 2 * _LENGTH, 4 * _LENGTH)},
    "weighted, own generator": lambda: {
        "sampler": WeightedRandomSampler([1.0, 2.0] * 2 * _LENGTH, 4 * _LENGTH, generator=_generator())
    },
}


def losses(
    url: Path, until: int, *, workers: int, log: dict[str, str], order: str = "shuffle", noise: float = 0.0
) -> dict[int, float]:
    """Train with shuffled batches and dropout, from where the run is; the loss of each step that is made here."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(_Data(noise), batch_size=4, num_workers=workers, **_ORDERS[order]())
    checkpointer = shrinkpoint.Checkpointer(
        url, model, optimizer, **grouped(every=None, scheme="lossless", loader=loader, **log)
    )
    step, found = checkpointer.resume(), {}
    while step < until:
        for batch in loader:
            optimizer.zero_grad()
            loss = (model(batch) - batch.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            found[step] = float(loss)
            checkpointer.step(step)
            if step == until:
                break
    if not log:
        checkpointer.save(step, wait=True)
    checkpointer.close()
    return found


@pytest.mark.parametrize("order", [order for order in _ORDERS if order != "shuffle"])
def test_the_order_that_a_sampler_has_drawn_is_restored(tmp_path, order):
    whole = losses(tmp_path / "whole", _STEPS, workers=0, log={}, order=order)
    losses(tmp_path / "run", _LENGTH + 2, workers=0, log={}, order=order)
    torch.manual_seed(99)
    rest = losses(tmp_path / "run", _STEPS, workers=0, log={}, order=order)
    assert rest == {step: loss for step, loss in whole.items() if step > _LENGTH + 2}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("killed", [3, _LENGTH, 2 * _LENGTH + 1])
def test_continues_bit_by_bit(tmp_path, killed, workers):
    whole = losses(tmp_path / "whole", _STEPS, workers=workers, log={})
    first = losses(tmp_path / "run", killed, workers=workers, log={})
    rest = losses(tmp_path / "run", _STEPS, workers=workers, log={})
    assert min(rest) == killed + 1
    assert first | rest == whole


def test_continues_bit_by_bit_after_replayed_steps(tmp_path):
    log = {"step_log": "exact", "log_url": str(tmp_path / "log")}
    whole = losses(tmp_path / "whole", _STEPS, workers=0, log={})
    first = losses(tmp_path / "run", 2, workers=0, log={})
    logged = losses(tmp_path / "run", 8, workers=0, log=log)
    rest = losses(tmp_path / "run", _STEPS, workers=0, log=log)
    assert min(logged) == 3
    assert min(rest) == 9
    assert first | logged | rest == whole


def test_random_numbers_that_workers_draw_are_told_where_a_resume_cannot_restore_them(tmp_path):
    losses(tmp_path, 2, workers=1, log={}, noise=0.1)
    with pytest.warns(shrinkpoint.ShrinkpointWarning, match="workers draw random numbers"):
        losses(tmp_path, _LENGTH, workers=1, log={}, noise=0.1)
