"""Trainings of several gloo processes, of shards or of copies, with the options of one process, for the tests."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from support.options import grouped, leave
from support.sharded import batch, build, full_state, train, warm
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shrinkpoint
from shrinkpoint.engine.request import SaveRequest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import Stores

__all__ = ["Ranks", "begun", "ended_at_a_signal", "on_this_node", "scratched", "weighed"]

warm()


class Ranks:
    """One rank of a training, made afresh: it knows nothing but the URL."""

    def __init__(self, kind: str, rank: int, world: int, url: Any, **options: Any) -> None:
        own = {name: options.pop(name) for name in ("d", "optimizer") if name in options}
        self.model, self.optimizer = build("plain" if kind == "copies" else kind, world, rank, **own)
        self.trained = DistributedDataParallel(self.model) if kind == "copies" else self.model
        given = {"every": 1, "scheme": "lossless", "busy": "wait", "threads": 1} | options
        self.checkpointer = shrinkpoint.Checkpointer(url, self.trained, self.optimizer, **grouped(**given))
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            self.began = self.reached = self.checkpointer.resume()
        self.shown = [str(one.message) for one in shown]

    def train(self, step: int) -> None:
        if self.trained is self.model:
            train(self.model, self.optimizer, step)
        else:
            self.optimizer.zero_grad()
            tokens, labels = batch(step)
            functional.cross_entropy(self.trained(tokens).flatten(0, 1), labels.flatten()).backward()
            self.optimizer.step()

    def run(self, end: int) -> "Ranks":
        for step in range(self.reached, end):
            self.train(step)
            self.checkpointer.step(step + 1)
            self.checkpointer.flush()
        self.reached = end
        return self

    def state(self) -> dict[str, torch.Tensor]:
        return full_state(self.model, self.optimizer)

    def close(self) -> dict[str, torch.Tensor]:
        leave(self.checkpointer)
        return self.state()


def on_this_node(rank: int, world: int, folder: str, kind: str) -> Any:
    """Whether a restart goes on where nothing but the node's copies is left; and from which step without them."""
    url, near = f"{folder}/run", f"{folder}/near"
    there = Stores(url, near=near, near_keep=2)
    before = Ranks(kind, rank, world, there, key_every=2).run(5).close()
    torch.distributed.barrier()
    copies = [manifest.step for manifest in RunStore(near).manifests()]
    files = {path.name for path in Path(near, "data").iterdir()}
    needed = {ref.key[5:] for manifest in RunStore(near).manifests() for ref in RunStore(near).refs(manifest)}
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(f"{url}/data")
    torch.distributed.barrier()
    again = Ranks(kind, rank, world, there, key_every=2)
    after = again.close()
    same = all(torch.equal(before[name], after[name]) for name in before)
    return copies, files == needed, again.began, same


def weighed(rank: int, world: int, url: str, kind: str, keep: int) -> Any:
    """From which step it goes on, whether with the same weights and moments, and what is said."""
    before = Ranks(kind, rank, world, url, keep_optimizer=keep, key_every=1).run(4).close()
    again = Ranks(kind, rank, world, url, keep_optimizer=keep, key_every=1)
    moments = len(again.optimizer.state_dict()["state"])
    weights = {name for name, _ in again.model.named_parameters()}
    after = again.state()
    same = all(torch.equal(before[f"model.{name}"], after[f"model.{name}"]) for name in weights)
    again.run(5).close()
    return again.began, same, moments, again.shown


def scratched(rank: int, world: int, folder: str, kind: str, scheme: str) -> Any:
    """The reports of a training, and whether it is the same with what it does not need on a disk; where both are continued."""
    found = []
    for name, more in (("memory", {}), ("disk", {"scratch_folder": folder})):
        options = {"scheme": scheme, "d": 64, **more}
        Ranks(kind, rank, world, f"{folder}/{name}", **options).run(3).close()
        again = Ranks(kind, rank, world, f"{folder}/{name}", **options).run(5)
        state = again.close()
        found.append((state, [(report.step, report.kind) for report in again.checkpointer.reports()]))
    (one, reports), (other, others) = found
    return all(torch.equal(one[name], other[name]) for name in one), reports, others


def ended_at_a_signal(rank: int, world: int, url: str, kind: str) -> Any:
    """A save as at a signal, for which there is no time; and what continues it."""
    first = Ranks(kind, rank, world, url, deadline_s=0.0).run(2)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        first.train(2)
        first.checkpointer.save(3, exact=True, wait=True)
    before = first.state()
    reports = [(report.step, report.kind) for report in first.checkpointer.reports()]
    first.checkpointer.saver.close()
    again = Ranks(kind, rank, world, url)
    after = again.close()
    weights = {name for name, _ in again.model.named_parameters()}
    same = all(torch.equal(before[f"model.{name}"], after[f"model.{name}"]) for name in weights)
    return reports, [str(one.message) for one in shown], again.began, same


def begun(rank: int, world: int, url: str, kind: str, optimizer: str = "adamw") -> Any:
    """How far this rank's background was told that weights have moved, at the first save and at the second."""
    ranks = Ranks(kind, rank, world, url, scheme="auto", every=None, d=64, optimizer=optimizer)
    told: list[Any] = []
    movement = ranks.checkpointer.saver._background.movement
    since = movement.since

    def noted(state: Any, step: int) -> Any:
        found = since(state, step)
        told.append(
            None if found is None else (found.steps, {n: rows.mean() for n, rows in found.rows.items()})
        )
        return found

    movement.since = noted
    start = ranks.state()
    for step in range(2):
        ranks.train(step)
        if step == 1:
            ranks.checkpointer.save(2, wait=True)
    moved = {
        name: float((value - start[name]).float().norm())
        for name, value in ranks.state().items()
        if name in start
    }
    objects = ranks.checkpointer._objects
    gradients = {name: torch.ones(p.shape) for name, p in ranks.model.named_parameters()}
    ranks.checkpointer.saver.accept(
        SaveRequest(
            state=objects.state(), step=3, describe=objects.describe({}), gradients=gradients, wait=True
        )
    )
    ranks.checkpointer.saver.close()
    return told, moved
