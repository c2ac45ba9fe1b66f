"""How a save and a restore share their work among threads, simulated from measured parts (5 minutes, 10 GB of memory)

    OMP_NUM_THREADS=1 python examples/benchmarks/scaling.py [--width 768] [--layers 12] [--vocabulary 50257] [--links 10]

A state of GPT-2's shapes, AdamW's moments included, is coded as a chain on one thread, and read again. Each parameter's CPU seconds
are noted, and those of each part that a team shares; then the team's own rule is followed for 1 to 16 threads: parameters are begun in the
order of their sizes, and their parts are taken by whoever has nothing to begin. What it cannot see: the interpreter's lock, and memory that
processors share.
"""

import heapq
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from auto_speed import Chain, saves_of
from common import parsed, replaced, show

from shrinkpoint.coding.selective import decode_chain, in_memory

_TEAMS = 1, 2, 4, 8, 16


@dataclass
class Item:
    """One parameter: CPU seconds of its own thread, and of parts that a team shares, in turn."""

    steps: list[list[float]] = field(default_factory=list)
    began: float = 0.0

    def alone(self) -> None:
        """Note what the own thread has done since the last note."""
        now = time.thread_time()
        self.steps.append([now - self.began])
        self.began = now


class _Record:
    """Notes the items of each list that a team works through; everything else is done by one thread."""

    def __init__(self) -> None:
        self.lists: list[list[Item]] = []
        self._item: Item | None = None

    def in_order(
        self, _: Any
    ) -> Callable[[Callable[[Any], Any], Sequence[Any], int, Callable[[Any], int]], Iterator[Any]]:
        def run(
            function: Callable[[Any], Any], items: Sequence[Any], threads: int, size: Callable[[Any], int]
        ) -> Iterator[Any]:
            noted: list[tuple[int, Item]] = []
            for item in items:
                self._item = now = Item(began=time.thread_time())
                result = function(item)
                now.alone()
                self._item = None
                noted.append((size(item), now))
                yield result
            self.lists.append([item for _, item in sorted(noted, key=lambda pair: -pair[0])])

        return run

    def in_threads(self, _: Any) -> Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]:
        def run(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
            work, item = list(items), self._item
            if item is None or len(work) < 2:
                return [function(one) for one in work]
            item.alone()
            results, seconds = [], []
            for one in work:
                results.append(function(one))
                now = time.thread_time()
                seconds.append(now - item.began)
                item.began = now
            item.steps.append(seconds)
            return results

        return run

    def replacing(self) -> ExitStack:
        """Note what is done inside a `with`."""
        stack = ExitStack()
        for module in [module for name, module in sys.modules.items() if name.startswith("shrinkpoint.")]:
            for name, make in (("map_in_order", self.in_order), ("map_in_threads", self.in_threads)):
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, make))
        return stack

    def seconds(self, threads: int) -> float:
        """Return what a team of so many threads needs, one list after the other."""
        return sum(makespan(items, threads) for items in self.lists)


@dataclass
class _Shared:
    """Parts that a team shares: those that nobody has begun, how many are not done, and who waits for them."""

    waiting: deque[float]
    left: int
    owner: int


def makespan(items: Sequence[Item], threads: int) -> float:
    """Follow a team through one list, from event to event: when a thread is through with a part."""
    unbegun, open_rounds = deque(items), deque[_Shared]()
    own: dict[int, deque[list[float]]] = {}
    shared: dict[int, _Shared] = {}  # the round that a thread has begun itself
    doing: dict[int, _Shared] = {}  # the round that its part belongs to
    events = [(0.0, thread) for thread in range(threads)]
    idle: set[int] = set()
    now = 0.0
    while events:
        now, thread = heapq.heappop(events)
        if (done := doing.pop(thread, None)) is not None:
            done.left -= 1
            if not done.left and done.owner in idle:
                idle.remove(done.owner)
                heapq.heappush(events, (now, done.owner))
        mine = shared.get(thread)
        if mine is not None and not mine.waiting and mine.left:
            idle.add(thread)
            continue
        if mine is not None and not mine.left:
            del shared[thread]
            mine = None
        if mine is None and not own.get(thread):
            if unbegun:
                own[thread] = deque(unbegun.popleft().steps)
            else:
                mine = next((one for one in open_rounds if one.waiting), None)
        if mine is None and own.get(thread):
            step = own[thread].popleft()
            if len(step) == 1:
                heapq.heappush(events, (now + step[0], thread))
                continue
            mine = shared[thread] = _Shared(deque(step), len(step), thread)
            open_rounds.append(mine)
            for other in [one for one in idle if one not in shared]:
                idle.remove(other)
                heapq.heappush(events, (now, other))
        if mine is None:
            idle.add(thread)  # until somebody shares a round
            continue
        doing[thread] = mine
        heapq.heappush(events, (now + mine.waiting.popleft(), thread))
    return now


def main() -> None:
    options = parsed(__doc__, width=768, layers=12, vocabulary=50257, links=10)
    torch.set_num_threads(1)
    width = options.width
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [(options.vocabulary, width), *block * options.layers]
    compiled = Chain("auto")
    for save in saves_of([(256, 64), (64, 256)], 2):
        compiled.add(save)
    compiled.read(2)
    base, delta, reads = _Record(), _Record(), [_Record(), _Record()]
    chain, size = Chain("auto"), 0
    for number, save in enumerate(saves_of(shapes, options.links + 1)):
        record = base if number == 0 else delta if number == 1 else _Record()
        with record.replacing():
            chain.add(save, rounds=1)
        size = save.state.nbytes
    for record, links in zip(reads, (1, options.links + 1), strict=True):
        with record.replacing():
            decode_chain([*map(in_memory, chain.files[:links])], threads=1)
    rows = []
    for name, record in (
        ("saving a base", base),
        ("saving a delta", delta),
        ("reading a base", reads[0]),
        (f"reading a base and {options.links} links", reads[1]),
    ):
        seconds = [record.seconds(threads) for threads in _TEAMS]
        cells = (
            f"{each:.2f} ({seconds[0] / each / threads:.2f})"
            for each, threads in zip(seconds, _TEAMS, strict=True)
        )
        rows.append([name, *cells])
    headings = ["seconds (efficiency)", *(f"{threads} threads" for threads in _TEAMS)]
    show(headings, rows, f"{size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
