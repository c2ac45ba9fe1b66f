"""Skipping batches unread is done exactly where it comes to the same as reading them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)

pytest.importorskip("composer")

from shrinkpoint.integrations.composer.data import SkippingSampler, can_skip
from shrinkpoint.state.rng import capture_rng, restore_rng


class Numbers(Dataset[Any]):
    def __init__(self, noise: Any = None) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)) + (self.noise() if callable(self.noise) else 0)


def masked(samples: list[Any]) -> Any:
    """Draws random numbers for a whole batch, as masking does."""
    return torch.stack(samples) * (torch.rand(len(samples)) < 0.5)


class Owner(Numbers):
    """Draws from a generator of its own, as some augmentations do."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.transforms = [{"crop": 1}, generator]


class Transform(torch.nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(24))


class Lazy(Sampler[int]):
    """Draws an index at a time."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(24, ())) for _ in range(24))


def noise_of_torch() -> torch.Tensor:
    return torch.rand(())


def noise_of_numpy() -> float:
    return float(np.random.rand())


def noise_of_python() -> float:
    return random.random()


def skips(loader: Any, *, length: int | None = 6) -> bool:
    return can_skip(loader, count=4, length=length)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=4),
        DataLoader(Numbers(), batch_size=4, shuffle=True),
        DataLoader(Numbers(noise_of_torch), batch_size=4, shuffle=True),
        DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator()),
        DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(24))),
        DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), 2, 1)),
        DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1),
    ],
    ids=["in order", "shuffled", "noise in this process", "generator", "subset", "distributed", "worker"],
)
def test_skips_where_only_the_sampler_counts(loader: Any) -> None:
    assert skips(loader)


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2, 3],
        DataLoader(Stream(), batch_size=4),
        DataLoader(Numbers(), batch_size=4, sampler=Lazy()),
        DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True)),
        DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), num_samples=48)),
        DataLoader(Owner(np.random.default_rng(1)), batch_size=4),
        DataLoader(Owner(random.Random(1)), batch_size=4),
        DataLoader(Owner(torch.Generator()), batch_size=4),
        DataLoader(Owner(Transform(np.random.default_rng(1))), batch_size=4),
        DataLoader(Numbers(), batch_sampler=BatchSampler(Lazy(), 4, True)),
        DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True),
        DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1, generator=torch.Generator()),
        DataLoader(Numbers(noise_of_torch), batch_size=4, num_workers=1),
        DataLoader(Numbers(noise_of_numpy), batch_size=4, num_workers=1),
        DataLoader(Numbers(noise_of_python), batch_size=4, num_workers=1),
        DataLoader(Numbers(), batch_size=4, num_workers=1, collate_fn=masked),
    ],
    ids=lambda loader: type(getattr(loader, "dataset", loader)).__name__,
)
def test_reads_where_anything_else_may_count(loader: Any) -> None:
    assert not skips(loader)


def test_reads_where_the_epoch_has_no_known_length() -> None:
    assert not skips(DataLoader(Numbers(), batch_size=4), length=None)


def test_reads_where_workers_see_more_of_the_epoch_than_training() -> None:
    assert not skips(DataLoader(Numbers(), batch_size=4, num_workers=1), length=5)


def test_looking_draws_nothing() -> None:
    before = torch.get_rng_state()
    skips(DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


class Raises(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise OSError("no such file")


def test_a_dataset_that_cannot_be_read_alone_is_left_to_training() -> None:
    assert not skips(DataLoader(Raises(), batch_size=4, num_workers=1))


@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_the_rest_of_an_epoch_is_the_same(count: int) -> None:
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    start = capture_rng()
    whole = list(loader.batch_sampler)  # type: ignore[arg-type]
    after = torch.get_rng_state()
    ready: list[bool] = []

    restore_rng(start)
    rest = SkippingSampler(
        loader.batch_sampler,
        count=count,
        stop=6 - count,
        on_ready=lambda: ready.append(True),  # type: ignore[arg-type]
    )
    assert list(rest) == whole[count:]
    assert torch.equal(torch.get_rng_state(), after)
    assert ready == [True]
    assert len(rest) == 6
