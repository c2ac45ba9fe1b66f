"""A program for the tests: one of several processes, first alone, then with checkpoints that are tried by training on.

Usage: composer_ddp_probe.py <folder>

Started as `support.composer_distributed` is. Each process leaves ``<folder>/probed-<rank>.pt``.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from composer.core import Callback
from composer.utils import dist
from support.composer_distributed import starts
from support.composer_models import Setup, fit
from support.options import grouped
from support.reports import saver_of

from shrinkpoint.callbacks.composer import CompressedCheckpoint

PROBED: dict[str, Any] = {
    "scheme": "inshrinkerator",
    "guards": False,  # its noise is far wider than movement: all would be exact, and nothing would be tried
    "busy": "wait",
    "save_interval": "4ba",
    "max_degradation": 0.9,
    "restore_budget": 1,
    "search_overhead": float("inf"),
    "probe_steps": 4,
}


class Reading(Callback):  # type: ignore[misc]
    """Takes the reports before the run ends."""

    def __init__(self, saving: CompressedCheckpoint) -> None:
        self._saving = saving
        self.resumed: list[list[str]] = []

    def fit_end(self, state: Any, logger: Any) -> None:
        if dist.get_global_rank() == 0:
            reports = saver_of(self._saving).reports()
            self.resumed = [sorted(report.resumed) for report in reports]


def main(folder: str) -> None:
    starts()
    setup = Setup(data="DistributedSampler, augmentation", duration="3ep", width=512)
    saving = CompressedCheckpoint(f"{folder}/run", **grouped(**PROBED))
    reading = Reading(saving)
    plain = fit(setup=setup)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        probed = fit(saving, reading, setup=setup)
    told = [str(each.message) for each in caught]
    seen = {"plain": plain, "probed": probed, "resumed": reading.resumed, "told": told}
    torch.save(seen, f"{folder}/probed-{dist.get_global_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
