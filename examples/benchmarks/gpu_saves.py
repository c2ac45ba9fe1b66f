"""The GPU's bench: what a save takes of a training, by torch's own ways, a bare copy to pinned memory, and this library."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from gpu_model import Bench, Training, checkpointing, noted, number, pinned, release, resident

import shrinkpoint

__all__ = ["plain", "saves", "until_committed"]

_MOST_STEPS = 2000


def plain(bench: Bench) -> None:
    """What there is without this library."""
    training = Training(bench.shape)
    step_s = training.rest(bench.steps)
    state, gigabytes = training.nbytes / 1e6, training.nbytes / 1e9
    bench.report.say(f"a step takes {1e3 * step_s:.1f} ms; the state has {state:.1f} MB")
    with bench.report.table(
        "without this library",
        "save",
        "training waits, ms",
        "in steps",
        "GB/s",
        f"{bench.steps} steps with it take longer by, ms",
    ) as rows:

        def add(name: str, save: str, seconds: float, longer_s: float | None = None) -> None:
            rows.add(
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
                rows.add(measure.__name__.strip("_"), f"failed: {type(error).__name__}", "-", "-", "-", "-")


def saves(bench: Bench) -> None:
    """The two schemes, without measurements."""
    bare_s = _pinned_copy_s(Training(bench.shape))
    with bench.report.table(
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
    ) as rows:
        for scheme in ("lossless", "auto"):
            release()
            _scheme(bench, scheme, bare_s, rows.add)


def _scheme(bench: Bench, scheme: str, bare_s: float, add: Callable[..., None]) -> None:
    training = Training(bench.shape)
    url = bench.url(scheme)
    with noted(bench, scheme), checkpointing(bench, url, training, scheme=scheme) as checkpointer:
        checkpointer.resume()
        training.step()
        training.wait()
        started = time.perf_counter()
        checkpointer.step(training.done)
        begin_s = time.perf_counter() - started
        lost = []
        for index in range(1 + bench.rounds):
            if index > 1 and not bench.left(0.4 if scheme == "lossless" else 0.9):
                break
            lost.append(_save(bench, training, checkpointer, scheme, bare_s, add, first=index == 0))
    later = statistics.median(lost[1:]) if len(lost) > 1 else lost[0]
    bench.report.say(
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
