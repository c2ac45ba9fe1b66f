"""What several stores cost and bring: commit latency, parity, and FastCheck's tables, where bandwidth is the limit.

    OMP_NUM_THREADS=1 python examples/benchmarks/stores.py [--folder DISK] [--only latency,rates] [--rate 4e6]

Everything is measured in one run and shown as ratios. FastCheck's figures 6, 7, 9 and 10 (``models``, ``techniques``, ``intervals``,
``shards``) compare with torch.save to one place where bandwidth is the limit. Here each store is a folder behind a link of ``--rate``
bytes a second, or of each of ``--rates``: a wrapper that sleeps as long as the bytes would take. The trainings are some of the bench of
the bound, of 0.1 to 0.7 million parameters, after ``--steps`` steps. Times are those of the stores alone, the shortest of
``--repeats``; latencies are medians of ``--rounds`` commits; seconds to encode are told beside them, and are spent in the background.
"""

from __future__ import annotations

import io
import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import cpu, in_memory_folder, parsed, replaced, show
from lossless import GROUPS, Tensors, coded, fastcheck
from trainings import KINDS
from trainings.base import Training

from shrinkpoint import Checkpointer
from shrinkpoint.config import Advanced
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped.objects import StripedObjects
from shrinkpoint.store.striped.parity import p_of, q_of

FIVE = ("gpt", "bert", "vit", "lstm", "recommender")
INTERVALS = (1, 2, 4, 8, 16, 32, 64)
EVERY = 8
"""Steps between a delta and what it is a difference to, unless said otherwise."""


class Behind:
    """A store of which every answer takes some seconds, and each byte some more."""

    def __init__(self, inner: ObjectStore, seconds: float = 0.0, rate: float = float("inf")) -> None:
        self._inner, self._seconds, self._rate = inner, seconds, rate

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("put", "put_if_absent", "get", "list", "delete"):
            return found

        def answer(*given: Any, **options: Any) -> Any:
            answered = found(*given, **options)
            moved = answered if name == "get" else given[1] if name.startswith("put") else b""
            time.sleep(self._seconds + len(moved) / self._rate)
            return answered

        return answer


def run_of(folder: Path, stores: int, **behind: float) -> RunStore:
    """Open a run in so many stores, one of them for parity where there are several."""
    slow: Any = [Behind(LocalObjects(str(folder / str(number))), **behind) for number in range(stores)]
    return RunStore("ignored", objects=slow[0] if stores == 1 else StripedObjects(slow, parity=1))


# --- latency and parity -------------------------------------------------------------------------------------


def latency(folder: Path, options: Any) -> None:
    """Commits on three stores and on one, in turns: folders on a disk and in memory, where every sync takes 5 ms longer, and
    where every request takes 20 ms."""
    rows = []
    with tempfile.TemporaryDirectory(dir=in_memory_folder()) as root:
        kinds = (
            ("folders, one disk", folder, 0.0, 0.0),
            ("folders, memory", Path(root), 0.0, 0.0),
            ("folders, syncs of 5 ms", Path(root), 5e-3, 0.0),
            ("requests of 20 ms", Path(root), 0.0, 20e-3),
        )
        for size in (4_000, 400_000, 4_000_000):
            for number, (name, where, sync_s, request_s) in enumerate(kinds):
                with _slow_syncs(sync_s):
                    one, three = _commits(where / f"latency-{size}-{number}", size, options.rounds, request_s)
                medians, fastest = [statistics.median(each) for each in (one, three)], [min(one), min(three)]
                times = [f"{median * 1e3:.1f} ms" for median in medians]
                ratios = [f"{three / one:.2f}" for one, three in (medians, fastest)]
                rows.append([f"{size // 1000:,} kB", name, *times, *ratios])
    show("container | stores | one | three, `parity=1` | ratio | ratio of the fastest", rows)


def _commits(base: Path, size: int, rounds: int, request_s: float) -> tuple[list[float], list[float]]:
    """Seconds of commits on one store and on three; who is first, and pays for what the disk still has to do, changes."""
    data = np.random.default_rng(0).bytes(size)
    writers = [run_of(base / f"{stores}", stores, seconds=request_s).writer() for stores in (1, 3)]
    times: tuple[list[float], list[float]] = [], []
    for step in range(rounds + 2):
        for which in (0, 1) if step % 2 else (1, 0):
            began = time.perf_counter()
            writers[which].commit(data, step=step, kind="base", parent=None, state_digest="", meta={})
            taken = time.perf_counter() - began
            if step > 1:  # the first commits make folders, and threads
                times[which].append(taken)
    return times


def _slow_syncs(seconds: float) -> Any:
    """Let every ``os.fsync`` take so much longer, as on a disk of its own for each folder."""
    return replaced(os, "fsync", lambda real: lambda descriptor: (real(descriptor), time.sleep(seconds)))


def parity(folder: Path, options: Any) -> None:
    """Of 48 MiB, by CPU time of one thread."""
    rows = []
    for k in (2, 4):
        shards = [np.random.default_rng(i).integers(0, 256, 48 * 2**20 // k, np.uint8) for i in range(k)]
        for name, work in (("P (XOR)", p_of), ("Q", q_of)):
            best, _ = cpu(lambda work=work, shards=shards: work(shards), 9)
            rows.append([f"{name}, {k} data shards", f"{48 * 2**20 / best / 1e9:.1f}"])
    show(["parity, 48 MiB, one thread", "GB/s of data"], rows)


# --- where bandwidth is the limit ---------------------------------------------------------------------------


class Made:
    """What one training's state comes to after some steps, coded in different ways.

    Deltas of each scheme are to the states so many steps before, one for each of the intervals.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        intervals: Sequence[int] = (EVERY,),
        schemes: Sequence[str] = ("lossless",),
    ) -> None:
        self.title = KINDS[name].title.partition(",")[0]
        training = self._training = KINDS[name].make(0, quick=False)
        self.bases: dict[tuple[str, int], bytes] = {}
        self.deltas: dict[tuple[str, int], bytes] = {}
        self.encode_s: dict[tuple[str, int], float] = {}
        advanced = Advanced(busy="wait", threads=1, guards=False)
        with tempfile.TemporaryDirectory() as root:
            trained, ways = (training.model, list(training.optimizers)), itertools.product(schemes, intervals)
            savers = {
                way: Checkpointer(f"{root}/{way[0]}-{way[1]}", *trained, scheme=way[0], advanced=advanced)
                for way in ways
            }
            for step in range(1, steps + 1):
                training.step(step - 1)
                for (_, interval), saver in savers.items():
                    if step in (steps - interval, steps):
                        saver.save(step, wait=True)
                if step == steps - EVERY:
                    self._before = _tensors(training)
            for which, saver in savers.items():
                saver.close()
                store = saver.saver.store
                newest = store.manifests()[0]
                assert newest.kind == "delta", f"{name}: the delta of {which} was stored as a base"
                self.bases[which], self.deltas[which] = store.fetch(newest)
                self.encode_s[which] = saver.reports()[-1].encode_s
        raw = io.BytesIO()
        optimizers = [optimizer.state_dict() for optimizer in training.optimizers]
        torch.save({"model": training.model.state_dict(), "optimizers": optimizers}, raw)
        self.raw = raw.getvalue()

    @property
    def delta(self) -> bytes:
        """The usual one."""
        return self.deltas["lossless", EVERY]

    def fastcheck(self) -> tuple[bytes, float]:
        """Take as many bytes as its published form comes to, what it does not code as it is; and the seconds of coding."""
        found = coded(fastcheck, _tensors(self._training), self._before).values()
        size = len(self.raw) - sum(part.raw for part in found) + sum(part.size for part in found)
        return self.raw[:size], sum(part.encode_s for part in found)


def _tensors(training: Training) -> Tensors:
    """Copies of what FastCheck codes: the weights and the moments of Adam."""
    found: Tensors = {role: {} for role in GROUPS}
    state = training.optimizers[0].state
    for name, parameter in training.model.named_parameters():
        kept = {**state.get(parameter, {}), "weight": parameter.detach()}
        for role in GROUPS:
            if role in kept:
                found[role][name] = kept[role].clone()
    return found


class Rows:
    """Rows of times, each compared with the first."""

    HEADINGS = ("bytes", "save", "less", "restore", "less")

    def __init__(self, folder: Path, rate: float, repeats: int) -> None:
        self._folder, self._rate, self._repeats = folder, rate, repeats
        self._first: list[float] = []
        self.rows: list[list[str]] = []

    def add(self, cells: Sequence[str], data: bytes, stores: int) -> None:
        """Measure one way of saving: so many bytes to so many stores."""
        times = []
        for _ in range(self._repeats):
            with tempfile.TemporaryDirectory(dir=self._folder) as name:
                times.append(self._timed(Path(name), data, stores))
        best = [min(column) for column in zip(*times, strict=True)]
        self._first = self._first or best
        save, load = (
            [f"{now:.2f} s", f"{1 - now / then:.1%}"] for now, then in zip(best, self._first, strict=True)
        )
        self.rows.append([*cells, f"{len(data) / 1e6:.2f} MB", *save, *load])

    def _timed(self, folder: Path, data: bytes, stores: int) -> tuple[float, float]:
        """Seconds of one commit to a new run, and of reading it back as another process would."""
        with run_of(folder, stores, rate=self._rate).writer() as writer:
            began = time.perf_counter()
            manifest = writer.commit(data, step=1, kind="base", parent=None, state_digest="", meta={})
            saved = time.perf_counter() - began
        fresh = run_of(folder, stores, rate=self._rate)
        began = time.perf_counter()
        assert fresh.fetch(manifest) == [data]
        return saved, time.perf_counter() - began


def models(folder: Path, options: Any) -> None:
    """Figure 6."""
    rows = []
    for name in options.models:
        made, table = Made(name, options.steps), Rows(folder, options.rate, options.repeats)
        table.add([made.title, "torch.save, one store"], made.raw, 1)
        table.add(["", "lossless delta, 4+1"], made.delta, 5)
        rows += table.rows
    show(["training", "saved as", *Rows.HEADINGS], rows)


def techniques(folder: Path, options: Any) -> None:
    """Figure 7."""
    made = Made("gpt", options.steps, schemes=("lossless", "auto"))
    theirs, seconds = made.fastcheck()
    table, own = Rows(folder, options.rate, options.repeats), made.encode_s["lossless", EVERY]
    for name, took, data, stores in (
        ("torch.save", None, made.raw, 1),
        ("lossless, no delta", None, made.bases["lossless", EVERY], 1),
        ("lossless delta", own, made.delta, 1),
        ("FastCheck's form", seconds, theirs, 1),
        ("torch.save", None, made.raw, 5),
        ("lossless delta", own, made.delta, 5),
        ("FastCheck's form", seconds, theirs, 5),
        ("default scheme's delta", made.encode_s["auto", EVERY], made.deltas["auto", EVERY], 1),
    ):
        way = "one store" if stores == 1 else f"{stores - 1}+1"
        table.add([f"{name}, {way}", "-" if took is None else f"{took:.2f} s"], data, stores)
    show([f"{made.title}, saved as", "encode", *Rows.HEADINGS], table.rows)


def intervals(folder: Path, options: Any) -> None:
    """Figure 9."""
    wanted = [interval for interval in INTERVALS if interval < options.steps]
    made, table = Made("gpt", options.steps, wanted), Rows(folder, options.rate, options.repeats)
    table.add(["torch.save, one store", "1.00"], made.raw, 1)
    for interval in wanted:
        delta = made.deltas["lossless", interval]
        table.add([f"{interval}, 4+1", f"{len(made.raw) / len(delta):.2f}"], delta, 5)
    show([f"{made.title}, steps between deltas", "ratio", *Rows.HEADINGS], table.rows)


def shards(folder: Path, options: Any) -> None:
    """Figure 10."""
    made, table = Made("gpt", options.steps), Rows(folder, options.rate, options.repeats)
    table.add(["torch.save, one store"], made.raw, 1)
    for name, data in (("torch.save", made.raw), ("lossless delta", made.delta)):
        for count in (1, 2, 3, 4, 5):
            table.add([f"{name}, {count}+1"], data, count + 1)
    show([f"{made.title}, data shards", *Rows.HEADINGS], table.rows)


def rates(folder: Path, options: Any) -> None:
    """How fast the links may be for stripes to matter: in memory, and in folders of one disk."""
    made, rows = Made("gpt", options.steps), []
    with tempfile.TemporaryDirectory(dir=in_memory_folder()) as root:
        for rate in options.rates:
            for name, where in (("memory", Path(root)), ("one disk", folder)):
                table = Rows(where, rate, options.repeats)
                table.add([""], made.raw, 1)
                table.add([f"{rate / 1e6:g} MB/s, {name}"], made.delta, 5)
                rows.append(table.rows[1])
    show([f"{made.title}, lossless delta, 4+1", *Rows.HEADINGS], rows)


TABLES = {table.__name__: table for table in (latency, parity, models, techniques, intervals, shards, rates)}


def main() -> None:
    options = parsed(
        __doc__, folder=None, only=list(TABLES), rounds=40, models=list(FIVE), rate=4e6, rates=[4e6, 20e6, 100e6], steps=80,
        repeats=3,
    )  # fmt: skip
    if options.steps <= EVERY:
        sys.exit(f"--steps {options.steps}: deltas are to the state {EVERY} steps before the last; use more")
    warnings.simplefilter("ignore", ShrinkpointWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for name in options.only:
            TABLES[name](Path(root), options)
            print(flush=True)


if __name__ == "__main__":
    main()
