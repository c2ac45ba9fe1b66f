"""What ranks do in the tests of sharded trainings."""

import hashlib
import itertools
import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from support.options import grouped
from support.sharded import build, die, full_state, train, warm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import shrinkpoint
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.ranks import Ranks
from shrinkpoint.errors import SaveFailedError, StoreError
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import Distributed
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.sharded.gathering import Gathering
from shrinkpoint.sharded.placement import ShardedPlacement
from shrinkpoint.state.training import Role, Tag
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.manifest import BlobRef
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import Stores
from shrinkpoint.store.writer import RunWriter

warm()


def hop(
    rank: int,
    world: int,
    url: str,
    true: str,
    kind: str,
    optimizer: str,
    options: dict[str, Any],
    limit: int | None = None,
) -> Any:
    """Continue the run, compare with the true state, make two saves."""
    model, opt = build(kind, world, rank, optimizer, seed=world, **options)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        opt,
        every=1,
        scheme="lossless",
        advanced=shrinkpoint.Advanced(busy="wait", threads=1, key_every=99),
    )
    if limit is not None and kind != "plain":
        checkpointer.saver._placement.limit = (
            limit  # blocks of so many elements, as large tensors are stored in
        )
    start = checkpointer.resume()
    if start:
        wanted, found = torch.load(true, weights_only=True), full_state(model, opt)
        differ = [name for name in wanted if not torch.equal(wanted[name], found[name])]
        assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
        assert not differ, differ
    for step in range(start, start + 2):
        train(model, opt, step)
        checkpointer.step(step + 1)
    checkpointer.close()
    state = full_state(model, opt)
    if rank == 0:
        torch.save(state, true)
    return [(report.step, report.kind) for report in checkpointer.reports()]


class _Copied:
    """A GPU's copy that has arrived."""

    def wait(self) -> float:
        return 0.25


def hop_reusing(*given: Any) -> Any:
    """As `hop`, with memory for whole tensors that is kept from one save to the next, as it is where a GPU copies to it."""
    gathered, memory = Gathering.gathered, Gathering._memory

    def kept(self: Gathering, *, pinned: bool) -> dict[str, torch.Tensor]:
        self._pinned = self._pinned or memory(self, pinned=False)
        return dict(self._pinned)

    def copied(self: Gathering, *args: Any) -> Any:
        state, _ = gathered(self, *args)
        return state, _Copied()

    Gathering._memory, Gathering.gathered = kept, copied
    return hop(*given)


def placements(rank: int, world: int) -> list[str]:
    """Placements whose box is not that of the slice that this rank has."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from shrinkpoint.sharded.boxes import Box, pieces_of

    wrong = []
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    for shape in ((8, 6), (7, 3), (5, 1), (3, 4), (1, 2), (9,), (2,), (4, 3, 2)):
        whole = torch.arange(math.prod(shape)).reshape(shape)
        cases = [(flat, [Shard(0)]), (flat, [Replicate()]), (square, [Replicate(), Shard(0)])]
        cases += [(flat, [Shard(1)]), (square, [Shard(0), Shard(1)])] if len(shape) > 1 else []
        for mesh, placed in cases:
            pieces = pieces_of("w", distribute_tensor(whole, mesh, placed))
            full = Box((0,) * len(shape), shape)
            if not all(torch.equal(full.cut(whole, box), local) for box, local in pieces.items()):
                wrong.append(f"{shape} {placed}")
    return wrong


def told(action: Callable[[], Any]) -> str:
    """What it raised, by its class and message."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - compared
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Filled:
    """A sharded model whose every element is the number of the step, and so are its moments."""

    def __init__(self, rank: int, world: int, **options: Any) -> None:
        self.model, self.optimizer = build("fsdp", world, rank, **options)
        train(self.model, self.optimizer, 0)

    def fill(self, step: int) -> None:
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers(), *moments):
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(step)

    def found(self) -> set[float]:
        """All numbers in it, by a collective."""
        return {
            number
            for name, tensor in full_state(self.model, self.optimizer).items()
            for number in tensor.flatten().tolist()
        }

    def checkpointer(self, url: str | Stores, **options: Any) -> Any:
        given = {"scheme": "lossless", "busy": "wait", "threads": 1} | options
        return shrinkpoint.Checkpointer(url, self.model, self.optimizer, **grouped(**{"every": 1, **given}))


POINTS: dict[str, tuple[type, str, bool]] = {
    "before-put": (RunStore, "put_part", False),
    "after-put": (RunStore, "put_part", True),
    "after-post": (Ranks, "post_part", True),
    "before-head": (RunWriter, "commit", False),
    "before-manifest": (RunWriter, "_publish_exclusively", False),
    "after-manifest": (RunWriter, "_publish_exclusively", True),
    "after-commit": (RunWriter, "commit", True),
}
"""Where a rank may be killed: a method, and whether after or before it."""


def _at(point: str, call: int, action: Callable[[], None]) -> None:
    """Do something at the given call of a method, counted from 1."""
    kind, name, after = POINTS[point]
    original, calls = getattr(kind, name), itertools.count(1)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        now = next(calls) == call
        if now and not after:
            action()
        result = original(self, *arguments, **options)
        if now and after:
            action()
        return result

    setattr(kind, name, method)


def _put_later(store: RunStore, key: str, container: bytes) -> BlobRef:
    threading.Timer(1.0, store.objects.put, (key, container)).start()
    return BlobRef(key=key, size=len(container), sha256=hashlib.sha256(container).hexdigest())


def saves(
    rank: int,
    world: int,
    url: str,
    log: str,
    kill: tuple[int, str, int] | None,
    steps: int,
    storage_options: dict[str, Any] | None = None,
    lazily: bool = False,
) -> Any:
    """Continue a run of `Filled` states, and note in a file each save that was acknowledged.

    Args:
        kill: which rank is killed where, at which of its saves.
        storage_options: of the URL.
        lazily: store parts a second after they are reported as stored: what a campaign of kills must notice.
    """
    if lazily:
        RunStore.put_part = _put_later  # type: ignore[method-assign]
    filled = Filled(rank, world)
    checkpointer = filled.checkpointer(
        url,
        commit_timeout_s=5 if storage_options is None else 30,  # through faults a request takes its time
        key_every=3,
        storage_options=storage_options,
    )
    start = checkpointer.resume()
    if start:
        assert filled.found() == {float(start)}
    if isinstance(kill, tuple) and kill[0] == rank:
        _at(kill[1], kill[2], die)
    for step in range(start + 1, start + steps + 1):
        filled.fill(step)
        with suppress(SaveFailedError):  # of the third fault in a row: a training that goes on anyway
            checkpointer.step(step)
            checkpointer.flush()
        reports = checkpointer.reports()
        if rank == 0 and reports and reports[-1].step == step:
            with open(log, "a") as file:
                file.write(f"{step}\n")
                file.flush()
                os.fsync(file.fileno())
    checkpointer.close()
    return [report.step for report in checkpointer.reports()]


def failures(rank: int, world: int, url: str) -> Any:
    """One rank fails at the second save, another is late at the fourth."""
    shown: list[str] = []
    warnings.showwarning = lambda message, *rest, **more: shown.append(str(message))
    warnings.simplefilter("always")
    filled = Filled(rank, world)
    checkpointer = filled.checkpointer(url, commit_timeout_s=1)
    if rank == world - 1:
        _at("before-put", 2, lambda: fails(StoreError("disk full")))
    if rank == 1:
        _at("before-put", 4, lambda: time.sleep(4))
    for step in range(1, 8):
        filled.fill(step)
        checkpointer.step(step)
        if step == 4:
            checkpointer.flush()  # waits for the late rank on that rank alone; then all know
    checkpointer.close()
    return [(report.step, report.kind) for report in checkpointer.reports()], shown


def fails(error: Exception) -> None:
    raise error


def in_three_stores(rank: int, world: int, urls: list[str]) -> list[tuple[int, int | None]]:
    """Three saves, and what they say of the stores; from the second one on, the last store fails for rank 1 alone."""
    state = Filled(rank, world)
    checkpointer = state.checkpointer(Stores(urls, parity=1))
    put = LocalObjects._put

    def fails_below(self: LocalObjects, key: str, data: bytes, *, exclusive: bool) -> bool:
        if self.display == urls[2]:
            raise StoreError("no permission")
        return put(self, key, data, exclusive=exclusive)

    for step in (1, 2, 3):
        state.fill(step)
        checkpointer.save(step, wait=True)
        if rank == 1:
            LocalObjects._put = fails_below  # type: ignore[method-assign]
    checkpointer.close()
    return [(report.step, report.redundancy) for report in checkpointer.reports()]


def refusals(rank: int, world: int, url: str) -> dict[str, str]:
    """What is refused, on this rank."""
    filled = Filled(rank, world)
    seen: dict[str, str] = {}
    seen["url"] = told(lambda: filled.checkpointer(url + str(rank)))
    seen["scheme"] = told(lambda: filled.checkpointer(url, key_every=3 + rank))
    seen["step_log"] = told(lambda: filled.checkpointer(url, step_log="small"))
    write = RunStore.try_to_write
    RunStore.try_to_write = lambda self: fails(StoreError("read-only"))  # type: ignore[method-assign]
    seen["rights"] = told(lambda: filled.checkpointer(url))
    RunStore.try_to_write = write  # type: ignore[method-assign]

    checkpointer = filled.checkpointer(url)
    filled.fill(1)
    checkpointer.save(1, wait=True)
    seen["step"] = told(lambda: checkpointer.save(2 + rank))
    odd = Odd(rank)
    other = filled.checkpointer(url, odd=odd)  # fences the first one off
    other.resume()
    odd.value = (lambda: None) if rank == 1 else 0
    seen["object"] = told(lambda: other.save(3))
    odd.value = 0
    other.save(4, wait=True)
    checkpointer.save(5)
    seen["fenced"] = told(checkpointer.flush)
    checkpointer.saver.close()

    model, optimizer = build("fsdp", world, rank, rows=5)
    stranger = shrinkpoint.Checkpointer(url, model, optimizer, scheme="lossless")
    before = full_state(model, optimizer)
    seen["model"] = told(stranger.resume)
    after = full_state(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    model, optimizer = build("fsdp", world, rank)
    model.register_buffer("further", torch.ones(2))
    seen["a further buffer"] = told(shrinkpoint.Checkpointer(url, model, optimizer, scheme="lossless").resume)
    seen["step that is not there"] = told(lambda: stranger.resume(step=77))
    other.close()
    return seen


class Odd:
    """An object whose state one rank cannot store."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def newest_of_damaged(rank: int, world: int, url: str) -> Any:
    """The step that all ranks resume from."""
    filled = Filled(rank, world)
    step = filled.checkpointer(url).resume()
    return step, filled.found()


def own_data(rank: int, world: int, url: str) -> Any:
    """Random numbers and positions of each rank, before a save and after a restore."""
    filled, odd = Filled(rank, world), Odd(0)
    checkpointer = filled.checkpointer(url, odd=odd)
    start = checkpointer.resume()
    first = (odd.value, torch.rand(1).item(), random.random(), float(np.random.rand()))
    if not start:
        torch.manual_seed(rank)
        odd.value = 10 + rank
        checkpointer.save(1, wait=True)
        first = (odd.value, torch.rand(1).item(), random.random(), float(np.random.rand()))
    checkpointer.close()
    return first


def hop_lossy(rank: int, world: int, url: str, kind: str, optimizer: str = "adamw") -> Any:
    """Continue a run of ``auto``; what is restored is what a single process decodes."""
    model, opt = build(kind, world, rank, optimizer, seed=world, d=64)
    checkpointer = shrinkpoint.Checkpointer(
        url, model, opt, every=2, advanced=shrinkpoint.Advanced(busy="wait", threads=1)
    )
    start = checkpointer.resume()
    if start:
        wanted = shrinkpoint.load(url)
        found = full_state(model, opt)
        assert all(torch.equal(tensor, found[f"model.{name}"]) for name, tensor in wanted["model"].items())
        names = [name for name, _ in model.named_parameters()]
        for index, state in wanted["optimizers"][0]["state"].items():
            assert all(torch.equal(value, found[f"{names[index]}.{key}"]) for key, value in state.items())
    for step in range(start, start + 4):
        train(model, opt, step)
        checkpointer.step(step + 1)
    checkpointer.close()
    return [
        (report.step, report.kind, report.scheme, report.measured, report.sections, report.ratio)
        for report in checkpointer.reports()
    ]


def sums_of_ranks(rank: int, world: int, url: str) -> Any:
    """One save by ``auto`` of a state that is the same on any number of ranks, bit by bit, which training would not give."""
    filled = Filled(rank, world, d=64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in filled.model.parameters():
            for tensor, size in (
                (parameter, 0.1),
                (filled.optimizer.state[parameter]["exp_avg"], 1e-3),
                (filled.optimizer.state[parameter]["exp_avg_sq"], 1e-6),
            ):
                whole = size * torch.rand(tensor.shape, generator=generator)
                if hasattr(tensor, "to_local"):
                    whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
                    tensor = tensor.to_local()
                tensor.copy_(whole)
    checkpointer = filled.checkpointer(url, scheme="auto")
    checkpointer.save(1, wait=True)
    checkpointer.close()
    return full_state(filled.model, filled.optimizer)


def first_checkpoint(rank: int, world: int, url: str, after_another: bool) -> float:
    """The error of a training's first checkpoint by ``auto``, relative to its weights; after another training, if asked for."""

    def describe(path: tuple[str, ...], tensor: torch.Tensor) -> Tag:
        return Tag(role=Role.WEIGHT, parameter="/".join(path))

    config = SaverConfig(scheme="auto", busy="wait")
    placement = partial(ShardedPlacement, targets=lambda specs: {}, own=dict)
    saver = shrinkpoint.Saver(url, config, placement=placement)
    saver.check()
    generator = torch.Generator().manual_seed(0)
    weight, other = (torch.randn(256, 256, generator=generator) / 16 for _ in range(2))
    if after_another:
        for step in (100, 200):
            other = other + 1e-4 * torch.randn(256, 256, generator=generator)
            saver.save({"weight": other.clone()}, step=step, describe=describe, wait=True)
        saver.forget()
    saver.save({"weight": weight.clone()}, step=50, describe=describe, wait=True)
    saver.close()
    [restored] = shrinkpoint.Saver(url).restore(50, adopt=False).state.tensors.values()
    return float((restored - weight).norm() / weight.norm())


def asked_to_end(rank: int, world: int, url: str, asked: dict[int, int], resumes: bool = False) -> Any:
    """Train until some ranks are asked to end, each at its step; how and where it ended, and the state there."""
    model, optimizer = build("fsdp", world, rank)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        every=10**6,
        scheme="lossless",
        advanced=shrinkpoint.Advanced(threads=1, busy="wait"),
    )
    how, step = "nothing", checkpointer.resume()
    if not asked:
        return how, step, full_state(model, optimizer)
    try:
        for step in range(1, 30):
            train(model, optimizer, step)
            if asked.get(rank) == step:
                signal.raise_signal(signal.SIGTERM)
            checkpointer.step(step)
    except BaseException as error:  # noqa: BLE001 - compared
        how = f"{type(error).__name__}: {error}"
    return how, step, full_state(model, optimizer)


def unanswered(rank: int, world: int) -> Any:
    """What the first rank learns where the second does not answer."""
    if rank == 1:
        Ending._watch = lambda self, mailbox: None  # type: ignore[method-assign]
    mailbox = Mailbox(Distributed())
    ending = Ending(mailbox, patience_s=1.0)
    assert ending.is_at(1, signal=None) is None
    return told(lambda: ending.is_at(2, signal=15)) if rank == 0 else ending.is_at(2, signal=None)


def unsaved_end(rank: int, world: int, url: str) -> Any:
    """What is said where the last save fails on one rank."""
    model, optimizer = build("fsdp", world, rank)
    options = {"scheme": "lossless", "threads": 1, "busy": "wait"}
    checkpointer = shrinkpoint.Checkpointer(url, model, optimizer, **grouped(every=2, **options))
    checkpointer.resume()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        how = "nothing"
        try:
            for step in range(1, 30):
                train(model, optimizer, step)
                if step == 3:
                    checkpointer.flush()
                    if rank == 0:
                        signal.raise_signal(signal.SIGTERM)
                    else:
                        LocalObjects.put = lambda *a, **k: fails(StoreError("disk full"))  # type: ignore[method-assign]
                checkpointer.step(step)
        except SystemExit as error:
            how = str(error)
    return how, [str(warning.message) for warning in shown]
