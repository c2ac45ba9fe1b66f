"""A loop that calls torch.distributed.checkpoint itself: its checkpoints in a run, continued on any number of ranks.

    torchrun --nproc-per-node 2 examples/sharded_dcp.py runs/dcp --steps 60
    torchrun --nproc-per-node 3 examples/sharded_dcp.py runs/dcp --steps 100   # goes on at step 60
    shrinkpoint export runs/dcp model.safetensors                              # one process, no torch.distributed

Runs on CPUs too; on GPUs it takes one for each rank.
"""

import argparse
import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from shrinkpoint.dcp import StorageReader, StorageWriter
from shrinkpoint.store.run import RunStore


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank, before they are sharded
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(64, 256), *layers, nn.Linear(256, 64)).to(device)
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="the run: a folder that all ranks see, or s3://bucket/prefix")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    start = 0
    if RunStore(arguments.url).manifests():
        loaded = state(0)
        dcp.load(loaded, storage_reader=StorageReader(arguments.url))
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        start = loaded["step"]

    writer = StorageWriter(arguments.url)  # one for the whole training
    background = dist.new_group(backend="gloo")  # which nothing else uses
    saving: Future[Any] | None = None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(start, arguments.steps):
        tokens = torch.randint(64, (32, 8), generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten() % 64)
        loss.backward()
        optimizer.step()
        if (step + 1) % arguments.every == 0:
            if saving is not None:
                saving.result()  # raises what has gone wrong
            saving = dcp.async_save(
                state(step + 1),
                storage_writer=writer,
                checkpoint_id=f"step-{step + 1}",
                process_group=background,
            )
    if saving is not None:
        saving.result()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, from step {start} to {max(start, arguments.steps)}")
        for report in writer.reports:
            print(f"step {report.step}: {report.kind}, {report.bytes} bytes, ratio {report.ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
