"""Saves and restores of the demo's GPT where bandwidth is the limit: to one store and to several.

Each store is behind a link of so many bytes a second: a wrapper that sleeps as long as the bytes would take, or, before a real S3
server, the proxy of the tests, which holds the bytes back. Times are those of the stores alone; encoding happens before, in the
background, and is shown beside. All rows are measured in turns. "less" compares the shortest times, which are what the least was in the way
of; "from, to" are the extremes of what single turns come to.
"""

import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from stores_links import timed, timed_run

from shrinkpoint.store.run import RunStore

__all__ = ["Made", "by_rate", "containers", "over_links", "over_server", "random_bytes"]

Times = tuple[float, float]


@dataclass(frozen=True)
class Made:
    """One state, saved in three ways.

    Attributes:
        raw: By ``torch.save``.
        lossless: By ``scheme="lossless"``, as a delta.
        auto: By the default scheme, as a delta.
        lossless_s: Seconds to encode,
        auto_s: of each; None where nothing was encoded.
    """

    raw: bytes
    lossless: bytes
    auto: bytes
    lossless_s: float | None
    auto_s: float | None


def random_bytes(sizes: Sequence[float]) -> Made:
    """As many MB as `containers` once came to, for stores that take them as they are: nothing is trained or encoded."""
    draw = np.random.default_rng(0).bytes
    return Made(*(draw(round(size * 1e6)) for size in sizes), lossless_s=None, auto_s=None)


def containers(every: int, steps: int) -> Made:
    """The demo's GPT after so many steps; deltas are to the state ``every`` steps before."""
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
        seconds = {scheme: saver.reports()[-1].encode_s for scheme, saver in savers.items()}
    raw = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, raw)
    return Made(raw.getvalue(), made["lossless"], made["auto"], seconds["lossless"], seconds["auto"])


Row = tuple[str, bytes, float | None, Callable[[Path], Times]]
"""What it is, its bytes, the seconds of encoding, and what measures a save and a restore in a new folder."""


@dataclass(frozen=True)
class Line:
    """What came of a row.

    Attributes:
        name: What it is.
        size: Bytes.
        encode_s: Seconds of encoding.
        turns: By turn, its times, and those of what it is compared with.
    """

    name: str
    size: int
    encode_s: float | None
    turns: list[tuple[Times, Times]]


def over_links(made: Made, rate: float, repeats: int) -> Iterator[str]:
    """Ways of saving. The stores are in memory, so that nothing but the links is slow.

    Args:
        made: What to save.
        rate: Bytes a second of each store.
        repeats: How many turns.
    """
    rows = [_row("torch.save's bytes", made.raw, None, 1, rate)]
    rows += [_row("default scheme", made.auto, made.auto_s, 1, rate)]
    rows += [_row("lossless delta", made.lossless, made.lossless_s, 1, rate)]
    rows += [_row("torch.save's bytes", made.raw, None, n, rate) for n in (3, 4, 5)]
    rows += [_row("lossless delta", made.lossless, made.lossless_s, n, rate) for n in (3, 4, 5)]
    with _memory() as memory:
        yield from _table(f"{rate / 1e6:g} MB/s for each store", _measured(memory, rows, repeats))


def by_rate(folder: Path, made: Made, rates: Sequence[float], repeats: int) -> Iterator[str]:
    """The lossless delta in five stores at different rates, in memory and in folders of one disk.

    Args:
        folder: On the disk.
        made: What to save.
        rates: Bytes a second of each store.
        repeats: How many turns.
    """
    lines: list[Line] = []
    with _memory() as memory:
        for rate in rates:
            for name, where in (("memory", memory), ("one disk", folder)):
                rows = [_row("", made.raw, None, 1, rate), _row("", made.lossless, made.lossless_s, 5, rate)]
                _, line = _measured(where, rows, repeats)
                lines.append(replace(line, name=f"{rate / 1e6:g} MB/s, {name}"))
    yield from _table("lossless delta, 4+1", lines)
    yield (
        f"\nOf CPU time, a commit of that to five folders in memory takes {_cpu_of_a_commit(made.lossless) * 1e3:.0f} ms, of all threads"
        " together, whatever the link."
    )


def _cpu_of_a_commit(data: bytes) -> float:
    seconds = []
    with _memory() as memory:
        for again in range(5):
            folders = [str(memory / f"{again}-{store}") for store in range(5)]
            with RunStore(folders, parity=1).writer() as writer:
                began = time.process_time()
                writer.commit(data, step=1, kind="base", parent=None, state_digest="", meta={})
                seconds.append(time.process_time() - began)
    return min(seconds)


def _row(name: str, data: bytes, encode_s: float | None, stores: int, rate: float) -> Row:
    return (
        f"{name}, {_way(stores)}",
        data,
        encode_s,
        lambda folder: timed(folder, data, stores, rate),
    )


def _way(stores: int) -> str:
    return "one store" if stores == 1 else f"{stores - 1}+1"


def over_server(folder: Path, made: Made, rate: float, repeats: int) -> Iterator[str]:
    """Five buckets of a real S3 server, each behind a proxy of ``rate`` bytes a second in each direction."""
    with ExitStack() as stack:
        server, new_run = _server(stack, folder / "server", rate)

        def row(name: str, data: bytes, encode_s: float | None, stores: int) -> Row:
            return f"{name}, {_way(stores)}", data, encode_s, lambda _: timed_run(new_run(stores), data)

        rows = [row("torch.save's bytes", made.raw, None, 1)]
        rows += [row("lossless delta", made.lossless, made.lossless_s, stores) for stores in (1, 5)]
        title = f"buckets of {server}, {rate / 1e6:g} MB/s for each"
        yield from _table(title, _measured(folder, rows, repeats))


def _measured(folder: Path, rows: Sequence[Row], repeats: int) -> list[Line]:
    turns: list[list[Times]] = []
    for _ in range(repeats):
        turn = []
        for _, _, _, measure in rows:
            turn.append(measure(folder / "row"))
            shutil.rmtree(folder / "row", ignore_errors=True)
        turns.append(turn)
    return [
        Line(name, len(data), encode_s, [(turn[place], turn[0]) for turn in turns])
        for place, (name, data, encode_s, _) in enumerate(rows)
    ]


def _table(title: str, lines: Sequence[Line]) -> Iterator[str]:
    yield f"| {title} | bytes | encode | save | less | from, to | restore | less | from, to |"
    yield "|---|" + "---:|" * 8
    for line in lines:
        encode = "-" if line.encode_s is None else f"{line.encode_s:.2f} s"
        cells = [line.name, f"{line.size / 1e6:.2f} MB", encode]
        for way in (0, 1):
            ours, first = (min(turn[which][way] for turn in line.turns) for which in (0, 1))
            each = [1 - mine[way] / reference[way] for mine, reference in line.turns]
            cells += [f"{ours:.2f} s", f"{1 - ours / first:.1%}", f"{min(each):.1%}, {max(each):.1%}"]
        yield f"| {' | '.join(cells)} |"


@contextmanager
def _memory() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        yield Path(root)


def _server(stack: ExitStack, home: Path, rate: float) -> tuple[str, Callable[[int], Callable[[], RunStore]]]:
    """Ceph where it is installed, moto elsewhere; and what opens a new run in so many buckets behind slow links."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support.ceph import CephGateway, missing_programs
    from support.fault_proxy import FaultProxy
    from support.s3 import moto_server, new_bucket, storage_options

    home.mkdir()
    server = stack.enter_context(moto_server() if missing_programs() else CephGateway(home))
    proxies = [stack.enter_context(FaultProxy((server.host, server.port), rate=rate)) for _ in range(5)]

    def new_run(stores: int) -> Callable[[], RunStore]:
        urls = [f"s3://{new_bucket(server)}/run" for _ in range(stores)]
        options = [storage_options(server, proxy.url) for proxy in proxies[:stores]]

        def opened() -> RunStore:
            if stores == 1:
                return RunStore(urls[0], storage_options=options[0])
            return RunStore(urls, storage_options=options, parity=1)

        return opened

    return "moto" if missing_programs() else "a Ceph gateway", new_run
