"""The binary decisions of effort ``max``, and the logistic tables that mix their predictions."""

from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shrinkpoint.arrays import Int64s

if TYPE_CHECKING:
    from shrinkpoint.entropy.contexts.mixer_kernels import Decisions, Logits

__all__ = ["build_decisions", "logits"]


_START_LIMIT = 64  # of 2^22, the least share that either outcome starts with


def build_decisions(weights: Int64s) -> "Decisions":
    """Make the tree: first whether it is the most frequent symbol if 2 in 5 are, then halves of equal weight.

    Symbols keep their order, so that a decision means "how far" and contexts can predict it.

    Args:
        weights: int64 (alphabet,), at least two of them positive; only those symbols are in the tree.
    """
    from shrinkpoint.entropy.contexts.mixer_kernels import Decisions  # numba

    paths: dict[int, list[int]] = {int(symbol): [] for symbol in np.flatnonzero(weights)}
    children: list[list[int]] = []
    start: list[int] = []
    todo: list[tuple[list[int], int | None, int]] = [(list(paths), None, 0)]
    while todo:
        symbols, parent, side = todo.pop()
        if parent is not None:
            children[parent][side] = len(children) if len(symbols) > 1 else -1 - symbols[0]
        if len(symbols) < 2:
            continue
        parts = _split(symbols, weights, first=parent is None)
        share = int(weights[parts[1]].sum() << 22) // int(weights[symbols].sum())
        start.append(min(max(share, _START_LIMIT), (1 << 22) - _START_LIMIT))
        for outcome in (1, 0):
            todo.append((parts[outcome], len(children), outcome))
            for symbol in parts[outcome]:
                paths[symbol].append(outcome)
        children.append([0, 0])
    outcomes = np.zeros((256, max(map(len, paths.values()))), dtype=np.uint8)
    for symbol, path in paths.items():
        outcomes[symbol, : len(path)] = path
    return Decisions(np.array(children, dtype=np.int32), outcomes, np.array(start, dtype=np.int64))


def _split(symbols: list[int], weights: Int64s, first: bool) -> tuple[list[int], list[int]]:
    total = int(weights[symbols].sum())
    if first:
        most = max(symbols, key=lambda symbol: int(weights[symbol]))
        if 5 * int(weights[most]) >= 2 * total:
            return [most], [symbol for symbol in symbols if symbol != most]
    below = np.cumsum(weights[symbols])[:-1]
    cut = int(np.argmin(np.abs(2 * below - total))) + 1
    return symbols[:cut], symbols[cut:]


@lru_cache(maxsize=1)
def logits() -> "Logits":
    """The logistic function and its inverse, by decimal arithmetic that is exact to the last digit everywhere."""
    from shrinkpoint.entropy.contexts.mixer_kernels import Logits  # numba

    with localcontext() as context:
        context.prec = 25
        odds = [Decimal(1)]  # e^(i / 256)
        step = (Decimal(1) / 256).exp()
        for _ in range(2048):
            odds.append(odds[-1] * step)
        above = [int((65536 * x / (1 + x)).to_integral_value()) for x in odds]
    squash = np.empty(4096, dtype=np.int32)
    squash[2048:] = above[:2048]
    squash[:2048] = 65536 - np.array(above[2048:0:-1])
    # the logit whose probability is nearest to the middle of each 1/4096
    middles = 16 * np.arange(4096) + 8
    stretch = np.searchsorted((squash[1:] + squash[:-1]) // 2, middles) - 2048
    return Logits(np.clip(stretch, -2047, 2047).astype(np.int32), np.clip(squash, 1, 65535).astype(np.int32))
