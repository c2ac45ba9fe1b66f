"""The ways in which a Composer run is interrupted and continued, for the tests and for examples/benchmarks/composer_resume.py."""

from dataclasses import dataclass, field, replace
from typing import Any

from composer.core import Event, State, Time
from support.composer_models import ALGORITHMS, OPTIMIZERS, SCHEDULERS, Crash, Setup

__all__ = ["CASES", "IMPOSSIBLE", "NEVER", "UNREAD", "Case"]

NEVER = "1000000ba"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to save, to be interrupted and to train."""

    setup: Setup = field(default_factory=Setup)
    interval: Any = "3ba"
    crashes: tuple[Crash, ...]
    """One for each run but the last."""
    resumes_at: int
    """Batch from which the last run must train."""


def points() -> dict[str, Case]:
    """Where a run is interrupted, for every kind of data."""
    return {
        "first epoch": Case(crashes=(Crash(5),), resumes_at=3),
        "later epoch": Case(crashes=(Crash(23),), resumes_at=21),
        "epoch end": Case(interval="1ep", crashes=(Crash(20),), resumes_at=16),
        "last batch": Case(interval="8ba", crashes=(Crash(18),), resumes_at=16),
    }


MORE_POINTS = {
    "right after a save": Case(crashes=(Crash(18, "batch_checkpoint"),), resumes_at=18),
    "right after the save of an epoch's end": Case(
        interval="1ep", crashes=(Crash(16, "epoch_checkpoint"),), resumes_at=16
    ),
    "in the midst of a step": Case(crashes=(Crash(20, "after_train_batch"),), resumes_at=18),
    "in an evaluation": Case(interval="2ba", crashes=(Crash(21, "eval_start"),), resumes_at=20),
    "in the evaluation before a save": Case(crashes=(Crash(21, "eval_start"),), resumes_at=18),
    "two crashes": Case(crashes=(Crash(5), Crash(23)), resumes_at=21),
    "two crashes in one epoch": Case(interval="1ba", crashes=(Crash(19), Crash(21)), resumes_at=20),
    "three crashes": Case(interval="4ba", crashes=(Crash(6), Crash(9), Crash(23)), resumes_at=20),
    "SIGTERM": Case(interval=NEVER, crashes=(Crash(13, sigterm=True),), resumes_at=13),
    "SIGTERM, last batch": Case(interval=NEVER, crashes=(Crash(16, sigterm=True),), resumes_at=16),
    "SIGTERM in the midst of a step": Case(
        interval=NEVER, crashes=(Crash(13, "before_forward", sigterm=True),), resumes_at=14
    ),
    "SIGTERM in an evaluation": Case(
        interval=NEVER, crashes=(Crash(15, "eval_start", sigterm=True),), resumes_at=15
    ),
}

IN_PROCESS = (
    "in order",
    "shuffle",
    "shuffle, augmentation",
    "shuffle, own generator",
    "DistributedSampler",
    "WeightedRandomSampler",
    "sampler with a generator",
    "sampler with a generator, draws one by one",
    "sampler of the global generator, one by one",
    "IterableDataset",
    "IterableDataset with state",
    "StreamingDataset",
    "StreamingDataset, augmentation",
    "StatefulDataLoader",
)
IN_WORKERS = (
    "2 workers",
    "2 workers, own generator",
    "2 workers, augmentation",
    "2 persistent workers",
    "IterableDataset, 2 workers",
    "StreamingDataset, 2 workers",
    "StreamingDataset, 2 persistent workers",
    "StatefulDataLoader, 2 workers",
)
UNREAD = ("in order", *(name for name in IN_PROCESS if name.startswith(("shuffle", "Dist", "Weighted"))))
"""Data of which no batch is read twice."""


def on_data(name: str, case: Case) -> Case:
    """Worker processes take their time, so there is less to train; a stream has no epochs to count by."""
    end = "29ba" if name.startswith("IterableDataset") else "3ep" if name in IN_WORKERS else "4ep"
    return replace(case, setup=Setup(data=name, duration=end))


def later(setup: Setup, **more: Any) -> Case:
    return Case(setup=setup, **{"crashes": (Crash(23),), "resumes_at": 21, **more})


def by_predicate(state: State, event: Event) -> bool:
    return event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) in (4, 19)


CASES: dict[str, Case] = {
    **{f"{name} - {at}": on_data(name, case) for name in IN_PROCESS for at, case in points().items()},
    **{
        f"{name} - {at}": on_data(name, case)
        for name in IN_WORKERS
        for at, case in points().items()
        if at in ("later epoch", "last batch") or name == "2 workers, augmentation"
    },
    **MORE_POINTS,
    "StreamingDataset, 2 workers - epoch end": on_data("StreamingDataset, 2 workers", points()["epoch end"]),
    "StreamingDataset, 2 persistent workers - epoch end": on_data(
        "StreamingDataset, 2 persistent workers", points()["epoch end"]
    ),
    "2 workers - two crashes": on_data("2 workers", MORE_POINTS["two crashes"]),
    "sampler with a generator - two crashes": on_data("sampler with a generator", MORE_POINTS["two crashes"]),
    **{name: later(Setup(optimizer=name)) for name in OPTIMIZERS},
    **{f"scheduler: {name}": later(Setup(scheduler=name)) for name in SCHEDULERS},
    "scheduler: every epoch - epoch end": replace(
        points()["epoch end"], setup=Setup(scheduler="every epoch")
    ),
    **{name: later(Setup(algorithms=name)) for name in ALGORITHMS if name != "none"},
    "EMA - epoch end": replace(points()["epoch end"], setup=Setup(algorithms="EMA")),
    "microbatches": later(Setup(microbatch=4)),
    "uneven microbatches": later(Setup(microbatch=3)),
    "microbatches, EMA, 2 workers": later(
        Setup(microbatch=4, algorithms="EMA", data="2 workers", duration="3ep")
    ),
    "no evaluation": later(Setup(eval_interval=None)),
    "loader given to fit()": later(Setup(loader_in_fit=True)),
    "loader given to fit() - epoch end": replace(points()["epoch end"], setup=Setup(loader_in_fit=True)),
    "StreamingDataset given to fit()": later(Setup(data="StreamingDataset", loader_in_fit=True)),
    "part of an epoch": later(Setup(subset=6)),
    "part of an epoch - epoch end": Case(
        setup=Setup(subset=6), interval="1ep", crashes=(Crash(20),), resumes_at=18
    ),
    "part of an IterableDataset": later(Setup(data="IterableDataset", subset=6)),
    **{f"until {end}": later(Setup(duration=end)) for end in ("30ba", "244sp", "700tok")},
    "every 24sp": later(Setup(), interval="24sp"),
    "every 72tok until 700tok": later(Setup(duration="700tok"), interval="72tok"),
    "every 0.1dur": later(Setup(), interval="0.1dur", resumes_at=20),
    "every 0.25dur until 30ba": later(Setup(duration="30ba"), interval="0.25dur", resumes_at=16),
    "every 2 epochs": later(Setup(), interval=2, resumes_at=16),
    "every Time": later(Setup(), interval=Time(3, "ba")),
    "by a function": later(Setup(), interval=by_predicate, resumes_at=19),
    "second fit()": later(Setup(fits=("2ep", "4ep"))),
    "second fit() - first epoch of it": Case(
        setup=Setup(fits=("2ep", "4ep")), crashes=(Crash(19),), resumes_at=18
    ),
    "second fit() in mid epoch": Case(
        setup=Setup(fits=("11ba", "30ba")), crashes=(Crash(14),), resumes_at=12
    ),
    "second fit() in mid epoch - later epoch": later(Setup(fits=("11ba", "30ba"))),
    "second fit(), sampler with a generator": later(
        Setup(fits=("11ba", "30ba"), data="sampler with a generator")
    ),
    "second fit(), StreamingDataset": later(Setup(fits=("2ep", "4ep"), data="StreamingDataset")),
    "second fit(), StreamingDataset - epoch end": Case(
        setup=Setup(fits=("2ep", "4ep"), data="StreamingDataset"),
        interval="1ep",
        crashes=(Crash(28),),
        resumes_at=24,
    ),
    "third fit(), StepLR": later(Setup(fits=("1ep", "2ep", "4ep"), scheduler="every epoch")),
}

# What cannot be: see docs/resuming.md.
IMPOSSIBLE: dict[str, Case] = {
    "2 persistent workers, augmentation - later epoch": on_data(
        "2 persistent workers, augmentation", points()["later epoch"]
    ),
    "StreamingDataset, 2 workers, augmentation - later epoch": on_data(
        "StreamingDataset, 2 workers, augmentation", points()["later epoch"]
    ),
    "part of an IterableDataset with state": later(Setup(data="IterableDataset with state", subset=6)),
}
