"""A program for the tests: three saves of a state just over 128 MiB; prints what they took of memory, in sizes of the state, as JSON.

Arguments: a folder for the runs, and the scratch folder, or nothing.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import shrinkpoint
from shrinkpoint.quality import guards
from shrinkpoint.runtime.memory import give_back

peak = [0]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def look() -> None:
    while True:
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)


def loop(folder: str, width: int, scratch: str | None) -> tuple[int, list[str], list[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(98)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # whose step takes no memory of note
    inputs = torch.randn(4, width)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            (model(inputs) - 1).square().mean().backward()
            optimizer.step()
        give_back()

    def evaluate() -> float:
        with torch.no_grad():
            return float((model(inputs) - 1).square().mean())

    train()
    before = resident()
    checkpointer = shrinkpoint.Checkpointer(
        folder,
        model,
        optimizer,
        evaluate=evaluate,
        advanced=shrinkpoint.Advanced(threads=1, scratch_folder=scratch),
    )
    checkpointer.resume()
    state = 3 * sum(p.nbytes for p in model.parameters())
    found = []
    for step in (1, 2, 3):
        train()
        peak[0] = resident()
        checkpointer.save(step, wait=True)
        found.append(((peak[0] - before) / state, (resident() - before) / state))
    kinds = [report.kind for report in checkpointer.reports()]
    checkpointer.close()
    return state, kinds, found


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Of which a guard tries updates: it takes up to 0.1 GB for that, whatever the state's size, which would be most of this one.
    guards._MOST_ELEMENTS = 1 << 17
    threading.Thread(target=look, daemon=True).start()
    loop(f"{sys.argv[1]}/small", 150, None)  # loads the coders
    print(json.dumps(loop(f"{sys.argv[1]}/large", 350, sys.argv[2] or None)))
