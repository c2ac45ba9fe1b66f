"""What step logs cost a training, what a recovery takes, and how both compare with LowDiff's experiments.

    make bench-steps        (OMP_NUM_THREADS=1 python examples/benchmarks/steps.py, 20 minutes)

``--sections cost,recovery,storage,waste,errors`` prints some of the tables. All ratios are of one run: trainings alternate in one
process, some steps each, so that other work on the machine affects all alike. The numbers of experiments and tables are those of
LowDiff (arXiv 2509.04084). The constants of the tables of failures are those of the same run, and printed with them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from steps_costs import Measured, measure_costs, print_costs, print_storage
from steps_errors import report
from steps_recovery import print_recovery
from steps_task import config_of, load_text
from steps_waste import print_waste

SECTIONS = ("cost", "recovery", "storage", "waste", "errors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--blocks", type=int, default=10, help="of 8 steps, for each method")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--before", type=int, default=200, help="steps before the base of the errors")
    parser.add_argument("--log", default=None, help="default: a folder in /dev/shm, or a temporary one")
    parser.add_argument("--exact-only", action="store_true", help="of the costs, those of the exact log")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    arguments = parser.parse_args()
    wanted = arguments.sections.split(",")
    unknown = set(wanted) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if arguments.exact_only and set(wanted) != {"cost"}:
        parser.error("--exact-only is for --sections cost: the other tables need all methods")
    warnings.filterwarnings("ignore", message="The epoch parameter")  # torch's own, of its scheduler
    torch.set_num_threads(1)
    config = config_of(arguments.small)
    text, batches = load_text(config)
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    log = arguments.log or tempfile.mkdtemp(prefix="steps-bench-", dir=shared)
    try:
        measured: Measured | None = None
        if {"cost", "storage", "waste"} & set(wanted):
            measured = measure_costs(
                text, config, log, blocks=arguments.blocks, exact_only=arguments.exact_only
            )
            if "cost" in wanted:
                print_costs(measured)
            if "storage" in wanted:
                print_storage(measured)
        if {"recovery", "waste"} & set(wanted):
            recovered = print_recovery(text, config, f"{log}/recovery")
            if "waste" in wanted:
                assert measured is not None
                print_waste(measured, recovered)
        if "errors" in wanted:
            report(text, batches, config, seeds=arguments.seeds, before=arguments.before)
    finally:
        if arguments.log is None:
            shutil.rmtree(log, ignore_errors=True)


if __name__ == "__main__":
    main()
