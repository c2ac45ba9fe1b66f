"""A model sharded by FSDP2, saved from all ranks and continued on any number of them.

    torchrun --nproc-per-node 2 examples/sharded_fsdp2.py runs/sharded --steps 60
    torchrun --nproc-per-node 3 examples/sharded_fsdp2.py runs/sharded --steps 100   # goes on at step 60
    shrinkpoint export runs/sharded model.safetensors                                # one process, no torch.distributed

Runs on CPUs too; on GPUs it takes one for each rank.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shrinkpoint


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
    parser.add_argument("--scheme", default="lossless")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpointer = shrinkpoint.Checkpointer(
        arguments.url, model, optimizer, every=arguments.every, scheme=arguments.scheme
    )
    start = checkpointer.resume()  # like every method, called on all ranks
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(start, arguments.steps):
        tokens = torch.randint(64, (32, 8), generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten() % 64)
        loss.backward()
        optimizer.step()
        checkpointer.step(step + 1)
    checkpointer.close()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, from step {start} to {max(start, arguments.steps)}")
        for report in checkpointer.reports():
            print(
                f"step {report.step}: {report.kind}, {report.bytes} bytes, ratio {report.ratio:.2f},"
                f" training waited {1000 * report.blocked_s:.0f} ms"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
