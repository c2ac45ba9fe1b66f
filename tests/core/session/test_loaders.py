"""A user's own generators are found wherever they were given, and put back."""

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from shrinkpoint.session.data import generators, samplers
from shrinkpoint.state.rng import capture_rng, restore_rng

DATA: Any = list(range(8))


def test_finds_each_once() -> None:
    one, two, three = torch.Generator(), torch.Generator(), torch.Generator()
    of_loader = DataLoader(DATA, shuffle=True, generator=one)  # the sampler has it too
    of_sampler = DataLoader(DATA, sampler=RandomSampler(DATA, generator=two))
    of_inner = DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=three), 2, drop_last=False)
    )
    assert list(generators([of_loader, of_sampler, of_inner, of_loader]).values()) == [one, two, three]


def test_other_iterables_have_none() -> None:
    assert generators([[1, 2], None, DataLoader(DATA)]) == {}
    assert list(samplers([1, 2])) == []


def test_puts_them_back() -> None:
    loader = DataLoader(DATA, shuffle=True, generator=torch.Generator().manual_seed(3))
    states = capture_rng(generators([loader]))
    first = [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in loader] != first
    restore_rng(states, generators([loader]))
    assert [batch.tolist() for batch in loader] == first
