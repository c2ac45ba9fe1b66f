"""What ranks do in the tests of Composer's trainings with shards: runs of `Tiny` that are ended and continued."""

import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Callback
from composer.utils import dist
from support.composer_models import Outcome, Setup, Trace, assert_same, final_state, fit
from support.options import grouped
from support.reports import saver_of
from support.sharded import die, warm
from torch.distributed.tensor import DTensor

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import StoreError
from shrinkpoint.sharded import restoring
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import Stores

warm()

SHARDED = {"parallelism_config": {"fsdp": {"state_dict_type": "sharded"}}}
FULL = {"parallelism_config": {"fsdp": {"state_dict_type": "full"}}}
RANDOM = Setup(data="DistributedSampler, augmentation", duration="4ep", batch_norm=False)
PLAIN = Setup(data="DistributedSampler", duration="9ep", batch_norm=False, random=False, eval_interval=None)


def prepare(rank: int, world: int) -> None:
    """The environment that Composer's launcher makes."""
    os.environ.update(LOCAL_WORLD_SIZE=str(world), NODE_RANK="0", FSDP_VERSION="2", MASTER_ADDR="127.0.0.1")


class At(Callback):  # type: ignore[misc]
    """Does something on this rank right after a batch, with all batches so far; placed before the callback that saves."""

    def __init__(self, batch: int, action: Callable[[list[Any]], Any]) -> None:
        self.batch, self.action = batch, action

    def batch_end(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.batch:
            [trace] = [callback for callback in state.callbacks if isinstance(callback, Trace)]
            self.action([row[2:5] for row in trace.rows])


def saving(url: str | list[str] | Stores, every: int = 3, **options: Any) -> CompressedCheckpoint:
    given = {"scheme": "lossless", "busy": "wait", "threads": 1, "save_top_k": -1} | options
    return CompressedCheckpoint(url, **grouped(save_interval=f"{every}ba", **given))


def rows(outcome: Outcome) -> list[tuple[Any, ...]]:
    """The batches with their losses and learning rates."""
    return [row[2:5] for row in outcome.trace]


def native(rank: int, world: int, folder: str, steps: int) -> Any:
    """Train to a batch, from Composer's own sharded checkpoint, and leave one."""
    prepare(rank, world)
    found = sorted(Path(folder).glob("*/*/.metadata"), key=lambda path: path.stat().st_mtime)
    outcome = fit(
        setup=replace(PLAIN, duration=f"{steps}ba"),
        save_folder=f"{folder}/{steps}",
        save_interval=f"{steps}ba",
        save_latest_filename="latest",
        load_path=str(found[-1].parent) if found else None,
        **SHARDED,
    )
    return rows(outcome), outcome.final


def hop(rank: int, world: int, folder: str, steps: int, last: bool) -> Any:
    """The same with ours, from what is stored; but for the last one it is killed a batch later, when the save is committed."""
    prepare(rank, world)
    url = f"{folder}/run"

    def end(trained: list[Any]) -> None:
        while max((manifest.step for manifest in RunStore(url).manifests()), default=0) < steps:
            time.sleep(0.01)
        torch.save(trained[:-1], f"{folder}/trace-{steps}-{rank}.pt")
        die()

    kill = [] if last else [At(steps + 1, end)]
    setup = replace(PLAIN, duration=f"{steps}ba") if last else PLAIN
    outcome = fit(*kill, saving(url, key_every=99), setup=setup, **SHARDED)
    return rows(outcome), outcome.final


def seed(rank: int, number: int) -> None:
    """Each rank draws numbers of its own, in data and model."""
    torch.manual_seed(number + rank)
    random.seed(number + rank)
    np.random.seed(number + rank)


class Seeded(Callback):  # type: ignore[misc]
    """Seeds the generators once more when training begins: Composer's own seeds are known to a resumed process."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number

    def fit_start(self, state: Any, logger: Any) -> None:
        seed(self.rank, self.number)


def setup_of(algorithms: str) -> Setup:
    if algorithms == "none":
        return RANDOM
    # Composer itself cannot put averages into the unsharded weights that an evaluation leaves behind
    return replace(RANDOM, algorithms=algorithms, optimizer="DecoupledAdamW", eval_interval=None)


def whole(rank: int, world: int, algorithms: str = "none") -> Outcome:
    """A training that nothing interrupts."""
    prepare(rank, world)
    return fit(Seeded(rank, 1), setup=setup_of(algorithms), **SHARDED)


def killed(rank: int, world: int, url: str | list[str], batch: int, algorithms: str = "none") -> None:
    """Every rank, or what is left of it, ends after a batch as by kill -9, some time after a save."""
    prepare(rank, world)

    def end(trained: list[Any]) -> None:
        first = url if isinstance(url, str) else url[0]
        while not list(Path(first, "commits").glob("[0-9]*.json")):
            time.sleep(0.01)
        die()

    fit(Seeded(rank, 1), At(batch, end), saving(url), setup=setup_of(algorithms), **SHARDED)


def rest(rank: int, world: int, url: str | list[str], algorithms: str = "none", control: bool = False) -> Any:
    """The training goes on by itself; as a control, with the first rank's position on every rank.

    Returns:
        What it was, and the address of the newest checkpoint.
    """
    prepare(rank, world)
    if control:
        restoring.merged_tree = lambda tree, own: tree  # type: ignore[assignment]
    callback = saving(url)
    outcome = fit(callback, setup=setup_of(algorithms), seed=999, **SHARDED)
    return outcome, callback.last_model_path


def adopting(rank: int, world: int, url: str, batch: int | None = None, adopt: bool = True) -> Outcome:
    """A training that adopts its checkpoints, killed after a batch when some are committed; made anew without one."""
    prepare(rank, world)

    def end(trained: list[Any]) -> None:
        first = url if isinstance(url, str) else url[0]
        while not list(Path(first, "commits").glob("[0-9]*.json")):
            time.sleep(0.01)
        die()

    adopts = {"adopt": 5} if adopt else {}
    callback = saving(url, scheme="auto", guards=False, **adopts)
    kill = [At(batch, end)] if batch else []
    seeded = [] if batch is None else [Seeded(rank, 1)]
    own = {"seed": 999} if batch is None else {}
    return fit(*seeded, *kill, callback, setup=setup_of("none"), **own, **SHARDED)


def measured(rank: int, world: int, url: str, scheme: str) -> Any:
    """A training whose checkpoints are measured, also after steps from them, or exact: what it was, and what reports say."""
    prepare(rank, world)
    seen: dict[str, Any] = {}
    callback = saving(url, scheme=scheme, search_overhead=math.inf, probe_steps=3)
    outcome = fit(Seeded(rank, 1), callback, Tried(seen, callback), setup=setup_of("none"), **SHARDED)
    return outcome, seen["reports"]


def signalled(
    rank: int, world: int, url: str, ranks: list[int], number: int, batch: int, algorithms: str = "none"
) -> Any:
    """Some ranks are asked to end at a batch; how it ended, and the newest checkpoint."""
    prepare(rank, world)
    asked = [At(batch, lambda trained: signal.raise_signal(number))] if rank in ranks else []
    callback = saving(url, every=10**6)
    how = told(lambda: fit(Seeded(rank, 1), *asked, callback, setup=setup_of(algorithms), **SHARDED))
    return how, callback.last_model_path


def unsaved(rank: int, world: int, url: str) -> Any:
    """The last save fails on one rank; how it ended, and what was said."""
    prepare(rank, world)

    def end(trained: list[Any]) -> None:
        while not RunStore(url).manifests():
            time.sleep(0.01)
        if rank == 1:
            LocalObjects.put = refuse  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGTERM)

    def refuse(self: LocalObjects, *arguments: Any) -> Any:
        raise StoreError("disk full")

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        how = told(lambda: fit(At(4, end), saving(url), setup=PLAIN, **SHARDED))
    return how, [str(warning.message) for warning in shown]


def told(action: Callable[[], Any]) -> str:
    """What it raised, by its class and message, or by the status with which the process was asked to exit."""
    try:
        outcome = action()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - compared
        return f"{type(error).__name__}: {error}"
    return "nothing" if outcome.status is None else f"exit {outcome.status}"


def uses(rank: int, world: int, url: str) -> dict[str, Any]:
    """One run used in several ways by one process after another, and what is refused."""
    prepare(rank, world)
    seen: dict[str, Any] = {}
    callback = saving(url)
    fit(callback, Keep(seen, callback), setup=replace(PLAIN, fits=("4ba", "7ba")), **SHARDED)

    anew = saving(url, resume="never")
    fit(anew, Keep(seen, anew, "never"), setup=replace(PLAIN, duration="2ba"), **SHARDED)

    logs = saving(f"{url}-step_log", step_log="exact", log_url="/dev/shm/none")
    seen["step_log"] = told(lambda: fit(logs, setup=PLAIN, **SHARDED))
    seen["model"] = told(lambda: fit(saving(url), setup=replace(PLAIN, width=20), **SHARDED))
    seen["optimizer"] = told(lambda: fit(saving(url), setup=replace(PLAIN, optimizer="SGD"), **SHARDED))
    own = replace(PLAIN, duration="9ba")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        fit(saving(url), save_folder=f"{url}-own", setup=own, **SHARDED)
    seen["beside"] = [str(warning.message) for warning in shown if "save_folder" in str(warning.message)]
    return seen


class Keep(Callback):  # type: ignore[misc]
    """Notes a callback's reports before it lets go of them."""

    def __init__(self, seen: dict[str, Any], callback: CompressedCheckpoint, name: str = "reports") -> None:
        self.seen, self.callback, self.name = seen, callback, name

    def fit_end(self, state: Any, logger: Any) -> None:
        reports = saver_of(self.callback).reports()
        self.seen[self.name] = [(report.step, report.kind, report.measured) for report in reports]


class Tried(Keep):
    """The same, with the trial steps."""

    def fit_end(self, state: Any, logger: Any) -> None:
        reports = saver_of(self.callback).reports()
        self.seen[self.name] = [(report.measured, sorted(report.resumed)) for report in reports]


class Compare(Callback):  # type: ignore[misc]
    """Compares what was restored with what a run before left."""

    def __init__(self, path: str) -> None:
        self.path, self.differ = path, "nothing was compared"

    def fit_start(self, state: Any, logger: Any) -> None:
        shards = [isinstance(parameter, DTensor) for parameter in state.model.parameters()]
        assert all(shards) if state.fsdp_enabled else not any(shards)
        found = final_state(state)  # on every rank
        self.differ = ""
        if dist.get_global_rank() == 0 and Path(self.path).exists():
            wanted = torch.load(self.path, weights_only=False)
            try:
                for name in KEPT:
                    assert_same(wanted[name], found[name], name)
            except AssertionError as error:
                self.differ = str(error)


KEPT = ("model", "optimizers", "schedulers")
PARALLEL: dict[str, dict[str, Any]] = {"sharded": SHARDED, "full": FULL, "none": {}}


def journey(rank: int, world: int, url: str, true: str, kind: str, steps: int, scheme: str) -> Any:
    """Train to a batch with another kind of parallelism; what differs from the true state, the saves, and what was said."""
    prepare(rank, world)
    compare, seen = Compare(true), {}
    callback = saving(url, every=10**6, key_every=99, scheme=scheme)
    setup = replace(PLAIN, duration=f"{steps}ba", optimizer="DecoupledAdamW")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        outcome = fit(compare, callback, Keep(seen, callback), setup=setup, **PARALLEL[kind])
    if rank == 0:
        torch.save(outcome.final, true)
    said = [str(warning.message) for warning in shown]
    return compare.differ, seen["reports"], said
