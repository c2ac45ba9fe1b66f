"""What ranks do in the tests of stages, copies and memory."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from support.sharded import build, train, warm
from support.sharded_programs import Filled, fails, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shrinkpoint
from shrinkpoint.errors import StoreError
from shrinkpoint.sharded import gathering
from shrinkpoint.sharded.exchange import ExchangePlan

warm()


def _stage(mesh: Any, seed: int, name: str = "layer") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module(name, nn.Linear(6, 6))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    _step(model, optimizer, seed)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def _checkpointer(url: str, model: Any, optimizer: Any) -> Any:
    return shrinkpoint.Checkpointer(
        url, model, optimizer, scheme="lossless", advanced=shrinkpoint.Advanced(busy="wait", threads=1)
    )


def stages(rank: int, world: int, url: str) -> dict[str, Any]:
    """Each rank is a stage of a pipeline, on a mesh of its own; what their saves do."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    own, stage = mesh["dp"], mesh.get_local_rank("pp")
    seen: dict[str, Any] = {}

    def saved(checkpointer: Any, step: int) -> Callable[[], Any]:
        return lambda: checkpointer.save(step, wait=True)

    other = _checkpointer(url + "-other", *_stage(own, seed=stage))
    seen["different"] = told(saved(other, 1))

    model, optimizer = _stage(own, seed=5)
    alike = _checkpointer(url + "-alike", model, optimizer)
    seen["equal at first"] = told(saved(alike, 1))
    _step(model, optimizer, seed=stage)
    seen["different later"] = told(saved(alike, 2))

    # copies that stay equal: a layer that tensor parallelism leaves alone
    model, optimizer = _stage(own, seed=6)
    copies = _checkpointer(url + "-copies", model, optimizer)
    for step in (1, 2):
        seen[f"copies {step}"] = told(saved(copies, step))
        _step(model, optimizer, seed=step)
    seen["reports"] = [(report.step, report.kind) for report in copies.reports()]

    numbered = _checkpointer(url + "-numbered", *_stage(own, seed=7, name=f"layer{stage}"))
    seen["numbered"] = told(saved(numbered, 1))
    return seen


def plain_weights(rank: int, world: int, url: str) -> str:
    """A parameter that is not sharded has other values on each rank."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(rank)
    alone = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model.add_module("alone", alone)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    checkpointer = _checkpointer(url, model, optimizer)
    return told(lambda: checkpointer.save(1, wait=True))


def without_memory(rank: int, world: int, url: str) -> dict[str, Any]:
    """Memory for a save, and then for a restore, is lacking on the last rank."""
    shown: list[str] = []
    warnings.showwarning = lambda message, *rest, **more: shown.append(str(message))
    warnings.simplefilter("always")
    filled = Filled(rank, world)
    checkpointer = filled.checkpointer(url)
    empty, buffers = gathering.empty_tensor, ExchangePlan.buffers

    def too_much(*given: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    accepted = []
    for step in (1, 2, 3):
        filled.fill(step)
        if step == 2 and rank == world - 1:
            gathering.empty_tensor = too_much
        accepted.append(checkpointer.save(step, wait=True) is not None)
        gathering.empty_tensor = empty
    if rank == world - 1:
        ExchangePlan.buffers = lambda self: fails(StoreError("too little memory"))  # type: ignore[method-assign]
    restored = told(checkpointer.resume)
    ExchangePlan.buffers = buffers  # type: ignore[method-assign]
    again = checkpointer.resume()
    return {
        "accepted": accepted,
        "reports": [(report.step, report.kind) for report in checkpointer.reports()],
        "shown": shown,
        "restored": restored,
        "again": again,
    }


def tensor_parallel(rank: int, world: int, url: str) -> Any:
    """Tensor parallelism leaves copies of some layers on disjoint meshes: they are saved."""
    model, optimizer = build("tp", world, rank)
    checkpointer = _checkpointer(url, model, optimizer)
    for step in (1, 2):
        train(model, optimizer, step)
        checkpointer.save(step, wait=True)
    layout = checkpointer.saver._placement.layout
    return len(layout.unproven), [(report.step, report.kind) for report in checkpointer.reports()]
