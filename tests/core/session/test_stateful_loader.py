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

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)
from torchdata import nodes
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
    "as they come": dict,
    "shuffle, own generator": lambda: {"shuffle": True, "generator": _generator()},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(4 * _LENGTH))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 2 * _LENGTH, 4 * _LENGTH)},
    "weighted, own generator": lambda: {
        "sampler": WeightedRandomSampler([1.0, 2.0] * 2 * _LENGTH, 4 * _LENGTH, generator=_generator())
    },
}


class _Positioned(DataLoader):
    """A loader of torch's with a state of its own, as libraries of streams have them."""

    def __init__(self) -> None:
        super().__init__(_Data(), batch_size=4)
        self.position = 0

    def __iter__(self):
        begin, self.position = self.position, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _of_nodes() -> Any:
    data = _Data()
    node = nodes.Batcher(nodes.MapStyleWrapper(data, RandomSampler(data)), 4)
    return nodes.Loader(nodes.Mapper(node, torch.stack))


_LOADERS: dict[str, Callable[[], Any]] = {"nodes": _of_nodes, "a loader of torch's": _Positioned}


class _Stream(IterableDataset):
    """As the library datasets has it."""

    __module__ = "datasets.iterable_dataset"

    def __iter__(self):
        return iter(_Data()[index] for index in range(4 * _LENGTH))


def losses(
    url: Path,
    until: int,
    *,
    workers: int,
    log: dict[str, str],
    order: str = "shuffle",
    noise: float = 0.0,
    data: Any = None,
) -> dict[int, float]:
    """Train with shuffled batches and dropout, from where the run is; the loss of each step that is made here."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if order in _LOADERS:
        loader = _LOADERS[order]()
    else:
        loader = StatefulDataLoader(
            data or _Data(noise), batch_size=4, num_workers=workers, **_ORDERS[order]()
        )
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
                if not log:
                    checkpointer.save(step, wait=True)
                break
    checkpointer.close()
    return found


@pytest.mark.parametrize("order", sorted({*_ORDERS, *_LOADERS} - {"shuffle"}))
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


def test_other_samples_of_a_split_are_told(tmp_path):
    def split(seed: int) -> Subset:
        return random_split(_Data(), [4 * _LENGTH - 4, 4], torch.Generator().manual_seed(seed))[0]

    losses(tmp_path, 2, workers=0, log={}, data=split(1))
    losses(tmp_path, 3, workers=0, log={}, data=split(1))
    with pytest.warns(shrinkpoint.ShrinkpointWarning, match="checksum of dataset.indices"):
        losses(tmp_path, 4, workers=0, log={}, data=split(2))


def test_streams_that_restore_their_position_roughly_are_told(tmp_path):
    losses(tmp_path, 2, workers=0, log={}, order="as they come", data=_Stream())
    with pytest.warns(shrinkpoint.ShrinkpointWarning, match="of the library datasets"):
        losses(tmp_path, 3, workers=0, log={}, order="as they come", data=_Stream())
