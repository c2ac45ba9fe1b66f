"""A user's own generators are found wherever they were given, and put back."""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from shrinkpoint import Checkpointer
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


class _Noise:
    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)


@dataclass(slots=True)
class _Slots:
    generator: Any


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _one(generator: torch.Generator) -> float:
    return torch.rand(1, generator=generator).item()


class _Noisy(nn.Linear):
    def __init__(self, seed: int) -> None:
        super().__init__(2, 2)
        self.noise, self.draws = _Noise(seed), [torch.Generator().manual_seed(seed), random.Random(seed)]
        self.method, self.bits, own = (
            np.random.default_rng(seed).random,
            np.random.PCG64(seed),
            random.Random(seed),
        )
        self.function, self.partial = lambda: own.random(), partial(_one, generator=_generator(seed))
        self.slots = _Slots(np.random.RandomState(seed))

    def drawn(self) -> list[float]:
        first, second = self.draws
        more = [
            self.method(),
            self.bits.random_raw(),
            self.function(),
            self.partial(),
            self.slots.generator.rand(),
        ]
        return [self.noise.generator.random(), _one(generator=first), second.random(), *more]


def test_those_that_modules_keep_or_that_are_given_by_name_go_on(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Checkpointer, Any]:
        model, named = _Noisy(seed), [torch.Generator().manual_seed(seed), random.Random(seed)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        numpy = np.random.default_rng(seed)
        saving = Checkpointer(str(tmp_path), model, optimizer, one=named[0], other=named[1], numpy=numpy)
        first, second = named
        return saving, lambda: [
            *model.drawn(),
            torch.rand(1, generator=first).item(),
            second.random(),
            numpy.random(),
        ]

    saving, draw = made(1)
    draw()
    saving.save(1, wait=True)
    saving.close()
    again, draw_again = made(2)
    assert again.resume() == 1
    again.close()
    assert draw_again() == draw()
