"""What a sharded training waits for at a save, and what a restore reads and takes; by real ranks with gloo, on this machine.

    python examples/benchmarks/sharded_ranks.py [--ranks 4] [--width 512] [--layers 12] [--saves 6] [--scheme lossless]
        [--restores 2,3,4] [--copies 2,4] [--tries 5]

First table: copies of the model that DDP trains, whose ranks share the work: CPU seconds that coding takes of each rank's background
thread, beside those of one process. They code in turn, since at once they would share the caches and the memory of this machine, which
one process has for itself; and each save's is the least of some tries, to which what else the machine does only adds. Second table:
how long training waits for each call of `save`, beside the exchange alone, which is the snapshot as well: each rank's shards are
copied into the memory of their owners. The first save plans the exchange, later ones use the plan. Third table: the same run restored
by other numbers of ranks, each in a process of its own: the bytes that a rank reads for each byte that it needs, the greatest of all
ranks; and by how much its resident memory grows at most, for each byte of its shard: with the new tensors of the optimizer, and by a
second restore, which finds these there already, as on a GPU, where they are not in this memory. That does not contain the compiled
coders, which a process loads once: some 200 MB. All times are of this machine, as it is.
"""

import fcntl
import gc
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import parsed, replaced, reset_peak, resident, show, timed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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


def build(options: Any, world: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of layers, sharded by FSDP2 or copied by DDP, after a step of AdamW on made-up gradients."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(options.width, 4 * options.width) for _ in range(options.layers))
    )
    if sharded:
        mesh = init_device_mesh("cpu", (world,))
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh)
    elif world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on made-up gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def checkpointer_of(url: str, model: nn.Module, optimizer: torch.optim.Optimizer, options: Any) -> Any:
    """As a training makes it."""
    advanced = shrinkpoint.Advanced(busy="wait", threads=1)
    return shrinkpoint.Checkpointer(url, model, optimizer, scheme=options.scheme, advanced=advanced)


def every(value: float) -> list[float]:
    """Of all ranks."""
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def most(value: float) -> float:
    """Of all ranks."""
    return max(every(value))


def save(rank: int, world: int, meeting: str, url: str, options: Any, sharded: bool, out: Any) -> None:
    """Some saves; what training waited for at each, how long the exchange took, and CPU seconds of coding."""
    join(rank, world, meeting)
    if not sharded:
        load_coders(options.scheme)
    model, optimizer = build(options, world, sharded=sharded)
    checkpointer = checkpointer_of(url, model, optimizer, options)
    moving, coding = [0.0], [0.0]

    def in_turn(function: Any) -> Any:
        def call(*given: Any) -> Any:
            with open(f"{meeting}-turn", "w") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                return timed(coding, time.thread_time)(function)(*given)

        return call

    with replaced(ExchangePlan, "run", timed(moving)), replaced(Background, "_encode", in_turn):
        for number in range(1, options.saves + 1):
            step(model, optimizer)
            moving[0] = coding[0] = 0.0
            dist.barrier()
            started = time.perf_counter()
            checkpointer.save(number)
            blocked, exchange = most(time.perf_counter() - started), most(moving[0])
            checkpointer.flush()
            row = number, blocked, exchange, every(coding[0])
            if rank == 0:
                out.put(row)
        checkpointer.close()
    dist.barrier()


def load_coders(scheme: str) -> None:
    """Save and restore a small model, without the other ranks."""
    model = nn.Linear(64, 256)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    paths = {"model_path": ("model",), "optimizers_path": ("optimizers",)}
    with tempfile.TemporaryDirectory() as folder:
        saver = shrinkpoint.Saver(folder, shrinkpoint.SaverConfig(scheme=scheme))
        saver.check()
        for number in range(2):
            step(model, optimizer)
            state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
            saver.save(state, step=number, describe=describe_training(model, [optimizer], **paths), wait=True)
        saver.restore()
        saver.close()


def restore(rank: int, world: int, meeting: str, url: str, options: Any, out: Any) -> None:
    """A restore; what it read, and what memory it took."""
    join(rank, world, meeting)
    load_coders(options.scheme)
    model, optimizer = build(options, world, sharded=True)
    fetched, needed, made = [0], [0], dict[str, torch.Tensor]()

    def fetch_range(ranged: Any) -> Any:
        def fetch(store: RunStore, ref: Any, start: int, end: int, **how: Any) -> bytes:
            fetched[0] += end - start
            return ranged(store, ref, start, end, **how)

        return fetch

    def fetch_blob(blob: Any) -> Any:
        def fetch(store: RunStore, ref: Any, *rest: Any) -> bytes:
            fetched[0] += ref.size
            return blob(store, ref, *rest)

        return fetch

    def entries(whole: Any) -> Any:
        def of(source: Source, names: Any) -> Any:
            found = whole(source, names)
            needed[0] += sum(len(data) for entry in found for data in entry.encoded.sections.values())
            return found

        return of

    def target_for(make: Any) -> Any:
        def once(spec: Any, *rest: Any) -> torch.Tensor:
            if spec.name not in made:
                made[spec.name] = make(spec, *rest)
            return made[spec.name]

        return once

    def grown() -> int:
        """By how many bytes the resident memory grows at most while the training resumes."""
        checkpointer = checkpointer_of(url, model, optimizer, options)
        gc.collect()
        give_back()
        before = reset_peak()
        checkpointer.resume()
        peak = resident("VmHWM") - before
        checkpointer.close()
        return peak

    kept = (value for state in optimizer.state.values() for value in state.values())
    parts = [
        tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for tensor in (*model.parameters(), *kept)
    ]
    local, largest = sum(part.nbytes for part in parts), max(p.numel() * 4 for p in model.parameters())
    with ExitStack() as stack:
        for owner, changed in (
            (RunStore, fetch_range),
            (RunStore, fetch_blob),
            (Source, entries),
            (targets, target_for),
        ):
            stack.enter_context(replaced(owner, changed.__name__, changed))
        first, read = grown(), fetched[0] / max(1, needed[0])
        second, bound = grown(), 1.5 * local + largest
    found = (read, local, second / local, second / bound, first / local, first / bound)
    answer = tuple(most(value) for value in found)
    if rank == 0:
        out.put(answer)
    dist.barrier()


def least(world: int, folder: Path, options: Any) -> list[float]:
    """CPU seconds that coding takes of the slowest rank at each save."""
    tries = [
        [row[3] for row in spawned(save, world, folder, f"{folder}/{world}-{number}", options, False)]
        for number in range(options.tries)
    ]
    return [max(min(rank) for rank in zip(*found, strict=True)) for found in zip(*tries, strict=True)]


def spawned(function: Any, world: int, folder: Path, *arguments: Any) -> list[Any]:
    """What the first of some ranks puts out."""
    queue = mp.get_context("spawn").SimpleQueue()
    meeting = str(folder / f"meeting-{time.monotonic_ns()}")
    mp.spawn(function, (world, meeting, *arguments, queue), nprocs=world)  # type: ignore[no-untyped-call]
    found = []
    while not queue.empty():
        found.append(queue.get())
    return found


def main() -> None:
    sizes = {"ranks": 4, "width": 512, "layers": 12, "saves": 6}
    options = parsed(__doc__, **sizes, scheme="lossless", restores=[2, 3, 4], copies=[2, 4], tries=5)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), f"{name}/run"
        worlds = (1, *options.copies) if options.copies else ()
        lines = [
            [number, f"{alone:.2f}", *(f"{one:.2f} ({one / alone:.2f})" for one in shared)]
            for number, (alone, *shared) in enumerate(
                zip(*(least(n, folder, options) for n in worlds), strict=True), 1
            )
        ]
        headings = ["save", "one process", *(f"{world} ranks" for world in options.copies)]
        show(headings, lines, "copies: CPU seconds of coding, the slowest rank's, and of one process's")
        if not options.restores:
            return
        lines = [
            [number, *(f"{1e3 * value:.1f}" for value in (blocked, exchange, blocked - exchange))]
            for number, blocked, exchange, _ in spawned(save, options.ranks, folder, url, options, True)
        ]
        title = f"{options.ranks} ranks: milliseconds, the slowest rank's"
        show("save | blocked | snapshot and exchange | more than these", lines, title)
        lines = []
        for world in options.restores:
            [(read, local, *grown)] = spawned(restore, world, folder, url, options)
            lines.append([world, f"{local / 1e6:.1f} MB", *(f"{value:.2f}" for value in (read, *grown))])
        bound = "of 1.5 shards and the largest tensor"
        headings = ["ranks", "a rank's shard", "bytes read, of those needed", "memory, of the shard", bound]
        title = f"restored, after {options.ranks} ranks have written a base and deltas"
        show([*headings, "with the optimizer's: of the shard", bound], lines, title)


if __name__ == "__main__":
    main()
