"""What saving takes of a training on a GPU: snapshots, adoption, FSDP2 and restores.

    python examples/benchmarks/gpu.py [--only saves,adopt] [--layers 12] [--width 768] [--batch 64] [--device cpu --quick]

A GPT of GPT-2's form trains on made-up tokens with bf16 autocast and AdamW: 124 million parameters, whose state has 1.5 GB. A section
that fails prints its traceback, and the next one begins. Each row is also told at once on stderr, should the machine be lost.

plain: torch.save, torch.distributed.checkpoint.async_save and a bare copy to pinned memory. saves: what the host waits for at a save,
and by how much longer a block of steps takes with a save in it than without, both with the GPU's work included. restore: until the
first step. adopt: with adopt=True. exchange: FSDP2 with one rank, which changes what torch is for the process.
--device cpu --quick is to see that it runs: its numbers mean nothing.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import gpt_of, parsed, replaced, resident, show, timed
from gpt import GPTConfig
from torch import Tensor, nn

import shrinkpoint
import shrinkpoint.engine.placement
from shrinkpoint.engine.warmup import compile_coders, is_compiled
from shrinkpoint.sharded.exchange import ExchangePlan

_EVERY = 100
"""Steps between two saves, of which the share that training waits is computed."""
_FULL = {
    "layers": 12,
    "width": 768,
    "vocabulary": 50257,
    "length": 512,
    "batch": 64,
    "steps": 10,
    "rounds": 3,
}
_QUICK = {"layers": 2, "width": 64, "vocabulary": 512, "length": 32, "batch": 2, "steps": 3, "rounds": 2}
_MOST_STEPS, _BATCHES, _SCORED = 2000, 8, 4
Add = Callable[..., None]


class Training:
    """A GPT of GPT-2's form on made-up tokens, with bf16 autocast and fused AdamW; `sharded` by FSDP2, over the default group."""

    def __init__(self, options: Namespace, *, sharded: bool = False) -> None:
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        torch.manual_seed(0)
        with self.device:
            heads = max(1, options.width // 64)
            config = GPTConfig(width=options.width, layers=options.layers, heads=heads, block=options.length)
            self.model: nn.Module = gpt_of(config, options.vocabulary)
            # Few tokens are frequent, as in text: there is something to be learned, and rows of the embedding move unequally.
            size = (_BATCHES + _SCORED, options.batch, options.length + 1)
            tokens = (options.vocabulary ** torch.rand(size)).long() - 1
            self._batches = list(tokens.clamp(0, options.vocabulary - 1))
        if sharded:
            from torch.distributed.fsdp import fully_shard

            for part in (*self.model.blocks, self.model):  # type: ignore[misc]
                fully_shard(part)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, betas=(0.9, 0.95), fused=True)
        self.done = 0
        """Steps so far."""
        self.timed(5)  # so that memory is allocated and kernels are chosen

    @property
    def tensors(self) -> list[Tensor]:
        """The weights, and what the optimizer keeps."""
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach() for tensor in (*self.model.parameters(), *kept)]

    @property
    def nbytes(self) -> int:
        """Of the whole state."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def state(self) -> dict[str, Any]:
        """As one would give it to ``torch.save``."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def held_out(self) -> list[float]:
        """Losses of batches that are not trained on."""
        with torch.no_grad():
            return torch.stack([self._loss(batch) for batch in self._batches[_BATCHES:]]).tolist()

    def _loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def step(self) -> int:
        """One step; how many have been made. The GPU may not be done with it."""
        self.optimizer.zero_grad(set_to_none=True)
        self._loss(self._batches[self.done % _BATCHES]).backward()
        self.optimizer.step()
        self.done += 1
        return self.done

    def wait(self) -> None:
        """For the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, steps: int, after: Callable[[int], object] = lambda step: None) -> float:
        """Seconds of some steps, the GPU's work included; `after` is called after each one, with the number of steps so far."""
        self.wait()
        started = time.perf_counter()
        for _ in range(steps):
            after(self.step())
        self.wait()
        return time.perf_counter() - started

    def rest(self, steps: int, blocks: int = 3) -> float:
        """Seconds of a step with nothing beside it."""
        return statistics.median(self.timed(steps) for _ in range(blocks)) / steps

    def peak(self) -> int:
        """The most bytes of the GPU that were allocated since the last call."""
        if not self.on_gpu:
            return 0
        most = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return most


def pinned() -> int:
    """Bytes of pinned memory that torch has allocated; 0 where it does not say."""
    try:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    except (AttributeError, RuntimeError):
        return 0


def release() -> None:
    """Give back what the section before has left, so that the next one's first save allocates its own pinned memory."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        older = getattr(torch._C, "_host_emptyCache", None)
        if empty := getattr(torch.accelerator, "empty_host_cache", None) or older:
            empty()


def number(value: float | str | None, digits: int = 3) -> str:
    """For a table, without an exponent; a text as it is."""
    if value is None or value != value:
        return "-"
    if isinstance(value, str) or value == 0:
        return str(value)
    places = max(0, digits - len(str(int(abs(value)))) if abs(value) >= 1 else digits)
    return f"{value:.{places}f}"


@contextmanager
def table(headings: str) -> Iterator[Add]:
    """Print the rows that are added inside as a table, whatever happens."""
    rows: list[list[str]] = []

    def add(*cells: float | str | None) -> None:
        rows.append([number(cell) for cell in cells])
        print("   ", *rows[-1], sep="  ", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        show(headings, rows)


@contextmanager
def checkpointing(
    options: Namespace, run: str, training: Training, busy: Any = "skip", fresh: bool = True, **more: Any
) -> Iterator[shrinkpoint.Checkpointer]:
    """Make one, of a new run unless it is to be restored, that is let go of after some seconds where something fails."""
    if fresh:
        shutil.rmtree(options.folder / run, ignore_errors=True)
    advanced = shrinkpoint.Advanced(busy=busy, threads=options.threads or None)
    made = shrinkpoint.Checkpointer(
        str(options.folder / run), training.model, training.optimizer, advanced=advanced, **more
    )
    try:
        yield made
    except BaseException:
        made.saver.close(timeout_s=5)
        raise
    made.close()


# --- sections -----------------------------------------------------------------------------------------------


def plain(options: Namespace) -> None:
    """What there is without this library."""
    training = Training(options)
    step_s, gigabytes = training.rest(options.steps), training.nbytes / 1e9
    print(f"a step takes {1e3 * step_s:.1f} ms; the state has {1e3 * gigabytes:.1f} MB")
    headings = "without this library | save | training waits, ms | in steps | GB/s"
    with table(f"{headings} | {options.steps} steps with it take longer by, ms") as add_row:

        def add(name: str, save: str, seconds: float, longer_s: float | None = None) -> None:
            more = None if longer_s is None else 1e3 * longer_s
            add_row(name, save, 1e3 * seconds, seconds / step_s, gigabytes / seconds, more)

        for measure in (_bare_copy, _torch_save, _async_save):
            try:
                measure(options, training, add)
            except Exception as error:  # noqa: BLE001 - one way less to compare with
                traceback.print_exc(file=sys.stdout)
                add_row(measure.__name__.strip("_"), f"failed: {type(error).__name__}", *4 * [None])


def _pinned_copy_s(training: Training) -> float:
    live, gpu = training.tensors, training.on_gpu
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=gpu) for tensor in live]

    def copy() -> float:
        training.wait()
        started = time.perf_counter()
        for buffer, tensor in zip(host, live, strict=True):
            buffer.copy_(tensor, non_blocking=gpu)
        training.wait()
        return time.perf_counter() - started

    copy()
    return statistics.median(copy() for _ in range(5))


def _bare_copy(options: Namespace, training: Training, add: Add) -> None:
    add("a copy into pinned memory that is there", "any", _pinned_copy_s(training))
    started = time.perf_counter()
    copies = [tensor.to("cpu", copy=True) for tensor in training.tensors]
    add("a copy into new memory that is not pinned", "any", time.perf_counter() - started)
    del copies


def _torch_save(options: Namespace, training: Training, add: Add) -> None:
    for save in ("first", "second"):
        training.wait()
        started = time.perf_counter()
        torch.save(training.state(), options.folder / "state.pt")
        add("torch.save", save, time.perf_counter() - started)
    (options.folder / "state.pt").unlink()


def _async_save(options: Namespace, training: Training, add: Add) -> None:
    """What is reused from the first save to the second is the stager's pinned memory."""
    import torch.distributed.checkpoint as dcp

    url, save_with = str(options.folder / "dcp"), _stager(training.on_gpu)
    for save in ("first", "second", "third"):
        without = training.timed(options.steps)
        started = time.perf_counter()
        result = dcp.async_save(_without_other_dicts(training.state()), checkpoint_id=url, **save_with(url))
        staged = getattr(result, "staging_completion", None)
        if staged is not None:  # the next step would change what is still being copied
            staged.result()
        waited = time.perf_counter() - started
        with_save = waited + training.timed(options.steps)
        getattr(result, "upload_completion", result).result()
        add("torch.distributed.checkpoint.async_save", save, waited, with_save - without)
        shutil.rmtree(url, ignore_errors=True)


def _without_other_dicts(value: Any) -> Any:
    """Made of dicts of no other kind, which torch 2.11's stager does not copy twice."""
    if isinstance(value, dict):
        return {key: _without_other_dicts(item) for key, item in value.items()}
    return [_without_other_dicts(item) for item in value] if isinstance(value, list) else value


def _stager(gpu: bool) -> Callable[[str], dict[str, Any]]:
    """Arguments for pinned memory: by the stagers of newer torches, or by the writer of older ones."""
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    except ImportError:
        from torch.distributed.checkpoint import FileSystemWriter

        staged: list[Any] = []

        def older(url: str) -> dict[str, Any]:
            writer = FileSystemWriter(url, cache_staged_state_dict=gpu)
            if staged:
                writer.state_dict_cache = staged[0].state_dict_cache
            staged[:] = [writer]
            return {"storage_writer": writer}

        return older
    stager = DefaultStager(StagingOptions(gpu, False, gpu, gpu))
    return lambda url: {"async_stager": stager}


def saves(options: Namespace) -> None:
    """The two schemes, without measurements."""
    bare_s = _pinned_copy_s(Training(options))
    headings = (
        f"host waits, ms | of them reported, ms | {options.steps} steps with it take longer by, ms | in steps"
    )
    headings += (
        " | over a bare copy | steps lost until committed | speed meanwhile | encode, s | write, s | ratio"
    )
    with table(f"scheme | save | {headings} | GPU, MB more | host, MB more | pinned, MB") as add:
        for scheme in ("lossless", "auto"):
            release()
            training = Training(options)
            with checkpointing(options, scheme, training, scheme=scheme) as checkpointer:
                checkpointer.resume()
                training.step()
                training.wait()
                started = time.perf_counter()
                checkpointer.step(training.done)
                begin_s = time.perf_counter() - started
                rounds = range(1 + options.rounds)
                lost = [
                    _save(options, training, checkpointer, scheme, bare_s, add, first=n == 0) for n in rounds
                ]
            later = statistics.median(lost[1:])
            print(
                f"{scheme}: the first call of step, which copies the weights, takes {1e3 * begin_s:.1f} ms; a save after"
                f" the first takes {1e3 * later:.1f} ms of the training, median of {len(lost) - 1}"
            )


def _save(
    options: Namespace,
    training: Training,
    checkpointer: Any,
    scheme: str,
    bare_s: float,
    add: Add,
    *,
    first: bool,
) -> float:
    """One save, and a row of it; the seconds by which it makes a block of steps longer."""
    host, due, memory = [0.0], [True], resident()
    training.peak()
    without = training.timed(options.steps, checkpointer.step)
    usual = training.peak()

    def after(step: int) -> None:
        started = time.perf_counter()
        checkpointer.step(step)
        if due[0]:
            due[0] = False
            checkpointer.save(step)
        host[0] += time.perf_counter() - started

    began = time.perf_counter()
    with_save = training.timed(options.steps, after)
    most = [resident()]
    between = time.perf_counter()
    count = until_committed(training, checkpointer, lambda: most.append(resident()))
    ended = time.perf_counter()
    step_s, lost, report = without / options.steps, with_save - without, checkpointer.reports()[-1]
    total = ended - began - step_s * (options.steps + count)
    speed = step_s * count / (ended - between) if count >= 3 else None
    add(
        scheme, f"first {report.kind}" if first else report.kind, 1e3 * host[0], 1e3 * report.blocked_s, 1e3 * lost,
        lost / step_s, lost / bare_s, total / step_s, speed, report.encode_s, report.write_s, report.ratio,
        (training.peak() - usual) / 1e6, (max(most) - memory) / 1e6, pinned() / 1e6,
    )  # fmt: skip
    return lost


def until_committed(training: Training, checkpointer: Any, look: Callable[[], object] = lambda: None) -> int:
    """Train on until the save under way is committed; how many steps that were. `look` is called after each one."""
    count = 0
    while checkpointer.saver.busy and count < _MOST_STEPS:
        checkpointer.step(training.step())
        look()
        count += 1
    training.wait()
    checkpointer.flush()
    look()
    return count


def restore(options: Namespace) -> None:
    """From a new Checkpointer to the first step, beside ``torch.load``."""
    headings = "stored by | of | resume, s | of it reading and decoding, s | first step, s | GB/s | over torch.load | MB"
    with table(headings) as add:
        training = Training(options)
        gigabytes, path, plain = training.nbytes / 1e9, options.folder / "state.pt", []
        torch.save(training.state(), path)
        release()
        for _ in range(2):
            other = Training(options)
            started = time.perf_counter()
            state = torch.load(path, map_location=other.device, weights_only=True)
            other.model.load_state_dict(state["model"])
            other.optimizer.load_state_dict(state["optimizer"])
            other.wait()
            plain.append(time.perf_counter() - started)
        plain_s, first = statistics.median(plain), other.timed(1)
        add("torch.save", "-", plain_s, None, first, gigabytes / plain_s, "1", path.stat().st_size / 1e6)
        path.unlink()
        del other, state
        for scheme in ("lossless", "auto"):
            release()
            run, decoding = f"restored-{scheme}", [0.0]
            with checkpointing(options, run, training, scheme=scheme, resume="never") as checkpointer:
                checkpointer.resume()
                for _ in range(2):
                    training.timed(options.steps, checkpointer.step)
                    checkpointer.save(training.done, wait=True)
                reports = checkpointer.reports()
            with replaced(shrinkpoint.engine.placement, "decode_checkpoint", timed(decoding)):
                for index, report in enumerate(reports):
                    size, decoding[0] = sum(one.bytes for one in reports[: index + 1]) / 1e6, 0.0
                    other = Training(options)
                    with checkpointing(options, run, other, fresh=False, scheme=scheme) as checkpointer:
                        started = time.perf_counter()
                        other.done = checkpointer.resume(None if report is reports[-1] else report.step)
                        other.wait()
                        seconds = time.perf_counter() - started
                        first = other.timed(1, checkpointer.step)
                    of = "a base" if index == 0 else f"a chain of {index + 1}"
                    add(scheme, of, seconds, decoding[0], first, gigabytes / seconds, seconds / plain_s, size)


def adopt(options: Namespace) -> None:
    """What training waits for when it goes on from what is stored."""
    headings = "evaluated | save | kind | adopt, s | adopt, s per GB of state | snapshot, s | evaluations, s | in steps"
    with table(f"{headings} | waits at a save every {_EVERY} steps | encode, s | ratio") as add:
        for evaluates in (False, True):
            release()
            training = Training(options)
            step_s = training.rest(options.steps, 1)
            more: dict[str, Any] = {"evaluate": training.held_out} if evaluates else {}
            with checkpointing(
                options, "adopt", training, every=options.steps, adopt=100, **more
            ) as checkpointer:
                checkpointer.resume()
                for index in range(2):
                    while checkpointer.step(training.step()) is None:
                        pass
                    checkpointer.flush()
                    report = checkpointer.reports()[-1]
                    adopts = report.adopt_s or 0.0
                    waits = adopts + report.blocked_s + report.search_s
                    share = f"{waits / (waits + _EVERY * step_s):.1%}"
                    add(
                        "yes" if evaluates else "no", str(index + 1), report.kind, adopts, adopts / (report.raw_bytes / 1e9),
                        report.blocked_s, report.search_s, waits / step_s, share, report.encode_s, report.ratio,
                    )  # fmt: skip


def exchange(options: Namespace) -> None:
    """FSDP2 with one rank: whole tensors are gathered on the training thread, without the network."""
    gpu, moving = options.device == "cuda", [0.0]
    if gpu:
        torch.cuda.set_device(0)
    meeting = f"file://{options.folder / 'meeting'}"
    dist.init_process_group("nccl" if gpu else "gloo", init_method=meeting, rank=0, world_size=1)
    headings = "scheme | save | kind | blocked, ms | exchange, ms | beyond it, ms | exchange, GB/s | blocked, in steps"
    try:
        with table(f"{headings} | encode, s | ratio") as add, replaced(ExchangePlan, "run", timed(moving)):
            for scheme in ("lossless", "auto"):
                release()
                training = Training(options, sharded=True)
                step_s = training.rest(options.steps, 1)
                with checkpointing(options, "sharded", training, scheme=scheme, busy="wait") as checkpointer:
                    checkpointer.resume()
                    for index in range(3):
                        training.timed(3, checkpointer.step)
                        moving[0] = 0.0
                        accepted = checkpointer.save(training.done)
                        moved = moving[0]
                        until_committed(training, checkpointer)
                        report = checkpointer.reports()[-1]
                        blocked = accepted.blocked_s if accepted is not None else report.blocked_s
                        rate = report.raw_bytes / 1e9 / max(moved, 1e-9)
                        add(
                            scheme, str(index + 1), report.kind, 1e3 * blocked, 1e3 * moved, 1e3 * (blocked - moved),
                            rate, blocked / step_s, report.encode_s, report.ratio,
                        )  # fmt: skip
    finally:
        dist.destroy_process_group()


SECTIONS = {section.__name__: section for section in (plain, saves, restore, adopt, exchange)}


def main() -> None:
    sizes = dict.fromkeys(_FULL, 0)
    options = parsed(__doc__, only=list(SECTIONS), device="cuda", quick=False, threads=0, **sizes)
    for name, size in (_QUICK if options.quick else _FULL).items():
        setattr(options, name, getattr(options, name) or size)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU: --device cpu --quick shows that the bench runs")
    if options.device == "cpu":
        torch.set_num_threads(1)
    if not is_compiled("auto"):
        compile_coders("auto")
    gpu = torch.cuda.get_device_name(0) if options.device == "cuda" else "no GPU"
    print(
        f"## {gpu}, torch {torch.__version__}, {len(os.sched_getaffinity(0))} processors\n\n{vars(options)}",
        flush=True,
    )
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        options.folder = Path(folder)
        for name in options.only:
            print(f"\n### {name}\n", flush=True)
            try:
                SECTIONS[name](options)
            except Exception:  # noqa: BLE001 - the other sections are measured all the same
                failed += 1
                traceback.print_exc(file=sys.stdout)
            release()
    sys.exit(failed)


if __name__ == "__main__":
    main()
