"""The GPU's bench: measured saves, adoption, FSDP2 and restores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_model import Bench, Training, checkpointing, noted, number, release
from gpu_saves import until_committed

import shrinkpoint
import shrinkpoint.saver
from shrinkpoint.sharded.exchange import ExchangePlan

__all__ = ["adopt", "exchange", "measured", "restore"]

_EVERY = 100
"""Steps between two saves, of which the share that training waits is computed."""


def measured(bench: Bench) -> None:
    """Searches and probes, with the two implementations of AdamW that a GPU has."""
    with bench.report.table(
        "AdamW",
        "save",
        "kind",
        "evaluations, s",
        "evaluations",
        "probed steps",
        "longest pause, ms",
        "of the time until committed",
        "the library's own share",
        "quality",
        "degradation",
        "ratio",
        "GPU, MB more",
    ) as rows:
        for fused in (True, False):
            name = "fused" if fused else "foreach"
            release()
            with noted(bench, name):
                _measured(bench, name, Training(bench.shape, fused=fused), rows.add)


def _measured(bench: Bench, name: str, training: Training, add: Callable[..., None]) -> None:
    training.reset_peak()
    training.timed(2)
    usual = training.peak()
    options = {"evaluate": training.held_out, "train_loss": training.loss}
    with checkpointing(bench, bench.url(f"measured-{name}"), training, **options) as checkpointer:
        checkpointer.resume()
        for index in range(2):
            if index and not bench.left(0.4 if name == "fused" else 0.9):
                break
            training.reset_peak()
            began, pauses = time.perf_counter(), [0.0]

            def paused(call: Callable[[int], object], step: int, pauses: list[float] = pauses) -> None:
                # the GPU's queue is emptied first: what a pause takes is not what the steps before it do
                training.wait()
                started = time.perf_counter()
                call(step)
                training.wait()
                pauses.append(time.perf_counter() - started)

            for _ in range(bench.steps):
                paused(checkpointer.step, training.step())
            paused(checkpointer.save, training.done)
            while checkpointer.saver.busy:
                paused(checkpointer.step, training.step())
            checkpointer.flush()
            seconds, report = time.perf_counter() - began, checkpointer.reports()[-1]
            add(
                name,
                str(index + 1),
                report.kind,
                number(report.search_s),
                str(report.evaluations),
                ", ".join(report.resumed) or "none",
                number(1e3 * max(pauses)),
                f"{sum(pauses) / seconds:.2%}",
                f"{report.overhead:.2%}",
                report.measured,
                "-" if report.degradation is None else f"{report.degradation:+.3%}",
                number(report.ratio),
                number((training.peak() - usual) / 1e6),
            )


def adopt(bench: Bench) -> None:
    """What training waits for when it goes on from what is stored."""
    with bench.report.table(
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
    ) as rows:
        for evaluates in (False, True):
            if bench.left(0.6):
                name = "yes" if evaluates else "no"
                release()
                with noted(bench, name):
                    _adopt(bench, name, evaluates, rows.add)


def _adopt(bench: Bench, name: str, evaluates: bool, add: Callable[..., None]) -> None:
    training = Training(bench.shape)
    step_s = training.rest(bench.steps, 1)
    options: dict[str, Any] = {"adopt": True, "adoptions": 100}
    if evaluates:
        options["evaluate"] = training.held_out
    url = bench.url("adopt")
    with checkpointing(bench, url, training, every=bench.steps, **options) as checkpointer:
        checkpointer.resume()
        for index in range(2):
            if index and not bench.left(0.8):
                break
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
        with bench.report.table(
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
        ) as rows:
            for scheme in ("lossless", "auto"):
                release()
                with noted(bench, scheme):
                    _exchanged(bench, scheme, spent, rows.add)
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
            if index and not bench.left(0.45 if scheme == "lossless" else 0.9):
                break
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
    with bench.report.table(
        "stored by",
        "of",
        "resume, s",
        "of it reading and decoding, s",
        "first step, s",
        "GB/s",
        "over torch.load",
        "MB",
    ) as rows:
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
        rows.add(
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
            with noted(bench, scheme):
                _restored(bench, scheme, training, seconds, rows.add)


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
