"""A program for the tests: a loop with accelerate on several processes, as docs/loop.md describes it, until it is killed or done.

Usage: accelerate_killed.py <folder> <name>

It continues the run in ``<folder>/run``, or saves nothing if `name` is ``whole``. The first process says the number of every step in
``<folder>/progress``, and each leaves where it began and its final state in ``<folder>/<name>-<rank>.pt``.
"""

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import Advanced

STEPS, EVERY = 30, 5
_PAUSE_S = 0.05  # after each step, or it would have finished before it is killed


def main(folder: str, name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    checkpointer, begins = None, 0
    if name != "whole":
        run, advanced = f"{folder}/run", Advanced(busy="wait")
        checkpointer = Checkpointer(
            run, model, optimizer, every=EVERY, scheduler=scheduler, scheme="lossless", advanced=advanced
        )
        begins = checkpointer.resume()
    for step in range(begins, STEPS):
        batch = torch.randn(
            4, 8, generator=torch.Generator().manual_seed(100 * step + accelerator.process_index)
        )
        loss = (model(batch) - batch[:, :4]).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        if checkpointer is not None:
            checkpointer.step(step + 1)
        if checkpointer is not None and accelerator.is_main_process:
            with Path(folder, "progress").open("a") as file:
                print(step + 1, file=file)
            time.sleep(_PAUSE_S)
    if checkpointer is not None:
        checkpointer.close()
    outcome = {
        "begins": begins,
        "model": accelerator.unwrap_model(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(outcome, f"{folder}/{name}-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
