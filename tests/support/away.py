"""A program for the tests: thirty saves to a store that is away; prints the resident bytes after each, as JSON.

Usage: away.py <folder>. In a process of its own, for what other tests have left behind is given back at any time.
"""

import contextlib
import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import shrinkpoint
from shrinkpoint.errors import SaveFailedError, StoreError
from shrinkpoint.runtime.memory import give_back
from shrinkpoint.store.writer import RunWriter

SAVES = 30


def away(self: RunWriter, *args: Any, **kwargs: Any) -> None:
    raise StoreError("the store is away")


def main(folder: str) -> None:
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    RunWriter.commit = away  # type: ignore[assignment,method-assign]
    checkpointer = shrinkpoint.Checkpointer(f"{folder}/run", model, optimizer, every=1, adopt=SAVES)
    resident = []
    warnings.simplefilter("ignore")
    for step in range(checkpointer.resume(), SAVES):
        optimizer.zero_grad()
        model(torch.randn(64, 1024)).square().mean().backward()
        optimizer.step()
        checkpointer.step(step + 1)
        checkpointer.flush()
        gc.collect()
        give_back()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(SaveFailedError):
        checkpointer.close()
    print(json.dumps(resident))


if __name__ == "__main__":
    main(*sys.argv[1:])
