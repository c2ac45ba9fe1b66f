"""What saving takes of a training on a GPU: snapshots, adoption, FSDP2 and restores.

    python examples/benchmarks/gpu.py [--only saves,adopt] [--layers 12] [--width 768] [--batch 64] [--device cpu --quick]

A GPT of GPT-2's form trains on made-up tokens with bf16 autocast and AdamW: 124 million parameters, whose state has 1.5 GB. A section
that fails prints its traceback, and the next one begins.

plain: torch.save, torch.distributed.checkpoint.async_save and a bare copy to pinned memory. saves: what the host waits for at a save,
and by how much longer a block of steps takes with a save in it than without, both with the GPU's work included. restore: until the
first step. adopt: with adopt=True. exchange: FSDP2 with one rank, which changes what torch is for the process.
--device cpu --quick is to see that it runs: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (0, 1)]

from cells import names, unknown
from common import resident
from gpu_model import Bench, Shape, Training, checkpointing, number, pinned, release, table

import shrinkpoint
import shrinkpoint.saver
from shrinkpoint.engine.warmup import compile_coders, is_compiled
from shrinkpoint.sharded.exchange import ExchangePlan

_EVERY = 100
"""Steps between two saves, of which the share that training waits is computed."""
_QUICK = {"layers": 2, "width": 64, "vocabulary": 512, "length": 32, "batch": 2, "steps": 3, "rounds": 2}
_FULL = {
    "layers": 12,
    "width": 768,
    "vocabulary": 50257,
    "length": 512,
    "batch": 64,
    "steps": 10,
    "rounds": 3,
}

_MOST_STEPS = 2000


def plain(bench: Bench) -> None:
    """What there is without this library."""
    training = Training(bench.shape)
    step_s = training.rest(bench.steps)
    state, gigabytes = training.nbytes / 1e6, training.nbytes / 1e9
    print(f"a step takes {1e3 * step_s:.1f} ms; the state has {state:.1f} MB")
    with table(
        "without this library",
        "save",
        "training waits, ms",
        "in steps",
        "GB/s",
        f"{bench.steps} steps with it take longer by, ms",
    ) as add_row:

        def add(name: str, save: str, seconds: float, longer_s: float | None = None) -> None:
            add_row(
                name,
                save,
                number(1e3 * seconds),
                number(seconds / step_s),
                number(gigabytes / seconds),
                number(None if longer_s is None else 1e3 * longer_s),
            )

        for measure in (_bare_copy, _torch_save, _async_save):
            try:
                measure(bench, training, add)
            except Exception as error:  # noqa: BLE001 - one way less to compare with
                traceback.print_exc(file=sys.stdout)
                add_row(measure.__name__.strip("_"), f"failed: {type(error).__name__}", "-", "-", "-", "-")


def saves(bench: Bench) -> None:
    """The two schemes, without measurements."""
    bare_s = _pinned_copy_s(Training(bench.shape))
    with table(
        "scheme",
        "save",
        "host waits, ms",
        "of them reported, ms",
        f"{bench.steps} steps with it take longer by, ms",
        "in steps",
        "over a bare copy",
        "steps lost until committed",
        "speed meanwhile",
        "encode, s",
        "write, s",
        "ratio",
        "GPU, MB more",
        "host, MB more",
        "pinned, MB",
    ) as add:
        for scheme in ("lossless", "auto"):
            release()
            _scheme(bench, scheme, bare_s, add)


def _scheme(bench: Bench, scheme: str, bare_s: float, add: Callable[..., None]) -> None:
    training = Training(bench.shape)
    url = bench.url(scheme)
    with checkpointing(bench, url, training, scheme=scheme) as checkpointer:
        checkpointer.resume()
        training.step()
        training.wait()
        started = time.perf_counter()
        checkpointer.step(training.done)
        begin_s = time.perf_counter() - started
        lost = []
        for index in range(1 + bench.rounds):
            lost.append(_save(bench, training, checkpointer, scheme, bare_s, add, first=index == 0))
    later = statistics.median(lost[1:]) if len(lost) > 1 else lost[0]
    print(
        f"{scheme}: the first call of step, which copies the weights, takes {1e3 * begin_s:.1f} ms; a save after the first takes"
        f" {1e3 * later:.1f} ms of the training, median of {max(1, len(lost) - 1)}"
    )


def _save(
    bench: Bench,
    training: Training,
    checkpointer: shrinkpoint.Checkpointer,
    scheme: str,
    bare_s: float,
    add: Callable[..., None],
    *,
    first: bool,
) -> float:
    """One save, and a row of it; the seconds by which it makes a block of steps longer."""
    host, due, memory = [0.0], [True], resident()
    training.reset_peak()
    without = training.timed(bench.steps, checkpointer.step)
    usual = training.peak()
    training.reset_peak()

    def after(step: int) -> None:
        started = time.perf_counter()
        checkpointer.step(step)
        if due[0]:
            due[0] = False
            checkpointer.save(step)
        host[0] += time.perf_counter() - started

    began = time.perf_counter()
    with_save = training.timed(bench.steps, after)
    most = [resident()]
    between = time.perf_counter()
    count = until_committed(training, checkpointer, lambda: most.append(resident()))
    ended = time.perf_counter()
    step_s = without / bench.steps
    total = ended - began - step_s * (bench.steps + count)
    speed = step_s * count / (ended - between) if count >= 3 else None
    report = checkpointer.reports()[-1]
    lost = with_save - without
    add(
        scheme,
        f"first {report.kind}" if first else report.kind,
        number(1e3 * host[0]),
        number(1e3 * report.blocked_s),
        number(1e3 * lost),
        number(lost / step_s),
        number(lost / bare_s),
        number(total / step_s),
        number(speed),
        number(report.encode_s),
        number(report.write_s),
        number(report.ratio),
        number((training.peak() - usual) / 1e6),
        number((max(most) - memory) / 1e6),
        number(pinned() / 1e6),
    )
    return lost


def until_committed(
    training: Training, checkpointer: shrinkpoint.Checkpointer, look: Callable[[], object] = lambda: None
) -> int:
    """Train on until the save under way is committed; how many steps that were.

    Args:
        training: to be continued.
        checkpointer: whose save it is.
        look: called after each step.
    """
    count = 0
    while checkpointer.saver.busy and count < _MOST_STEPS:
        checkpointer.step(training.step())
        look()
        count += 1
    training.wait()
    checkpointer.flush()
    look()
    return count


def _tensors(training: Training) -> list[torch.Tensor]:
    kept = [value for state in training.optimizer.state.values() for value in state.values()]
    return [tensor.detach() for tensor in (*training.model.parameters(), *kept)]


def _pinned_copy_s(training: Training) -> float:
    live, gpu = _tensors(training), training.shape.on_gpu
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


def _bare_copy(bench: Bench, training: Training, add: Callable[..., None]) -> None:
    add("a copy into pinned memory that is there", "any", _pinned_copy_s(training))
    started = time.perf_counter()
    copies = [tensor.to("cpu", copy=True) for tensor in _tensors(training)]
    add("a copy into new memory that is not pinned", "any", time.perf_counter() - started)
    del copies


def _torch_save(bench: Bench, training: Training, add: Callable[..., None]) -> None:
    for save in ("first", "second"):
        training.wait()
        started = time.perf_counter()
        torch.save(training.state(), bench.folder / "state.pt")
        add("torch.save", save, time.perf_counter() - started)
    (bench.folder / "state.pt").unlink()


def _async_save(bench: Bench, training: Training, add: Callable[..., None]) -> None:
    """What is reused from the first save to the second is the stager's pinned memory."""
    import torch.distributed.checkpoint as dcp

    url = bench.url("dcp")
    save_with = _stager(training.shape.on_gpu)
    for save in ("first", "second", "third"):
        without = training.timed(bench.steps)
        started = time.perf_counter()
        result = dcp.async_save(_plain(training.state()), checkpoint_id=url, **save_with(url))
        staged = getattr(result, "staging_completion", None)
        if staged is not None:  # the next step would change what is still being copied
            staged.result()
        waited = time.perf_counter() - started
        with_save = waited + training.timed(bench.steps)
        getattr(result, "upload_completion", result).result()
        add("torch.distributed.checkpoint.async_save", save, waited, with_save - without)
        shutil.rmtree(url, ignore_errors=True)


def _plain(value: Any) -> Any:
    """Without other kinds of dicts than dict, which torch 2.11's stager does not copy twice."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


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


def adopt(bench: Bench) -> None:
    """What training waits for when it goes on from what is stored."""
    with table(
        "evaluated",
        "save",
        "kind",
        "adopt, s",
        "adopt, s per GB of state",
        "snapshot, s",
        "evaluations, s",
        "in steps",
        f"waits at a save every {_EVERY} steps",
        "encode, s",
        "ratio",
    ) as add:
        for evaluates in (False, True):
            release()
            _adopt(bench, "yes" if evaluates else "no", evaluates, add)


def _adopt(bench: Bench, name: str, evaluates: bool, add: Callable[..., None]) -> None:
    training = Training(bench.shape)
    step_s = training.rest(bench.steps, 1)
    options: dict[str, Any] = {"adopt": 100}
    if evaluates:
        options["evaluate"] = training.held_out
    url = bench.url("adopt")
    with checkpointing(bench, url, training, every=bench.steps, **options) as checkpointer:
        checkpointer.resume()
        for index in range(2):
            while checkpointer.step(training.step()) is None:
                pass
            checkpointer.flush()
            report = checkpointer.reports()[-1]
            waits = (
                report.adopt_s + report.blocked_s + report.search_s if report.adopt_s is not None else None
            )
            add(
                name,
                str(index + 1),
                report.kind,
                number(report.adopt_s),
                number(None if report.adopt_s is None else report.adopt_s / (report.raw_bytes / 1e9)),
                number(report.blocked_s),
                number(report.search_s),
                number(None if waits is None else waits / step_s),
                "-" if waits is None else f"{waits / (waits + _EVERY * step_s):.1%}",
                number(report.encode_s),
                number(report.ratio),
            )


def exchange(bench: Bench) -> None:
    """FSDP2 with one rank: whole tensors are gathered on the training thread, without the network."""
    gpu = bench.shape.on_gpu
    if gpu:
        torch.cuda.set_device(bench.shape.device)
    meeting = f"file://{bench.folder / 'meeting'}"
    dist.init_process_group("nccl" if gpu else "gloo", init_method=meeting, rank=0, world_size=1)
    run, spent = ExchangePlan.run, [0.0]

    def timed(self: ExchangePlan, *given: Any, **named: Any) -> int:
        started = time.perf_counter()
        moved = run(self, *given, **named)
        spent[0] = time.perf_counter() - started
        return moved

    ExchangePlan.run = timed  # type: ignore[method-assign]
    try:
        with table(
            "scheme",
            "save",
            "kind",
            "blocked, ms",
            "exchange, ms",
            "beyond it, ms",
            "exchange, GB/s",
            "blocked, in steps",
            "encode, s",
            "ratio",
            "GPU, MB more",
        ) as add:
            for scheme in ("lossless", "auto"):
                release()
                _exchanged(bench, scheme, spent, add)
    finally:
        ExchangePlan.run = run  # type: ignore[method-assign]
        dist.destroy_process_group()


def _exchanged(bench: Bench, scheme: str, spent: list[float], add: Callable[..., None]) -> None:
    training = Training(bench.shape, sharded=True)
    step_s = training.rest(bench.steps, 1)
    training.reset_peak()
    training.timed(2)
    usual = training.peak()
    url = bench.url("sharded")
    with checkpointing(bench, url, training, scheme=scheme, busy="wait") as checkpointer:
        checkpointer.resume()
        for index in range(3):
            training.timed(3, checkpointer.step)
            training.reset_peak()
            accepted = checkpointer.save(training.done)
            peak = training.peak()
            until_committed(training, checkpointer)
            report = checkpointer.reports()[-1]
            blocked = accepted.blocked_s if accepted is not None else report.blocked_s
            add(
                scheme,
                str(index + 1),
                report.kind,
                number(1e3 * blocked),
                number(1e3 * spent[0]),
                number(1e3 * (blocked - spent[0])),
                number(report.raw_bytes / 1e9 / max(spent[0], 1e-9)),
                number(blocked / step_s),
                number(report.encode_s),
                number(report.ratio),
                number((peak - usual) / 1e6),
            )


def restore(bench: Bench) -> None:
    """From a new Checkpointer to the first step, beside ``torch.load``."""
    with table(
        "stored by",
        "of",
        "resume, s",
        "of it reading and decoding, s",
        "first step, s",
        "GB/s",
        "over torch.load",
        "MB",
    ) as add:
        training = Training(bench.shape)
        size, path = training.nbytes, bench.folder / "state.pt"
        torch.save(training.state(), path)
        release()
        plain = []
        for _ in range(2):
            other = Training(bench.shape)
            started = time.perf_counter()
            state = torch.load(path, map_location=bench.shape.device, weights_only=True)
            other.model.load_state_dict(state["model"])
            other.optimizer.load_state_dict(state["optimizer"])
            other.wait()
            plain.append(time.perf_counter() - started)
        seconds, first = statistics.median(plain), other.timed(1)
        stored = path.stat().st_size / 1e6
        path.unlink()
        add(
            "torch.save",
            "-",
            number(seconds),
            "-",
            number(first),
            number(size / 1e9 / seconds),
            "1",
            number(stored),
        )
        del other, state
        for scheme in ("lossless", "auto"):
            release()
            _restored(bench, scheme, training, seconds, add)


def _restored(
    bench: Bench, scheme: str, training: Training, plain_s: float, add: Callable[..., None]
) -> None:
    decode, spent = shrinkpoint.saver.decode_checkpoint, [0.0]

    def timed(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return decode(*given, **named)
        finally:
            spent[0] += time.perf_counter() - started

    url = bench.url(f"restored-{scheme}")
    sizes: list[int] = []
    with checkpointing(bench, url, training, scheme=scheme, resume="never") as checkpointer:
        checkpointer.resume()
        for _ in range(2):
            training.timed(bench.steps, checkpointer.step)
            checkpointer.save(training.done, wait=True)
        reports = checkpointer.reports()
    shrinkpoint.saver.decode_checkpoint = timed  # type: ignore[assignment]
    try:
        for index, report in enumerate(reports):
            sizes.append(report.bytes)
            other = Training(bench.shape)
            spent[0] = 0.0
            with checkpointing(bench, url, other, scheme=scheme) as checkpointer:
                started = time.perf_counter()
                other.done = checkpointer.resume(None if report is reports[-1] else report.step)
                other.wait()
                seconds = time.perf_counter() - started
                first = other.timed(1, checkpointer.step)
            add(
                scheme,
                "a base" if index == 0 else f"a chain of {len(sizes)}",
                number(seconds),
                number(spent[0]),
                number(first),
                number(training.nbytes / 1e9 / seconds),
                number(seconds / plain_s),
                number(sum(sizes) / 1e6),
            )
    finally:
        shrinkpoint.saver.decode_checkpoint = decode


SECTIONS = {section.__name__: section for section in (plain, saves, restore, adopt, exchange)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=names, default=list(SECTIONS), help=f"sections; default: {','.join(SECTIONS)}"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model: no real numbers")
    for name in _FULL:
        parser.add_argument(f"--{name}", type=int, help=f"default {_FULL[name]}")
    parser.add_argument("--threads", type=int, help="of the coders (default: half of the processors)")
    options = parser.parse_args()
    if wrong := unknown(options.only, SECTIONS):
        parser.error(f"no such section: {wrong}; there are {', '.join(SECTIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: --device cpu --quick shows that the bench runs")
    sizes = {
        name: getattr(options, name) or size for name, size in (_QUICK if options.quick else _FULL).items()
    }
    steps, rounds = sizes.pop("steps"), sizes.pop("rounds")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    if not is_compiled("auto"):
        compile_coders("auto")
    gpu = torch.cuda.get_device_name(0) if device.type == "cuda" else "no GPU"
    print(
        f"## {gpu}, torch {torch.__version__}, {len(os.sched_getaffinity(0))} processors\n\n{sizes}",
        flush=True,
    )
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        for name in options.only:
            shape = Shape(device=device, **sizes)
            bench = Bench(
                shape=shape, folder=Path(folder), steps=steps, rounds=rounds, threads=options.threads
            )
            print(f"\n### {name}\n", flush=True)
            try:
                SECTIONS[name](bench)
            except Exception:  # noqa: BLE001 - the other sections are measured all the same
                failed += 1
                traceback.print_exc(file=sys.stdout)
            release()
    sys.exit(failed)


if __name__ == "__main__":
    main()
