"""FastCheck's tables, scaled: saves and restores by model, by technique, by the steps between deltas, and by data shards.

    OMP_NUM_THREADS=1 python examples/benchmarks/stores_fastcheck.py [--folder DISK] [--only models] [--rate 4e6]

Its figures 6, 7, 9 and 10 compare with torch.save to one place where bandwidth is the limit. Here each store is a folder behind
a link of ``--rate`` bytes a second (a wrapper that sleeps as long as the bytes would take); the trainings are some of the bench
of the bound, of 0.1 to 0.7 million parameters, after ``--steps`` steps. Times are those of the stores alone, the shortest of
``--repeats``; seconds to encode are told beside them, and are spent in the background.
"""

import argparse
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from shrinkpoint import Checkpointer
from shrinkpoint.errors import ShrinkpointWarning

sys.path.insert(0, str(Path(__file__).parents[1]))

from bound_training import Training
from bound_trainings import KINDS
from lossless import GROUPS, FastCheck, Tensors
from stores_links import timed

FIVE = ("gpt", "bert", "vit", "lstm", "recommender")
INTERVALS = (1, 2, 4, 8, 16, 32, 64)
SHARDS = (1, 2, 3, 4, 5)
EVERY = 8


class Made:
    """What one training's state comes to, coded in different ways.

    Args:
        name: Of the training.
        steps: How long it is trained.
        intervals: Steps between a delta and what it is a difference to.
        schemes: Of this library.
    """

    def __init__(
        self, name: str, steps: int, intervals: Sequence[int], schemes: Sequence[str] = ("lossless",)
    ) -> None:
        kind = KINDS[name]
        self.title = kind.title.partition(",")[0]
        training = kind.build(0, kind, False)
        self.bases: dict[tuple[str, int], bytes] = {}
        self.deltas: dict[tuple[str, int], bytes] = {}
        self.encode_s: dict[tuple[str, int], float] = {}
        self._before: Tensors | None = None
        with tempfile.TemporaryDirectory() as root:
            savers = {
                (scheme, interval): _saver(training, f"{root}/{scheme}-{interval}", scheme)
                for scheme in schemes
                for interval in intervals
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
        self._training = training
        raw = io.BytesIO()
        torch.save(_state(training), raw)
        self.raw = raw.getvalue()

    def fastcheck(self) -> tuple[bytes, float]:
        """As many bytes as its published form comes to, what it does not code as it is; and the seconds of coding."""
        found = FastCheck().measure(_tensors(self._training), self._before).values()
        size = len(self.raw) - sum(part.raw for part in found) + sum(part.size for part in found)
        return self.raw[:size], sum(part.encode_s for part in found)


def _saver(training: Training, url: str, scheme: str) -> Checkpointer:
    return Checkpointer(
        url, training.model, list(training.optimizers), scheme=scheme, busy="wait", threads=1, guards=False
    )


def _state(training: Training) -> dict[str, object]:
    optimizers = [optimizer.state_dict() for optimizer in training.optimizers]
    return {"model": training.model.state_dict(), "optimizers": optimizers}


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


class Table:
    """Rows of times, each compared with the first."""

    def __init__(self, folder: Path, rate: float, repeats: int) -> None:
        self._folder, self._rate, self._repeats = folder, rate, repeats
        self._first: tuple[float, float] | None = None
        self._number = 0

    def row(self, cells: Sequence[str], data: bytes, stores: int) -> str:
        """One way of saving: so many bytes to so many stores, one of them for parity where there are several."""
        times = []
        for _ in range(self._repeats):
            self._number += 1
            times.append(timed(self._folder / str(self._number), data, stores, self._rate))
        save, load = (min(column) for column in zip(*times, strict=True))
        self._first = self._first or (save, load)
        less = [f"{1 - now / then:.1%}" for now, then in zip((save, load), self._first, strict=True)]
        size = f"{len(data) / 1e6:.2f} MB"
        return f"| {' | '.join([*cells, size, f'{save:.2f} s', less[0], f'{load:.2f} s', less[1]])} |"


HEADINGS = "bytes | save | less | restore | less"


def _head(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} | {HEADINGS} |", "|" + "---|" * len(names) + "---:|" * 5]


def _way(stores: int) -> str:
    return "one store" if stores == 1 else f"{stores - 1}+1"


def models(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Figure 6."""
    yield from _head("training", "saved as")
    for name in options.models.split(","):
        made = Made(name, options.steps, [EVERY])
        table = Table(folder / name, options.rate, options.repeats)
        yield table.row([made.title, "torch.save, one store"], made.raw, 1)
        yield table.row(["", "lossless delta, 4+1"], made.deltas["lossless", EVERY], 5)


def techniques(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Figure 7."""
    made = Made("gpt", options.steps, [EVERY], ("lossless", "auto"))
    theirs, seconds = made.fastcheck()
    yield from _head(f"{made.title}, saved as", "encode")
    table = Table(folder / "techniques", options.rate, options.repeats)
    base, delta = made.bases["lossless", EVERY], made.deltas["lossless", EVERY]
    own = made.encode_s["lossless", EVERY]
    for name, took, data, stores in (
        ("torch.save", None, made.raw, 1),
        ("lossless, no delta", None, base, 1),
        ("lossless delta", own, delta, 1),
        ("FastCheck's form", seconds, theirs, 1),
        ("torch.save", None, made.raw, 5),
        ("lossless delta", own, delta, 5),
        ("FastCheck's form", seconds, theirs, 5),
        ("default scheme's delta", made.encode_s["auto", EVERY], made.deltas["auto", EVERY], 1),
    ):
        encode = "-" if took is None else f"{took:.2f} s"
        yield table.row([f"{name}, {_way(stores)}", encode], data, stores)


def intervals(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Figure 9."""
    wanted = [interval for interval in INTERVALS if interval < options.steps]
    made = Made("gpt", options.steps, wanted)
    yield from _head(f"{made.title}, steps between deltas", "ratio")
    table = Table(folder / "intervals", options.rate, options.repeats)
    yield table.row(["torch.save, one store", "1.00"], made.raw, 1)
    for interval in wanted:
        delta = made.deltas["lossless", interval]
        yield table.row([f"{interval}, 4+1", f"{len(made.raw) / len(delta):.2f}"], delta, 5)


def shards(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Figure 10."""
    made = Made("gpt", options.steps, [EVERY])
    yield from _head(f"{made.title}, data shards")
    table = Table(folder / "shards", options.rate, options.repeats)
    yield table.row(["torch.save, one store"], made.raw, 1)
    for name, data in (("torch.save", made.raw), ("lossless delta", made.deltas["lossless", EVERY])):
        for count in SHARDS:
            yield table.row([f"{name}, {count}+1"], data, count + 1)


TABLES = {"models": models, "techniques": techniques, "intervals": intervals, "shards": shards}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    parser.add_argument("--models", default=",".join(FIVE), help="of the first table; default: %(default)s")
    parser.add_argument("--rate", type=float, default=4e6, help="bytes a second of each store")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.steps <= EVERY:
        parser.error(
            f"--steps {options.steps}: deltas are to the state {EVERY} steps before the last; use more"
        )
    warnings.simplefilter("ignore", ShrinkpointWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for name, lines in TABLES.items():
            if options.only in (None, name):
                began = time.monotonic()
                for line in lines(Path(root), options):
                    print(line, flush=True)
                print(f"\n({time.monotonic() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
