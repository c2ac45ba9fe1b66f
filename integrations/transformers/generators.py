"""The random number generators that a training's data depends on: the global ones, and those of the loader's parts."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from shrinkpoint.state.rng import capture_rng, restore_rng

__all__ = ["Generators", "seeds", "set_seeds"]

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 3
_FIRST = 100  # of a list, as one of transforms, and not of samples


class Generators:
    """The global generators, and those of a loader, its samplers, its data set and its collator.

    Args:
        loader: as the trainer has it; None for the global ones alone.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._own: list[Any] = []

    def find(self) -> None:
        """Look for generators; some parts make theirs on first use."""
        found = [generator for part in _parts(self._loader) for generator in _inside(part, _DEPTH)]
        self._own = list({id(generator): generator for generator in found}.values())

    def states(self) -> dict[str, Any]:
        """Their states, in tensors and plain data."""
        return {"rng": capture_rng(), "own": [_state(generator) for generator in self._own]}

    def set(self, states: Mapping[str, Any]) -> None:
        """Restore their states."""
        if len(states["own"]) > len(self._own):
            self._use_once()
            self.find()
        restore_rng(states["rng"])
        for generator, state in zip(self._own, states["own"], strict=False):
            _set_state(generator, state)

    def _use_once(self) -> None:
        """Let a collator make the generator that it makes on first use."""
        dataset, collate = (getattr(self._loader, name, None) for name in ("dataset", "collate_fn"))
        with suppress(Exception):  # an attempt only: the batch is discarded
            if callable(collate) and dataset is not None and not getattr(self._loader, "num_workers", 0):
                collate([dataset[0]])


def seeds(loader: Any) -> list[int]:
    """The seeds of samplers that shuffle by seed and epoch, as accelerate's own does."""
    return [part.initial_seed for part in _seeded(loader)]


def set_seeds(loader: Any, values: Sequence[int]) -> None:
    """Restore the samplers' seeds; a new process would use its own."""
    for part, value in zip(_seeded(loader), values, strict=False):
        part.initial_seed = value


def _seeded(loader: Any) -> list[Any]:
    return [part for part in _parts(loader) if type(getattr(part, "initial_seed", None)) is int]


def _parts(loader: Any) -> Iterator[Any]:
    """A loader's samplers, those within them, its data set and its collator, each once."""
    seen: set[int] = set()
    waiting = [] if loader is None else [loader]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if part is not loader:
            yield part
        names = ("generator", "sampler", "batch_sampler") + (
            ("dataset", "collate_fn") if part is loader else ()
        )
        found = [getattr(part, name, None) for name in names]
        waiting += [item for item in found if item is not None]


def _inside(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, _KINDS):
        yield value
        return
    if depth == 0 or isinstance(value, (str, bytes, torch.Tensor, np.ndarray, torch.nn.Module)):
        return
    parts: Sequence[Any] = ()
    if isinstance(value, (list, tuple)):
        parts = value[:_FIRST]
    elif isinstance(value, dict):
        parts = list(value.values())[:_FIRST]
    elif hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    for part in parts:
        yield from _inside(part, depth - 1)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
