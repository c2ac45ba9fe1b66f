"""A place in the training data of Hugging Face's Trainer is found again, with the same random numbers."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shrinkpoint.integrations.transformers.data import DataPlace, FollowedLoader
from shrinkpoint.state.training import TrainingState

BATCHES = 6


class Numbers(Dataset[Any]):
    def __init__(self, generator: Any = None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        own = 0.0 if self.generator is None else self.generator.random()
        return torch.tensor(float(index) + own)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(4.0 * BATCHES))


def noisy(samples: list[Any]) -> Any:
    return torch.stack(samples) + torch.rand(len(samples)) + random.random() + np.random.random()


class Seeded:
    """A collator that makes its generator on first use."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[Any]) -> Any:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(4)
        return torch.stack(samples) + torch.rand(len(samples), generator=self.generator)


class Ahead:
    """Reads one batch ahead, as accelerate's loaders do."""

    def __init__(self, base: DataLoader[Any]) -> None:
        self.base_dataloader = base

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.base_dataloader)
        present = next(batches)
        for following in batches:
            yield present
            present = following
        yield present


KINDS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=torch.Generator()
    ),
    "random collating": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=noisy),
    "a collator's generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=Seeded()),
    "numpy's generator": lambda: DataLoader(Numbers(np.random.default_rng(1)), batch_size=4, shuffle=True),
    "Python's generator": lambda: DataLoader(Numbers(random.Random(1)), batch_size=4, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1),
    "random collating in workers": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=2, collate_fn=noisy
    ),
}


def trained(loader: FollowedLoader, place: DataPlace, stop: int | None = None) -> list[Any]:
    """What a training gets, and what it draws between two batches; it stops after so many."""
    seen = []
    for batch in loader:
        seen.append((batch.tolist(), float(torch.rand(())), random.random(), float(np.random.random())))
        if stop is not None and len(seen) == stop:
            break
    return seen


def stored(place: DataPlace, *, inside_epoch: bool) -> Any:
    """As it comes back from a file."""
    return TrainingState.capture(place.state(inside_epoch=inside_epoch)).to_object()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("wrap", [Ahead, lambda base: base], ids=["ahead", "plain"])
@pytest.mark.parametrize("done", [1, 3, BATCHES - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_an_epoch_is_the_same(kind: str, done: int, wrap: Any) -> None:
    if "workers" in kind and done != 3:
        pytest.skip("each of these starts processes")
    seed(1)
    whole_place = DataPlace(lambda batch, number: None)
    whole_loader = whole_place.follow(wrap(KINDS[kind]()))
    trained(whole_loader, whole_place)  # an epoch before
    whole = trained(whole_loader, whole_place)

    seed(1)
    place = DataPlace(lambda batch, number: None)
    loader = place.follow(wrap(KINDS[kind]()))
    trained(loader, place)
    assert trained(loader, place, done) == whole[:done]
    checkpoint = stored(place, inside_epoch=True)

    seed(2)
    numbers: list[int] = []
    again = DataPlace(lambda batch, number: numbers.append(number))
    again.load(checkpoint)
    rest = again.follow(wrap(KINDS[kind]()))
    assert trained(rest.skipping(done), again) == whole[done:]
    assert numbers == list(range(done, BATCHES))


@pytest.mark.parametrize("kind", ["shuffled", "random collating"])
def test_the_next_epoch_is_the_same(kind: str) -> None:
    seed(1)
    place = DataPlace(lambda batch, number: None)
    loader = place.follow(Ahead(KINDS[kind]()))
    trained(loader, place)
    checkpoint = stored(place, inside_epoch=False)
    whole = trained(loader, place)
    seed(2)
    again = DataPlace(lambda batch, number: None)
    again.load(checkpoint)
    following = again.follow(Ahead(KINDS[kind]()))
    again.between_epochs()
    assert trained(following, again) == whole


def test_another_place_than_the_stored_one_is_told() -> None:
    place = DataPlace(lambda batch, number: None)
    trained(place.follow(KINDS["shuffled"]()), place, 3)
    again = DataPlace(lambda batch, number: None)
    again.load(stored(place, inside_epoch=True))
    with pytest.warns(UserWarning, match="after 3 batches"):
        trained(again.follow(KINDS["shuffled"]()).skipping(2), again)


def test_a_followed_loader_is_like_the_one_within() -> None:
    loader = DataPlace(lambda batch, number: None).follow(DataLoader(Numbers(), batch_size=4))
    assert isinstance(loader, DataLoader)
    assert len(loader) == BATCHES
    assert loader.batch_size == 4
    assert not hasattr(loader, "no_such_attribute")
