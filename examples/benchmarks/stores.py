"""What several stores cost and bring: commit latency, parity, and saves and restores where bandwidth is the limit.

    OMP_NUM_THREADS=1 python examples/benchmarks/stores.py [--folder DISK] [--rounds 40] [--rate 20e6]

Everything is measured in one run and shown as ratios. The tables of bandwidth (`stores_bandwidth.py`) put each store behind a
link of ``--rate`` bytes a second, or of each of ``--rates``; their states are the demo's GPT with AdamW, ``--every`` steps apart. With
``--only server`` the stores are buckets of an S3 server, each behind a proxy of ``--server-rate``. ``--only`` takes several names, with commas.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped import StripedObjects
from shrinkpoint.store.striped.parity import p_of, q_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from stores_bandwidth import by_rate, containers, over_links, over_server, random_bytes
from stores_links import Distant


def latency(folder: Path, rounds: int) -> Iterator[str]:
    """Commits on three stores and on one, in turns: folders on a disk and in memory, where every sync takes 5 ms longer, and where
    every request takes 20 ms.
    """
    yield "| container | stores | one | three, `parity=1` | ratio | ratio of the fastest |"
    yield "|---|---|---:|---:|---:|---:|"
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        quick = Path(root)
        kinds = (
            ("folders, one disk", folder, 0.0, 0.0),
            ("folders, memory", quick, 0.0, 0.0),
            ("folders, syncs of 5 ms", quick, 5e-3, 0.0),
            ("requests of 20 ms", quick, 0.0, 20e-3),
        )
        for size in (4_000, 400_000, 4_000_000):
            for number, (name, where, sync_s, request_s) in enumerate(kinds):
                with _slow_syncs(sync_s):
                    one, three = _commits(where / f"latency-{size}-{number}", size, rounds, request_s)
                medians, fastest = [statistics.median(each) for each in (one, three)], [min(one), min(three)]
                times = [f"{median * 1e3:.1f} ms" for median in medians]
                ratios = [f"{three / one:.2f}" for one, three in (medians, fastest)]
                yield f"| {' | '.join([f'{size // 1000:,} kB', name, *times, *ratios])} |"


def _commits(base: Path, size: int, rounds: int, request_s: float) -> tuple[list[float], list[float]]:
    """Seconds of commits on one store and on three; who is first, and pays for what the disk still has to do, changes."""
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    writers = [
        run.writer() for run in (_run([base / "one"], request_s), _run([base / n for n in "abc"], request_s))
    ]
    times: tuple[list[float], list[float]] = [], []
    for step in range(rounds + 2):
        for which in (0, 1) if step % 2 else (1, 0):
            began = time.perf_counter()
            writers[which].commit(data, step=step, kind="base", parent=None, state_digest="", meta={})
            taken = time.perf_counter() - began
            if step > 1:  # the first commits make folders, and threads
                times[which].append(taken)
    return times


def _run(folders: list[Path], request_s: float) -> RunStore:
    if not request_s:
        return RunStore(folders)
    distant: Any = [Distant(LocalObjects(str(folder)), request_s) for folder in folders]
    return RunStore("ignored", objects=StripedObjects(distant, parity=1) if len(distant) > 1 else distant[0])


@contextmanager
def _slow_syncs(seconds: float) -> Iterator[None]:
    """Let every ``os.fsync`` take so much longer, as on a disk of its own for each folder."""
    real = os.fsync

    def slow(descriptor: int) -> None:
        real(descriptor)
        time.sleep(seconds)

    os.fsync = slow if seconds else real
    try:
        yield
    finally:
        os.fsync = real


def parity() -> Iterator[str]:
    """Of 48 MiB, by CPU time of one thread; the best of some rounds."""
    yield "| | GB/s of data |"
    yield "|---|---:|"
    for k in (2, 4):
        shards = [np.random.default_rng(i).integers(0, 256, 48 * 2**20 // k, np.uint8) for i in range(k)]
        for name, work in (("P (XOR)", p_of), ("Q", q_of)):
            best = min(_cpu(lambda work=work, shards=shards: work(shards)) for _ in range(9))
            yield f"| {name}, {k} data shards | {48 * 2**20 / best / 1e9:.1f} |"


def _cpu(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


PARTS = ("latency", "parity", "bandwidth", "rates", "server")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default=",".join(PARTS), help="some of the tables; default: %(default)s")
    parser.add_argument("--rate", type=float, default=20e6, help="bytes a second of each store")
    parser.add_argument("--rates", default="4e6,20e6,100e6", help="of the table by rate")
    parser.add_argument("--server-rate", type=float, default=4e6, help="of each bucket of the server")
    parser.add_argument(
        "--sizes",
        help="random bytes instead of a training's states: MB of torch.save, lossless, default scheme",
    )
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5, help="turns of the tables of bandwidth")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only {','.join(unknown)}: the tables are {', '.join(PARTS)}")
    warnings.simplefilter("ignore", ShrinkpointWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folder = Path(root)
        parts = {"latency": latency(folder, options.rounds), "parity": parity()}
        if {"bandwidth", "rates", "server"} & set(wanted):
            sizes = [float(size) for size in options.sizes.split(",")] if options.sizes else []
            made = random_bytes(sizes) if sizes else containers(options.every, options.steps)
            rates = [float(rate) for rate in options.rates.split(",")]
            parts["bandwidth"] = over_links(made, options.rate, options.repeats)
            parts["rates"] = by_rate(folder, made, rates, options.repeats)
            parts["server"] = over_server(folder, made, options.server_rate, options.repeats)
        for name in wanted:
            for line in parts[name]:
                print(line, flush=True)
            print()


if __name__ == "__main__":
    main()
