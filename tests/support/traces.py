"""What a user's step may leave behind: one thing of each kind, and how it looks from outside."""

import array
import io
import itertools
import multiprocessing
import random
import socket
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchmetrics

__all__ = ["CALLS", "LASTING", "Lasting", "Traces"]

CALLS: list[float] = []
"""Every call of `Traces.touch`, those of measurements too: nothing that a module refers to."""


class Slotted:
    __slots__ = ("__hidden", "last", "late")

    def __init__(self) -> None:
        self.__hidden = [0.0]
        self.last: Any = None

    def touch(self, value: float) -> None:
        self.__hidden.append(value)
        self.last = self.late = value

    def seen(self) -> Any:
        return [self.__hidden, self.last, hasattr(self, "late")]


class Own(list[float]):
    """A list with attributes, and with methods that are not a list's."""

    def __init__(self) -> None:
        super().__init__([1.0])
        self.total = 0.0

    def __iter__(self) -> Any:
        raise AssertionError("not for others")

    def clear(self) -> None:
        raise AssertionError("not for others")


class Meter:
    def __init__(self) -> None:
        self.history: list[float] = []
        self.itself = self

    @cached_property
    def first(self) -> float:
        return self.history[0]

    @property
    def broken(self) -> None:
        raise RuntimeError("never to be looked at")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"never to be looked at: {name}")


class Traces:
    """Lists, dicts, deques, sets, counters, numbers, strings, arrays, tensors, metrics, generators, objects, classes and closures."""

    of_class: list[float]
    class_count: int

    def __init__(self) -> None:
        Traces.of_class, Traces.class_count = [], 0
        closed, calls = [], 0

        def close_over(value: float) -> None:
            nonlocal calls
            calls += 1
            closed.append(value)

        self.close_over, self.closed = close_over, lambda: (closed, calls)
        self.losses: list[Any] = []
        self.alias = {"of": {"losses": self.losses}}
        self.by_name: Any = defaultdict(list)
        self.ordered = OrderedDict(a=1.0, b=2.0)
        self.recent: deque[float] = deque([0.0, 0.0], maxlen=2)
        self.kinds: set[float] = set()
        self.counts: Counter[str] = Counter()
        self.count, self.best, self.text = 0, float("inf"), ""
        self.array = np.zeros(3)
        self.rows = np.zeros((4, 4))[:, 1:3]
        self.objects = np.array([[], None], dtype=object)
        self.tensor, self.replaced = torch.zeros(3), torch.zeros(())
        self.memory_bank = torch.zeros(400, 1000)  # larger than those that are copied however many there are
        self.tensors = [torch.zeros(1)]
        self.outputs: list[torch.Tensor] = []
        self.meter, self.slotted, self.own = Meter(), Slotted(), Own()
        self.config = SimpleNamespace(sizes=[1])
        self.pair = ([], 1)
        self.buffer, self.text_buffer, self.octets, self.numbers = (
            io.BytesIO(),
            io.StringIO("begins"),
            bytearray(),
            array.array("d"),
        )
        self.metrics = {"mean": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric()}
        self.draws = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)]
        self.shared = multiprocessing.Value("i", 0)
        self.record = self.losses.append

    def touch(self, value: float) -> None:
        CALLS.append(value)
        Traces.of_class.append(value)
        Traces.class_count += 1
        self.close_over(value)
        self.record(value)
        self.by_name[f"{value:.3f}"].append(value)
        self.ordered.move_to_end("a")
        self.ordered[str(value)] = value
        self.recent.append(value)
        self.kinds.add(value)
        self.counts[f"{value:.1f}"] += 1
        self.count += 1
        self.best, self.text = min(self.best, value), f"{self.text}{value:.1f}"
        self.array += value
        self.rows[0] += value
        self.objects[0].append(value)
        self.objects[1] = value
        self.tensor.add_(value)
        self.memory_bank.data[self.count] = value
        self.replaced = self.replaced + value
        self.tensors[0].data.add_(value)
        self.tensors.append(torch.tensor(value))
        self.outputs.append(torch.tensor([value]))
        self.meter.history.append(value)
        assert self.meter.first == self.losses[0]
        self.slotted.touch(value)
        self.own.append(value)
        self.own.total += value
        self.config.sizes.append(self.count)
        self.config.late = value
        self.pair[0].append(value)
        self.buffer.write(b"x")
        self.text_buffer.write("x")
        self.octets.append(1)
        self.numbers.append(value)
        for metric in self.metrics.values():
            metric.update(value)
        self.shared.value += 1
        python, numpy, generator = self.draws
        self.losses.append([python.random(), numpy.random(), torch.rand((), generator=generator).item()])

    def seen(self) -> str:
        """All of it in words; two equal ones have the same."""
        assert self.alias["of"]["losses"] is self.losses
        assert self.meter.itself is self.meter
        everything = [
            *(self.of_class, self.class_count, self.closed()),
            *(self.losses, dict(self.by_name), self.ordered, self.recent, sorted(self.kinds), self.counts),
            *(self.count, self.best, self.text, self.array, self.rows, self.objects.tolist(), self.tensor),
            *(self.memory_bank.sum(1)[: self.count + 2].tolist(), self.replaced, self.tensors, self.outputs),
            *(self.meter.history, "first" in vars(self.meter), self.slotted.seen(), list.copy(self.own)),
            *(self.own.total, vars(self.config), self.pair, self.buffer.getvalue(), self.buffer.tell()),
            *(
                self.shared.value,
                self.text_buffer.getvalue(),
                self.octets,
                self.numbers,
                self.draws[0].random(),
            ),
            *(metric.compute() if metric.update_called else None for metric in self.metrics.values()),
        ]
        return "\n".join(map(repr, everything))


class Lasting:
    """Something that no measurement can put back.

    Args:
        kind: of `LASTING`.
        folder: for files.
    """

    def __init__(self, kind: str, folder: Any) -> None:
        self.kind = kind
        self.file: Any = (folder / f"{kind}.txt").open("w+") if "file" in kind else None
        if kind == "file that is read":
            self.file.write("line\n" * 1000)
            self.file.seek(0)
        self.iterator: Any = {
            "iterator": lambda: iter(range(1000)),
            "count": itertools.count,
            "generator": lambda: (number for number in itertools.count()),
            "cycle of a list": lambda: itertools.cycle([1, 2, 3]),
            "loader": lambda: iter(torch.utils.data.DataLoader(range(1000))),  # type: ignore[arg-type]
            "enumerated": lambda: enumerate(iter([0] * 1000)),
        }.get(kind, lambda: None)()
        self.ends = socket.socketpair()
        self.large = np.zeros(2**24) if kind == "large array" else None

    def touch(self) -> None:
        CALLS.append(0.0)
        if self.kind == "file that is read":
            self.file.readline()
        elif self.file is not None:
            self.file.write("line\n")
        elif self.kind == "socket":
            self.ends[0].send(b"line")
        elif self.large is not None:
            self.large[len(CALLS)] = 1.0
        else:
            next(self.iterator)


LASTING = (
    *(
        "file that is written",
        "file that is read",
        "iterator",
        "count",
        "generator",
        "cycle of a list",
        "loader",
    ),
    *("enumerated", "large array", "socket"),
)
