"""The GPU's bench: what the step logs take of each step, and what a replay does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_model import Bench, Training, checkpointing, noted, number, release

import shrinkpoint

__all__ = ["steps"]


def steps(bench: Bench) -> None:
    """The step logs: what they take of each step, and what a replay does."""
    tiny = replace(bench.shape, layers=1, width=64, vocabulary=512, length=32, batch=2)
    parameters = sum(parameter.nbytes for parameter in Training(bench.shape, warm=0).model.parameters())
    folder = _log_folder(bench, 4 * bench.steps * parameters)
    bench.report.say(f"the logs are in {folder.parent}")
    every = shrinkpoint.StepLog(busy="wait", rehearse=False)
    small = shrinkpoint.StepLog(kind="small", overhead=None, busy="wait")
    # one of each kind first, should there be no time for the others
    cases: list[tuple[str, Any]] = [
        ("exact, every step", every),
        ("small, overhead=0.02", shrinkpoint.StepLog(kind="small")),
        ("exact, overhead=0.02", shrinkpoint.StepLog()),
        ("small, every step", small),
    ]
    try:
        for log in (every, small):  # what they compile is not to be measured
            _logged(replace(bench, shape=tiny), "first use", log, folder, lambda *_: None)
        with bench.report.table(
            "log",
            "steps",
            "a step without, ms",
            "with, ms",
            "longer by",
            "training waits, as it says",
            "records every, steps",
            "MB per step",
            "bits per parameter and step",
            "replayed steps",
            "seconds of a replayed step over a trained one's",
        ) as rows:
            for name, log in cases:
                if bench.left(0.8):
                    release()
                    with noted(bench, name):
                        _logged(bench, name, log, folder, rows.add)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _logged(bench: Bench, name: str, log: Any, folder: Path, add: Callable[..., None]) -> None:
    """A checkpoint, and logged steps after it; of the log of every step also what a resume replays, twice."""
    run, replays = bench.url("logged"), name == "exact, every step"
    raised = log.kind == "small" and log.overhead is not None  # `every` is, after twenty steps
    some = 3 * bench.steps if raised else bench.steps
    options: dict[str, Any] = {"scheme": "lossless", "step_log": log, "step_log_url": str(folder / "log")}
    shutil.rmtree(folder / "log", ignore_errors=True)
    for turn in range(3 if replays else 1):
        training = Training(bench.shape)
        step_s = training.rest(bench.steps, 1)
        parameters = sum(parameter.numel() for parameter in training.model.parameters())
        with checkpointing(bench, run, training, **options) as checkpointer:
            training.done = checkpointer.resume() or training.done
            found, logged = checkpointer.step_log.measured() or {}, checkpointer.step_log
            before, first = logged.bytes, training.done
            if turn == 0:
                checkpointer.step(training.step())
                checkpointer.save(training.done, wait=True)
                first = training.done
                checkpointer.step(training.step())
                logged.flush()  # the small log reads the checkpoint before its first record
                training.timed(3, checkpointer.step)  # memory is allocated
            waited = logged.blocked_s
            seconds = training.timed(some, checkpointer.step) if turn < 2 else None
            share = None if seconds is None else (logged.blocked_s - waited) / seconds
        size, count = logged.bytes - before, training.done - first
        every = f"{getattr(logged, 'every', 1)}"
        if getattr(logged, "gaps", 0) or getattr(logged, "skipped", 0):
            every += f", {getattr(logged, 'gaps', 0)} gaps, {getattr(logged, 'skipped', 0)} skipped"
        again = found.get("replayed_steps", 0)
        add(
            f"{name}, resumed" if turn else name,
            str(some if seconds is not None else 0),
            number(1e3 * step_s),
            number(None if seconds is None else 1e3 * seconds / some),
            "-" if seconds is None else f"{seconds / some / step_s - 1:.1%}",
            "-" if share is None else f"{share:.1%}",
            every if logged.off is None else f"off: {logged.off}",
            number(size / 1e6 / count if count else None),
            number(8 * size / count / parameters if count else None),
            str(again),
            number(found.get("replay_s", 0.0) / again / step_s if again else None),
        )


def _log_folder(bench: Bench, needed: int) -> Path:
    """In memory, if there is room."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * needed + 2**30
    return Path(tempfile.mkdtemp(prefix="gpu-bench-", dir=shared if roomy else bench.folder))
