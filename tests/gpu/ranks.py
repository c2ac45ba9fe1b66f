"""What ranks do in the tests of sharded trainings on a GPU.

It does not ask whether there is a GPU: the server that ranks are forked from must not have begun to use one.
"""

import inspect
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.options import grouped
from support.sharded import Toy, batch
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import shrinkpoint
from shrinkpoint.dcp import StorageReader, StorageWriter
from shrinkpoint.state.digest import tensor_digest

EVERY, MORE = 2, 3
"""Steps between saves, and those that are made after the last save."""


def join(rank: int, world: int, meeting: str, how: dict[str, Any]) -> None:
    """Leave the group that `launch` has made, for one of another backend."""
    dist.barrier()
    dist.destroy_process_group()
    if how["device"] == "cuda":
        os.environ["LOCAL_RANK"] = "0"  # all ranks have the same GPU
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        torch.use_deterministic_algorithms(True)
    given = {"init_method": f"file://{meeting}", "rank": rank, "world_size": world}
    dist.init_process_group(how["backend"], timeout=timedelta(seconds=60), **given)


def build(world: int, how: dict[str, Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with shards on the device, or offloaded from it, and its optimizer."""
    torch.manual_seed(seed)
    model = Toy(d=64).to(how["device"])
    offload = CPUOffloadPolicy(pin_memory=how["device"] == "cuda") if how.get("offload") else OffloadPolicy()
    mesh = init_device_mesh(how["device"], (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)
    return model, torch.optim.AdamW(model.parameters(), 3e-3, fused=how.get("fused", False))


def loss_of(model: nn.Module, step: int, how: dict[str, Any]) -> torch.Tensor:
    """With dropout from the device's generator."""
    tokens, labels = (tensor.to(how["device"]) for tensor in batch(step))
    logits = nn.functional.dropout(model(tokens), 0.1, model.training)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, how: dict[str, Any]) -> float:
    """One step; its loss."""
    optimizer.zero_grad()
    loss = loss_of(model, step, how)
    loss.backward()
    optimizer.step()
    return loss.item()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and the optimizer's state, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    states = {
        f"{names[id(p)]}.{key}": value for p, state in optimizer.state.items() for key, value in state.items()
    }
    return {**model.state_dict(), **states}


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of whole tensors; a collective."""

    def whole(tensor: Any) -> torch.Tensor:
        if not hasattr(tensor, "to_local"):
            return tensor
        return tensor.to_local() if dist.get_world_size() == 1 else tensor.full_tensor()

    found = tensors_of(model, optimizer).items()
    return {name: tensor_digest(whole(tensor).detach().cpu().contiguous()) for name, tensor in found}


def devices(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Where this rank has its part of each tensor."""
    found = tensors_of(model, optimizer).items()
    return {name: getattr(tensor, "_local_tensor", tensor).device.type for name, tensor in found}


def part(
    rank: int, world: int, meeting: str, url: str, how: dict[str, Any], options: dict[str, Any], until: int
) -> dict[str, Any]:
    """Continue the run up to a step, and then make some steps that are not saved."""
    join(rank, world, meeting, how)
    started = int(meeting.rpartition("-")[2])  # each process has other random numbers, until it has resumed
    model, optimizer = build(world, how, seed=started)
    torch.rand(started, device=how["device"])

    def evaluate() -> list[float]:
        with torch.no_grad():
            return [loss_of(model, step, how).item() for step in (-1, -2)]

    given = {
        "every": EVERY,
        "busy": "wait",
        "threads": 1,
    }
    if options.get("scheme") == "auto":
        given["evaluate"] = evaluate
    checkpointer = shrinkpoint.Checkpointer(url, model, optimizer, **grouped(**{**given, **options}))
    began = checkpointer.resume()
    found = {"began": began, "restored": digests(model, optimizer), "devices_then": devices(model, optimizer)}
    for step in range(began, until):
        train(model, optimizer, step, how)
        checkpointer.step(step + 1)
    checkpointer.close()
    found["saved"] = digests(model, optimizer)
    found["losses"] = [train(model, optimizer, step, how) for step in range(until, until + MORE)]
    found |= {"end": digests(model, optimizer), "devices": devices(model, optimizer)}
    return found | {"reports": [(r.step, r.kind, r.measured, r.not_finite) for r in checkpointer.reports()]}


# ---- the pair for torch.distributed.checkpoint

MODES = ("sync", "async", "pinned")


def stager(how: dict[str, Any]) -> Any:
    """What copies into pinned memory, in the background where torch can."""
    if not hasattr(staging, "DefaultStager"):
        return staging.BlockingAsyncStager(cache_staged_state_dict=(how["device"] == "cuda"))
    options = staging.StagingOptions(
        use_pinned_memory=(how["device"] == "cuda"),
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=(how["device"] == "cuda"),
    )
    return staging.DefaultStager(options)


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, how: dict[str, Any]
) -> dict[str, Any]:
    """As the documentation of torch has it, with a plain tensor of the device that is not contiguous."""
    weights, moments = get_state_dict(model, optimizer)
    plain = torch.arange(6, device=how["device"], dtype=torch.float64).reshape(2, 3).T + step
    return {"model": weights, "optim": moments, "plain": plain, "step": step, "rates": [0.1, {"a": (1, 2)}]}


def dcp_saves(rank: int, world: int, meeting: str, url: str, how: dict[str, Any]) -> Any:
    """One save in each mode; what training does once the copy is made is not stored."""
    join(rank, world, meeting, how)
    model, optimizer = build(world, how, seed=1)
    writer, true, pinned = StorageWriter(url, threads=1), [], stager(how)
    for step, mode in enumerate(MODES, 1):
        train(model, optimizer, step, how)
        true.append(digests(model, optimizer))
        state, given = (
            state_of(model, optimizer, step, how),
            {"storage_writer": writer, "checkpoint_id": f"step-{step}"},
        )
        if mode == "sync":
            dcp.save(state, **given)
            continue
        if mode == "pinned" and "async_stager" in inspect.signature(dcp.async_save).parameters:
            given["async_stager"] = pinned
        done: Any = dcp.async_save(state, **given)
        if hasattr(done, "staging_completion"):
            done.staging_completion.result()
        locals_ = [getattr(t, "_local_tensor", t).detach() for t in tensors_of(model, optimizer).values()]
        kept = [tensor.clone() for tensor in locals_]
        for tensor in locals_:
            tensor.zero_()
        getattr(done, "upload_completion", done).result()
        for tensor, value in zip(locals_, kept, strict=True):
            tensor.copy_(value)
    return true, devices(model, optimizer), [(r.step, r.kind) for r in writer.reports]


def dcp_loads(rank: int, world: int, meeting: str, url: str, how: dict[str, Any]) -> Any:
    """Each of the saves in another process's model."""
    join(rank, world, meeting, how)
    found = []
    for step in range(1, len(MODES) + 1):
        model, optimizer = build(world, how, seed=7)
        train(model, optimizer, 0, how)
        state = state_of(model, optimizer, 0, how)
        dcp.load(state, storage_reader=StorageReader(url), checkpoint_id=f"step-{step}")
        assert (state["step"], state["rates"]) == (step, [0.1, {"a": (1, 2)}])
        assert state["plain"].device.type == how["device"]
        assert torch.equal(state["plain"], state_of(model, optimizer, step, how)["plain"])
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(model, optimizer, **parts)
        found.append((digests(model, optimizer), devices(model, optimizer)))
    return found
