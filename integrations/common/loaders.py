"""The random number generators that a user gave to data loaders, or to their samplers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["generators", "samplers", "set_generators"]


def samplers(loader: Any) -> Iterator[Any]:
    """The objects that determine a loader's order: its sampler, its batch sampler and that one's own sampler.

    Args:
        loader: a ``DataLoader``, or any object with some of its attributes.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if sampler is not None:
            yield sampler


def generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The loaders' and samplers' own generators, each once, always in the same order."""
    parts = [part for loader in loaders for part in (loader, *samplers(loader))]
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def set_generators(loaders: Iterable[Any], states: Sequence[torch.Tensor]) -> None:
    """Set the states of `generators`, one ``get_state()`` for each."""
    for generator, state in zip(generators(loaders), states, strict=False):
        generator.set_state(state)
