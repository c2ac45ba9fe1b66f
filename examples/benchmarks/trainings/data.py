"""What the bench's trainings learn: text, images, chains, ratings, series, graphs; drawn once, the same in every run."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from gpt import load_corpus
from torch import Tensor

VOCABULARY = 256
"""One token per byte value."""
STATES = 24
"""Symbols of the Markov chains."""
SHAPES = 8
"""Kinds of images."""


def _drawn(seed: int) -> torch.Generator:
    """Random numbers of the task itself, apart from those of any run."""
    return torch.Generator().manual_seed(777_000_000 + seed)


@cache
def code_text() -> tuple[Tensor, Tensor]:
    """Source text of Python's standard library, uint8; training and held-out files."""
    return load_corpus(6_000_000)


@cache
def english_text() -> tuple[Tensor, Tensor]:
    """English: the language reference as Python's help quotes it, uint8; the last quarter is held out."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    cut = len(text) * 3 // 4
    return text[:cut], text[cut:]


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Pieces of a text at random places, int64 ``(count, length)``."""
    begin = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[begin + torch.arange(length)].long()


def chains(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Runs of a Markov chain that goes from each of its `STATES` symbols to few others, int64 ``(count, length)``."""
    table = (3 * torch.randn(STATES, STATES, generator=_drawn(1))).softmax(1)
    tokens = torch.empty(count, length, dtype=torch.int64)
    tokens[:, 0] = torch.randint(STATES, (count,), generator=generator)
    for place in range(1, length):
        tokens[:, place] = torch.multinomial(table[tokens[:, place - 1]], 1, generator=generator)[:, 0]
    return tokens


@cache
def images(part: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Discs, rings, boxes, frames, crosses, bars, waves and checks at any place, size and angle, with noise.

    Images have a mean of 0 or so, ``(count, 1, size, size)``; their kinds are int64. Another `part` has other images.
    """
    drawn = _drawn(100 + part)
    kinds = torch.randint(SHAPES, (count,), generator=drawn)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=drawn)

    axis = torch.linspace(-1, 1, size)
    x, y = axis[None, None, :] - uniform(-0.3, 0.3), axis[None, :, None] - uniform(-0.3, 0.3)
    angle, radius, width = uniform(0, 3.14159), uniform(0.4, 0.75), uniform(0.12, 0.22)
    u, v = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    distance, box = (x**2 + y**2).sqrt(), torch.maximum(u.abs(), v.abs())
    bar = torch.maximum(u.abs() - radius, v.abs() - width)
    other_bar = torch.maximum(v.abs() - radius, u.abs() - width)
    wave = (6 * u / radius).sin() * 0.2
    forms = (
        distance - radius,
        (distance - radius).abs() - width / 2,
        box - radius * 0.8,
        (box - radius * 0.8).abs() - width / 2,
        torch.minimum(bar, other_bar),
        bar,
        torch.maximum(wave, distance - 1.2 * radius),
        torch.maximum(wave * (6 * v / radius).sin() * 3, distance - 1.2 * radius),
    )
    edges = torch.stack([form.expand(count, size, size) for form in forms])
    edge = edges[kinds, torch.arange(count)]
    bright = torch.sigmoid(-edge * size * 0.7)  # one pixel of a slope: no two images are the same
    noise = 0.08 * torch.randn(count, size, size, generator=drawn)
    return ((bright * uniform(0.7, 1.3) - 0.35 + noise)[:, None], kinds)


def zipf(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Ids 0, 1, ... of which the k-th comes with a probability of about 1 / k, int64."""
    return (count ** torch.rand(shape, generator=generator, dtype=torch.float64)).long().clamp_(1, count) - 1


@cache
def density(part: int, count: int, width: int = 12) -> Tensor:
    """Points of a bent mixture: clusters, then products and sines of coordinates added to others, ``(count, width)``."""
    fixed, drawn = _drawn(2), _drawn(200 + part)
    centres = 2.0 * torch.randn(5, width, generator=fixed)
    mixing = torch.randn(width, width, generator=fixed) / width**0.5
    points = centres[torch.randint(5, (count,), generator=drawn)] + torch.randn(count, width, generator=drawn)
    points = points + (1.5 * points @ mixing).sin()
    half = width // 2
    return torch.cat([points[:, :half], points[:, half:] + 0.5 * points[:, :half] ** 2], 1) / 2


@cache
def series(part: int, count: int, length: int) -> Tensor:
    """Time series: two seasons that modulate each other, a slow walk, and noise, ``(count, length)``."""
    drawn = _drawn(300 + part)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=drawn)

    time = torch.arange(length)[None, :]
    long = (6.28318 * (time / uniform(20, 28) + uniform(0, 1))).sin()
    short = (6.28318 * (time / uniform(5, 8) + uniform(0, 1))).sin()
    walk = torch.randn(count, length, generator=drawn).cumsum(1) * 0.04
    noise = 0.15 * torch.randn(count, length, generator=drawn)
    return long + uniform(0.3, 0.8) * short * (1 + 0.7 * long) + walk + noise


def graphs(count: int, nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random graphs on points of the plane, in which near ones are joined, and one node of each is marked.

    Neighbours are matrices, ``(count, nodes, nodes)``. Distances from the marked node are in edges, 5 for what is farther.
    """
    places = torch.rand(count, nodes, 2, generator=generator)
    near = (torch.cdist(places, places) < 0.24).float()
    near.diagonal(dim1=1, dim2=2).zero_()
    mark = torch.zeros(count, nodes)
    mark[torch.arange(count), torch.randint(nodes, (count,), generator=generator)] = 1
    reached, distance = mark, torch.where(mark > 0, 0, 5)
    for edges in range(1, 5):
        reached = ((reached + torch.einsum("bij,bj->bi", near, reached)) > 0).float()
        distance = torch.where((reached > 0) & (distance == 5), edges, distance)
    return near, mark, distance
