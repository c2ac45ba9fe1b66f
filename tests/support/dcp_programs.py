"""What ranks do in the tests of the storage for `torch.distributed.checkpoint`."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from support.sharded import build, die, full_state, train, warm
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shrinkpoint
from shrinkpoint.dcp import StorageReader, StorageWriter
from shrinkpoint.errors import StoreError
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl
from shrinkpoint.store.writer import RunWriter

warm()

STAGES = Version(torch.__version__) >= Version("2.7")
"""Before, `async_save` itself hands over a host's tensors without copying them (pytorch/pytorch#144657)."""
NOTE = {
    "list": [1, 2.5, "x"],
    "none": None,
    "pair": (0.9, 0.999),
    "array": (3, np.arange(4.0)),
    "$": {"deep": [{"a": 1}]},
}


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, note: Any = NOTE
) -> dict[str, Any]:
    """As the documentation of torch has it."""
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optim": moments,
        "step": step,
        "note": note,
        "nothing": torch.zeros(0, 3),
        "counts": [torch.tensor(step), torch.arange(3) + step],
    }


def empty_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The same, to be filled."""
    note = {"list": [0, 0, ""], "none": 0, "pair": None, "array": None, "$": {"deep": [{"a": 0}]}}
    return state_of(model, optimizer, 0, note)


def told_of(error: Exception | CheckpointException) -> str:
    """What a failed save or load says of the ranks' errors."""
    failures = getattr(error, "failures", {})
    inner = "; ".join(f"{rank}: {type(e).__name__}: {e}" for rank, (e, _) in failures.items())
    return f"{type(error).__name__}: {inner or error}"


def attempt(action: Any) -> str:
    """What it raised, or nothing."""
    try:
        action()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - compared
        return told_of(error)
    return "nothing"


def saves(
    rank: int,
    world: int,
    url: RunUrl,
    true: str,
    kind: str = "fsdp",
    mode: str = "sync",
    start: int = 1,
    **options: Any,
) -> list[tuple[int, str]]:
    """Three saves; those of before are loaded first."""
    model, optimizer = build(kind, world, rank)
    if start > 1:
        fill(url, true, model, optimizer)
    writer = StorageWriter(url, threads=1, **options)
    groups = {"process_group": dist.new_group(backend="gloo")} if mode == "thread" else {}
    for step in range(start, start + 3):
        train(model, optimizer, step)
        state, name = state_of(model, optimizer, step), f"somewhere/step-{step}"
        if mode in ("sync", "cached", "anew"):
            planner = DefaultSavePlanner(enable_plan_caching=True) if mode == "cached" else None
            if mode == "anew":
                writer = StorageWriter(url, threads=1, **options)
            dcp.save(state, storage_writer=writer, checkpoint_id=name, planner=planner)
            continue
        if mode == "process":
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

            groups = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        done = dcp.async_save(state, storage_writer=writer, checkpoint_id=name, **groups)
        for tensor in (*model.parameters(), *model.buffers()) if step == start + 2 and STAGES else ():
            kept = tensor.detach().clone()
            with torch.no_grad():
                tensor.zero_()  # what training does meanwhile is not stored
            getattr(done, "upload_completion", done).result()
            with torch.no_grad():
                tensor.copy_(kept)
        getattr(done, "upload_completion", done).result()
    last = full_state(model, optimizer)
    if rank == 0:
        torch.save(last, true)
    return [(report.step, report.kind) for report in writer.reports]


def resumed(rank: int, world: int, url: RunUrl, true: str) -> list[tuple[int, str]]:
    """Three more saves, each by a writer of its own; two checkpoints are kept."""
    return saves(rank, world, url, true, mode="anew", start=4, keep_last=2)


def fill(url: RunUrl, true: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load into another model, and compare with the true one."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(random.random())
    train(model, optimizer, 0)
    state = empty_state(model, optimizer)
    dcp.load(state, storage_reader=StorageReader(url))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    wanted, found = torch.load(true, weights_only=True), full_state(model, optimizer)
    assert wanted.keys() == found.keys()
    differ = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    assert not differ, differ
    step, array = state["step"], state["note"].pop("array")
    assert array[0] == 3
    assert array[1].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert state["note"] == {name: value for name, value in NOTE.items() if name != "array"}
    assert state["counts"][0] == step
    assert torch.equal(state["counts"][1], torch.arange(3) + step)
    return state


def loads(rank: int, world: int, url: RunUrl, true: str, kind: str = "fsdp") -> int:
    """The step that was loaded."""
    return int(fill(url, true, *build(kind, world, rank, seed=7))["step"])


def failing(rank: int, world: int, url: str, true: str) -> tuple[list[str], list[tuple[int, str]]]:
    """The second of four saves fails on rank 1, after which the first one is loaded."""
    model, optimizer = build("fsdp", world, rank)
    writer, put, told = StorageWriter(url, threads=1), RunStore.put_part, []

    def refuse(*arguments: Any) -> Any:
        raise StoreError("disk full")

    for step in range(1, 5):
        train(model, optimizer, step)
        RunStore.put_part = refuse if (rank, step) == (1, 2) else put  # type: ignore[method-assign]
        told.append(
            attempt(
                lambda step=step: dcp.save(
                    state_of(model, optimizer, step), storage_writer=writer, checkpoint_id=step
                )
            )
        )
        if step == 2:
            state = empty_state(model, optimizer)
            dcp.load(state, storage_reader=StorageReader(url))
            assert state["step"] == 1
    last = full_state(model, optimizer)
    if rank == 0:
        torch.save(last, true)
    return told, [(report.step, report.kind) for report in writer.reports]


def killed(rank: int, world: int, url: str, victim: int, point: str) -> None:
    """A rank dies in the third save: before or after its part is stored, or, as coordinator, around the manifest."""
    model, optimizer = build("fsdp", world, rank)
    writer = StorageWriter(url, threads=1)
    owner, name = (RunStore, "put_part") if point.endswith("put") else (RunWriter, "commit")
    done = getattr(owner, name)

    def die_there(*arguments: Any, **options: Any) -> Any:
        if point.startswith("before"):
            die()
        done(*arguments, **options)
        die()

    for step in range(1, 4):
        train(model, optimizer, step)
        if (rank, step) == (victim, 3):
            setattr(owner, name, die_there)
        dcp.save(state_of(model, optimizer, step), storage_writer=writer, checkpoint_id=step)


class Odd:
    """Nothing that a checkpoint may hold."""


def by_checkpointer(rank: int, world: int, url: str, other: str) -> str:
    """A `Checkpointer`'s run read by the pair; and the pair's by a `Checkpointer`."""
    model, optimizer = build("fsdp", world, rank)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        every=1,
        scheme="lossless",
        advanced=shrinkpoint.Advanced(threads=1, busy="wait"),
    )
    for step in range(2):
        train(model, optimizer, step)
        checkpointer.step(step + 1)
    checkpointer.close()
    true = full_state(model, optimizer)
    fresh, more = build("fsdp", world, rank, seed=3)
    state = {"model": fresh.state_dict(), "step": 0}
    dcp.load(state, storage_reader=StorageReader(url))
    assert state["step"] == 2
    fresh.load_state_dict(state["model"])
    found = full_state(fresh, more)
    assert all(torch.equal(tensor, true[name]) for name, tensor in found.items())
    dcp.save(state_of(model, optimizer, 3), storage_writer=StorageWriter(other, threads=1), checkpoint_id=3)
    reader = shrinkpoint.Checkpointer(
        other, model, optimizer, scheme="lossless", advanced=shrinkpoint.Advanced(threads=1)
    )
    return attempt(reader.resume)


def refusals(rank: int, world: int, url: str) -> dict[str, str]:
    """What is said of wrong input, on this rank."""
    model, optimizer = build("fsdp", world, rank)
    train(model, optimizer, 0)

    def save(state: Any = None, **more: Any) -> None:
        chosen = state_of(model, optimizer, 1) if state is None else state
        given = {"storage_writer": StorageWriter(url, threads=1), "checkpoint_id": 1} | more
        dcp.save(chosen, **given)

    def load(address: str = url, state: Any = None, **more: Any) -> None:
        chosen = empty_state(model, optimizer) if state is None else state
        dcp.load(chosen, storage_reader=StorageReader(address), **more)

    told = {"first": attempt(save)}
    told["url"] = attempt(lambda: StorageWriter("s3:/bucket/run"))
    told["id"] = attempt(lambda: save(checkpoint_id="newest"))
    told["object"] = attempt(lambda: save({"model": {"w": torch.ones(3)}, "odd": Odd()}))
    told["no run"] = attempt(lambda: load(url + "-not"))
    told["no step"] = attempt(lambda: load(url + "#step=7"))
    told["two steps"] = attempt(lambda: load(url + "#step=1", checkpoint_id="step-2"))
    told["missing"] = attempt(lambda: load(state={"model": {"further": torch.ones(3)}}))
    told["shape"] = attempt(lambda: load(state={"model": {"scale": torch.ones(4)}}))
    if rank == 0:  # as another job would
        RunStore(url).writer()
        RunStore(url).writer().commit(b"x", step=5, kind="base", parent=None, state_digest="0" * 32, meta={})
    dist.barrier()
    told["another job"] = attempt(save)
    return told
