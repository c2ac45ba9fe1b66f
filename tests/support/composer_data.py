"""Training data of every kind that Composer takes: 64 labelled points in batches of 8, which count how often they are read."""

import atexit
import fcntl
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

__all__ = ["BATCH", "CLASSES", "DATA", "FEATURES", "LENGTH", "POINTS", "Points", "reads"]

POINTS, BATCH, FEATURES, CLASSES = 64, 8, 8, 4
LENGTH = POINTS // BATCH
"""Batches in an epoch."""

_MOST_WORKERS = 8


def _noise() -> float:
    """A draw from each of the global generators."""
    return float(torch.randn(())) + np.random.randn() + random.gauss(0, 1)


class _Counter:
    """Counts in the memory that workers share with the process that has made them."""

    def __init__(self) -> None:
        self._counts = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()

    def add(self) -> None:
        info = get_worker_info()
        self._counts[0 if info is None else 1 + info.id] += 1

    @property
    def total(self) -> int:
        return int(self._counts.sum())


class Points(Dataset[Any]):
    """Points with an index each; `augmented` ones move a little whenever they are read."""

    def __init__(self, count: int = POINTS, *, augmented: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (count,), generator=generator)
        self.augmented = augmented
        self.counter = _Counter()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        self.counter.add()
        x = self.x[index]
        return int(index), x + 0.1 * _noise() if self.augmented else x, self.y[index]


class Synthetic(Points):
    """Points that are drawn when the first of them is read, as synthetic data are."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        if not self.counter.total:
            self.x = torch.randn(self.x.shape)
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    """The points in an order of the moment, without a length; each worker gives its share."""

    def __init__(self, *, augmented: bool = False) -> None:
        self.points = Points(augmented=augmented)
        self.counter = self.points.counter

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        own, of = (0, 1) if info is None else (info.id, info.num_workers)
        order = [index for index in range(POINTS) if index % of == own]
        for at in torch.randperm(len(order)).tolist():
            yield self.points[order[at]]


class Positioned(IterableDataset[Any]):
    """A stream that finds its place by itself, by the two methods that Composer calls."""

    def __init__(self) -> None:
        self.points = Points(augmented=True)
        self.counter = self.points.counter
        self.epoch = -1
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        start, self.start = self.start, 0
        order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (self.points[index] for index in order[start:])

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        assert from_beginning
        done = num_samples == 0  # Composer counts from 0 again when an epoch has ended
        return {"epoch": self.epoch + done, "start": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.start = state["epoch"] - 1, state["start"]


class Permuted(Sampler[int]):
    """A sampler with a generator of its own, which draws an order at its start."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    def __len__(self) -> int:
        return POINTS

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(POINTS, generator=self.generator).tolist())


class Drawn(Permuted):
    """As `Permuted`, but draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(POINTS, (), generator=self.generator)) for _ in range(POINTS))


class Unknown(Permuted):
    """Draws each index from the global generator."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(POINTS, ())) for _ in range(POINTS))


@cache
def _shards() -> str:
    """A folder with the points as StreamingDataset reads them, the same for all processes that train together."""
    from composer.utils import dist

    own = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    folder = f"{dist.all_gather_object(own)[0]}/shards"
    if dist.get_global_rank() == 0:
        _write_shards(folder)
    dist.barrier()
    return folder


def _write_shards(folder: str) -> None:
    from streaming import MDSWriter

    points = Points()
    columns = {"index": "int", "x": f"ndarray:float32:{FEATURES}", "y": "int"}
    with MDSWriter(out=folder, columns=columns, size_limit=512) as writer:
        for index, (x, y) in enumerate(zip(points.x.numpy(), points.y.tolist(), strict=True)):
            writer.write({"index": index, "x": x, "y": y})


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two programs that make a StreamingDataset at the same moment would choose the same names for their shared memory."""
    from composer.utils import dist

    with Path(tempfile.gettempdir(), "shrinkpoint-tests-streaming.lock").open("w") as lock:
        if dist.get_global_rank() == 0:  # processes that train together wait for each other as they make it
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _streaming(workers: int = 0, *, augmented: bool = False, persistent: bool = False) -> Any:
    from streaming import StreamingDataLoader, StreamingDataset

    class Streamed(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            self.counter.add()
            row = super().__getitem__(at)
            x = torch.tensor(row["x"])
            return row["index"], x + 0.1 * _noise() if augmented else x, torch.tensor(row["y"])

    shards = _shards()
    with _one_at_a_time():
        dataset = Streamed(local=shards, shuffle=True, batch_size=BATCH, num_canonical_nodes=1)
    dataset.counter = _Counter()
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, persistent_workers=persistent)


def _loader(*, augmented: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(Points(augmented=augmented), batch_size=BATCH, **options)


def _shuffled(*, augmented: bool = False, **options: Any) -> DataLoader[Any]:
    return _loader(augmented=augmented, shuffle=True, **options)


def _stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Points(augmented=True), batch_size=BATCH, shuffle=True, **options)


def _distributed(*, augmented: bool = False, **options: Any) -> DataLoader[Any]:
    from composer.utils import dist

    points = Points(augmented=augmented)
    return DataLoader(points, batch_size=BATCH, sampler=dist.get_sampler(points, shuffle=True), **options)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _weighted() -> DataLoader[Any]:
    return _loader(sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(POINTS)], POINTS))


DATA: dict[str, Callable[[], Any]] = {
    "in order": _loader,
    "shuffle": _shuffled,
    "shuffle, augmentation": lambda: _shuffled(augmented=True),
    "shuffle, own generator": lambda: _shuffled(generator=_generator()),
    "drawn when first read": lambda: DataLoader(Synthetic(), batch_size=BATCH, shuffle=True),
    "DistributedSampler": _distributed,
    "DistributedSampler, augmentation": lambda: _distributed(augmented=True),
    "DistributedSampler, 2 workers, augmentation": lambda: _distributed(augmented=True, num_workers=2),
    "WeightedRandomSampler": _weighted,
    "sampler with a generator": lambda: _loader(sampler=Permuted(), augmented=True),
    "sampler with a generator, draws one by one": lambda: _loader(sampler=Drawn()),
    "sampler of the global generator, one by one": lambda: _loader(sampler=Unknown(), augmented=True),
    "2 workers": lambda: _shuffled(num_workers=2),
    "2 workers, own generator": lambda: _shuffled(num_workers=2, generator=_generator()),
    "2 workers, augmentation": lambda: _shuffled(num_workers=2, augmented=True),
    "2 persistent workers": lambda: _shuffled(num_workers=2, persistent_workers=True),
    "2 persistent workers, augmentation": lambda: _shuffled(
        num_workers=2, persistent_workers=True, augmented=True
    ),
    "IterableDataset": lambda: DataLoader(Stream(augmented=True), batch_size=BATCH),
    "IterableDataset, 2 workers": lambda: DataLoader(Stream(augmented=True), batch_size=BATCH, num_workers=2),
    "IterableDataset with state": lambda: DataLoader(Positioned(), batch_size=BATCH),
    "StreamingDataset": _streaming,
    "StreamingDataset, augmentation": lambda: _streaming(augmented=True),
    "StreamingDataset, 2 workers": lambda: _streaming(2),
    "StreamingDataset, 2 persistent workers": lambda: _streaming(2, persistent=True),
    "StreamingDataset, 2 workers, augmentation": lambda: _streaming(2, augmented=True),
    "StatefulDataLoader": _stateful,
    "StatefulDataLoader, 2 workers": lambda: _stateful(num_workers=2),
}
"""A new loader of each kind."""


def reads(loader: Any) -> int:
    """How many points have been read from a loader of `DATA`, in workers too."""
    total: int = loader.dataset.counter.total
    return total
