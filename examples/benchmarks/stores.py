"""What several stores cost and bring: commit latency, parity, and saves and restores where bandwidth is the limit.

    OMP_NUM_THREADS=1 python examples/benchmarks/stores.py [--folder DISK] [--rounds 40]

Everything is measured in one run and told as ratios. The bandwidth table puts each store behind a link of ``--rate`` bytes a
second (a wrapper that sleeps as long as the bytes would take); its states are the demo's GPT with AdamW, ``--every`` steps
apart, coded by ``scheme="lossless"`` as a difference. Times of saves and restores are those of the stores alone: encoding
happens before and is told beside.
"""

import argparse
import io
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

from stores_links import Distant, timed


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


def containers(every: int, steps: int) -> tuple[bytes, bytes, bytes, float]:
    """A state as ``torch.save`` writes it, as a lossless delta, as a delta of the default scheme, and the seconds of the second."""
    from gpt import GPT, GPTConfig, build_optimizer, load_corpus, train_loader

    import shrinkpoint

    config = GPTConfig(steps=steps)
    torch.manual_seed(0)
    model = GPT(config)
    optimizer, schedule = build_optimizer(model, config)
    made: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as root:
        savers = {
            scheme: shrinkpoint.Checkpointer(
                f"{root}/{scheme}", model, optimizer, scheme=scheme, busy="wait", threads=1
            )
            for scheme in ("lossless", "auto")
        }
        for step, batch in enumerate(train_loader(load_corpus()[0], config), 1):
            loss = model.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step in (steps - every, steps):
                for saver in savers.values():
                    saver.save(step, wait=True)
            if step == steps:
                break
        for scheme, saver in savers.items():
            saver.close()
            store = saver.saver.store
            newest = store.manifests()[0]
            made[scheme] = store.fetch_blob(newest.chain[-1], newest)
        seconds = savers["lossless"].reports()[-1].encode_s
    raw = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, raw)
    return raw.getvalue(), made["lossless"], made["auto"], seconds


def bandwidth(folder: Path, rate: float, every: int, steps: int) -> Iterator[str]:
    """Seconds to put a container and to get it back, by technique and number of shards."""
    raw, lossless, auto, seconds = containers(every, steps)
    yield (
        f"torch.save {len(raw) / 1e6:.2f} MB; lossless delta {len(lossless) / 1e6:.2f} MB, {seconds:.2f} s to encode; default"
        f" scheme's delta {len(auto) / 1e6:.2f} MB; {rate / 1e6:.0f} MB/s for each store\n"
    )
    yield "| | save | less | restore | less |"
    yield "|---|---:|---:|---:|---:|"
    base: tuple[float, float] | None = None
    rows = [("torch.save's bytes, one store", raw, 1), ("default scheme, one store", auto, 1)]
    rows += [("lossless delta, one store", lossless, 1)]
    rows += [(f"torch.save's bytes, {n - 1}+1", raw, n) for n in (3, 4, 5)]
    rows += [(f"lossless delta, {n - 1}+1", lossless, n) for n in (3, 4, 5)]
    for number, (name, data, stores) in enumerate(rows):
        times = [timed(folder / f"{number}-{again}", data, stores, rate) for again in range(3)]
        save, load = (min(column) for column in zip(*times, strict=True))
        base = base or (save, load)
        less = f"{1 - save / base[0]:.1%}", f"{1 - load / base[1]:.1%}"
        yield f"| {name} | {save:.2f} s | {less[0]} | {load:.2f} s | {less[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=("latency", "parity", "bandwidth"), help="one of the tables")
    parser.add_argument("--rate", type=float, default=20e6, help="bytes a second of each store")
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ShrinkpointWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folder = Path(root)
        parts = {
            "latency": latency(folder, options.rounds),
            "parity": parity(),
            "bandwidth": bandwidth(folder, options.rate, options.every, options.steps),
        }
        for name, part in parts.items():
            for line in part if options.only in (None, name) else ():
                print(line, flush=True)
            print()


if __name__ == "__main__":
    main()
