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
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (0, 1)]

from common import in_memory_folder
from gpt import GPTConfig
from steps_costs import Measured, measure_costs, print_costs, print_storage
from steps_errors import report
from steps_recovery import print_recovery
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
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    arguments = parser.parse_args()
    wanted = arguments.sections.split(",")
    unknown = set(wanted) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    warnings.filterwarnings("ignore", message="The epoch parameter")  # torch's own, of its scheduler
    torch.set_num_threads(1)
    tiny = {"width": 32, "layers": 1, "heads": 2, "block": 32, "batch": 4}
    config = GPTConfig(**(tiny if arguments.small else {}))
    log = arguments.log or tempfile.mkdtemp(prefix="steps-bench-", dir=in_memory_folder())
    try:
        measured: Measured | None = None
        if {"cost", "storage", "waste"} & set(wanted):
            measured = measure_costs(config, log, arguments.blocks)
            if "cost" in wanted:
                print_costs(measured)
            if "storage" in wanted:
                print_storage(measured)
        if {"recovery", "waste"} & set(wanted):
            recovered = print_recovery(config, f"{log}/recovery")
            if "waste" in wanted:
                assert measured is not None
                print_waste(measured, recovered)
        if "errors" in wanted:
            report(config, seeds=arguments.seeds, before=arguments.before)
    finally:
        if arguments.log is None:
            shutil.rmtree(log, ignore_errors=True)


if __name__ == "__main__":
    main()
