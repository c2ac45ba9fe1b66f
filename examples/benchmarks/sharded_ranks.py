"""What a sharded training waits for at a save, and what a restore reads and takes; by real ranks with gloo, on this machine.

    python examples/benchmarks/sharded_ranks.py [--ranks 4] [--width 512] [--layers 12] [--saves 6] [--scheme lossless]

First table: how long training waits for each call of `save`, beside the exchange alone, which is the snapshot as well: each rank's shards
are copied into the memory of their owners. The first save plans the exchange, later ones use the plan. Second table: the same run
restored by other numbers of ranks, each in a process of its own: the bytes that a rank reads for each byte that it needs, the greatest
of all ranks; and by how much its resident memory grows at most, for each byte of its shard: with the new tensors of the
optimizer, and by a second restore, which finds these there already, as on a GPU, where they are not in this memory. That does not contain
the compiled coders, which a process loads once: some 200 MB. Third table: copies of the model that DDP trains, whose ranks share the work: CPU
seconds that coding takes of each rank's background thread, beside those of one process. All times are of this machine, as it is.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from demo_report import markdown_table

import shrinkpoint
from shrinkpoint.coding.selective import Source
from shrinkpoint.engine.background import Background
from shrinkpoint.runtime.memory import give_back
from shrinkpoint.sharded import targets
from shrinkpoint.sharded.exchange import ExchangePlan
from shrinkpoint.state.roles import describe_training
from shrinkpoint.store.run import RunStore


def join(rank: int, world: int, meeting: str) -> None:
    """Become one of some ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)


def build(width: int, layers: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of layers, sharded by FSDP2, after a step of AdamW on made-up gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, 4 * width) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on made-up gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def checkpointer_of(url: str, model: nn.Module, optimizer: torch.optim.Optimizer, scheme: str) -> Any:
    """As a training makes it."""
    return shrinkpoint.Checkpointer(
        url, model, optimizer, scheme=scheme, advanced=shrinkpoint.Advanced(busy="wait", threads=1)
    )


def most(value: float) -> float:
    """Of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def save(rank: int, world: int, meeting: str, url: str, options: Any, out: Any) -> None:
    """Some saves; what training waited for at each."""
    join(rank, world, meeting)
    model, optimizer = build(options.width, options.layers, world)
    checkpointer = checkpointer_of(url, model, optimizer, options.scheme)
    run, spent = ExchangePlan.run, [0.0]

    def timed(self: ExchangePlan, *given: Any, **named: Any) -> int:
        started = time.perf_counter()
        moved = run(self, *given, **named)
        spent[0] = time.perf_counter() - started
        return moved

    ExchangePlan.run = timed  # type: ignore[method-assign]
    for number in range(1, options.saves + 1):
        step(model, optimizer)
        dist.barrier()
        started = time.perf_counter()
        checkpointer.save(number)
        blocked = most(time.perf_counter() - started)
        exchange = most(spent[0])
        checkpointer.flush()
        if rank == 0:
            out.put((number, blocked, exchange))
    checkpointer.close()
    dist.barrier()


def memory(field: str) -> int:
    """Of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def load_coders(scheme: str) -> None:
    """Save and restore a small model, without the other ranks."""
    model = nn.Linear(64, 256)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        saver = shrinkpoint.Saver(folder, shrinkpoint.SaverConfig(scheme=scheme))
        saver.check()
        for number in range(2):
            step(model, optimizer)
            state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
            describe = describe_training(
                model, [optimizer], model_path=("model",), optimizers_path=("optimizers",)
            )
            saver.save(state, step=number, describe=describe, wait=True)
        saver.restore()
        saver.close()


def grown_by_resume(url: str, model: nn.Module, optimizer: torch.optim.Optimizer, options: Any) -> int:
    """By how many bytes the resident memory grows at most while a training resumes."""
    checkpointer = checkpointer_of(url, model, optimizer, options.scheme)
    gc.collect()
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    checkpointer.resume()
    grown = memory("VmHWM") - before
    checkpointer.close()
    return grown


def restore(rank: int, world: int, meeting: str, url: str, options: Any, out: Any) -> None:
    """A restore; what it read, and what memory it took."""
    join(rank, world, meeting)
    load_coders(options.scheme)
    model, optimizer = build(options.width, options.layers, world)
    fetched, needed = [0], [0]
    ranged, blob, entries = RunStore.fetch_range, RunStore.fetch_blob, Source.entries

    def fetch_range(store: RunStore, ref: Any, start: int, end: int, **how: Any) -> bytes:
        fetched[0] += end - start
        return ranged(store, ref, start, end, **how)

    def fetch_blob(store: RunStore, ref: Any, *rest: Any) -> bytes:
        fetched[0] += ref.size
        return blob(store, ref, *rest)

    def of(source: Source, names: Any) -> Any:
        found = entries(source, names)
        needed[0] += sum(len(data) for entry in found for data in entry.encoded.sections.values())
        return found

    RunStore.fetch_range, RunStore.fetch_blob, Source.entries = fetch_range, fetch_blob, of  # type: ignore[method-assign]
    made: dict[str, torch.Tensor] = {}
    make = targets.target_for

    def target_for(spec: Any, *rest: Any) -> torch.Tensor:
        if spec.name not in made:
            made[spec.name] = make(spec, *rest)
        return made[spec.name]

    targets.target_for = target_for
    local = sum(
        tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes
        for tensor in (
            *model.parameters(),
            *(value for state in optimizer.state.values() for value in state.values()),
        )
    )
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    first, read = grown_by_resume(url, model, optimizer, options), fetched[0] / max(1, needed[0])
    second = grown_by_resume(url, model, optimizer, options)
    bound = 1.5 * local + largest
    found = (read, local, first / local, first / bound, second / local, second / bound)
    answer = tuple(most(value) for value in found)
    if rank == 0:
        out.put(answer)
    dist.barrier()


def share(rank: int, world: int, meeting: str, url: str, options: Any, out: Any) -> None:
    """Saves of copies; the CPU seconds that each rank codes for."""
    join(rank, world, meeting)
    load_coders(options.scheme)
    torch.manual_seed(0)
    inner = nn.Sequential(*(nn.Linear(options.width, 4 * options.width) for _ in range(options.layers)))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step(model, optimizer)
    checkpointer = checkpointer_of(url, model if world > 1 else inner, optimizer, options.scheme)
    encode, spent = Background._encode, [0.0]

    def timed(self: Background, *given: Any) -> Any:
        started = time.thread_time()
        encoded = encode(self, *given)
        spent[0] = time.thread_time() - started
        return encoded

    Background._encode = timed  # type: ignore[method-assign]
    for number in range(1, options.saves + 1):
        step(model, optimizer)
        checkpointer.save(number)
        checkpointer.flush()
        slowest = most(spent[0])
        if rank == 0:
            out.put((number, slowest))
    checkpointer.close()
    dist.barrier()


def spawned(function: Any, world: int, folder: Path, *arguments: Any) -> list[Any]:
    """What the first of some ranks puts out."""
    queue = mp.get_context("spawn").SimpleQueue()
    meeting = str(folder / f"meeting-{time.monotonic_ns()}")
    mp.spawn(function, (world, meeting, *arguments, queue), nprocs=world)  # type: ignore[no-untyped-call]
    found = []
    while not queue.empty():
        found.append(queue.get())
    return found


def shared(folder: Path, options: Any) -> list[str]:
    """The table of copies."""
    found = {
        world: dict(spawned(share, world, folder, str(folder / f"copies-{world}"), options))
        for world in (1, *options.copies)
    }
    lines = [
        [
            str(number),
            f"{alone:.2f}",
            *(f"{found[world][number]:.2f} ({found[world][number] / alone:.2f})" for world in options.copies),
        ]
        for number, alone in found[1].items()
    ]
    return markdown_table(["save", "one process", *(f"{world} ranks" for world in options.copies)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--scheme", default="lossless")
    parser.add_argument("--restores", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--copies", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.copies:
            print("copies: CPU seconds of coding, the slowest rank's, and of one process's\n")
            print(*shared(folder, options), "", sep="\n", flush=True)
        if not options.restores:
            return
        url = str(folder / "run")
        print(f"{options.ranks} ranks: milliseconds, the slowest rank's\n")
        lines = [
            [str(number), *(f"{1e3 * value:.1f}" for value in (blocked, exchange, blocked - exchange))]
            for number, blocked, exchange in spawned(save, options.ranks, folder, url, options)
        ]
        headings = ["save", "blocked", "snapshot and exchange", "more than these"]
        print(*markdown_table(headings, lines), sep="\n", flush=True)
        print(f"\nrestored, after {options.ranks} ranks have written a base and deltas\n")
        lines = []
        for world in options.restores:
            [(read, local, *grown)] = spawned(restore, world, folder, url, options)
            shares = [f"{value:.2f}" for value in (read, *grown[2:], *grown[:2])]
            lines.append([str(world), f"{local / 1e6:.1f} MB", *shares])
        bound = "of 1.5 shards and the largest tensor"
        headings = ["ranks", "a rank's shard", "bytes read, of those needed", "memory, of the shard", bound]
        print(*markdown_table([*headings, "with the optimizer's: of the shard", bound], lines), sep="\n")


if __name__ == "__main__":
    main()
