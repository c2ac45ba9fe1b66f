"""A program for the tests: one of several processes that train together, whole, then interrupted, then continued.

Usage: composer_distributed.py <folder> <scenario>...

Started once for each process with RANK, WORLD_SIZE and so on in the environment, as torchrun and Composer's launcher do.
Each process leaves ``<folder>/<scenario>-<rank>.pt``.
"""

import os
import shutil
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shrinkpoint.config import Advanced

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed
from composer.utils import dist
from support.composer_models import Crash, Outcome, Setup, fit
from support.options import grouped

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.session import session as training_session
from shrinkpoint.steps.options import StepLog

__all__ = ["OF_THREE", "SCENARIOS", "Scenario", "starts"]

FSDP2 = {"parallelism_config": {"fsdp": {"state_dict_type": "full"}}}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run of two processes, whose epochs have 4 batches; of three, 3."""

    interval: str
    batch: int
    """At which both processes crash."""
    resumes_at: int
    setup: Setup
    options: dict[str, Any] = field(default_factory=dict)
    signalled: int | None = None
    """The one process that gets a SIGTERM instead."""
    adopts: bool = False
    lossy: bool = False
    """The checkpoints that `adopts` takes over, without taking them over."""
    logs: bool = False
    """Log each step, so that it resumes at one after the checkpoint's at `resumes_at`."""
    control: bool = False
    """Continue once more, with DDP's buckets left as they are at first."""


def _ddp(**more: Any) -> Setup:
    return Setup(**{"data": "DistributedSampler, augmentation", "duration": "4ep", **more})


def _fsdp(**more: Any) -> Setup:
    return _ddp(batch_norm=False, **more)


SCENARIOS = {
    "DDP, epoch end": Scenario(
        interval="1ep", batch=10, resumes_at=8, setup=_ddp(algorithms="EMA", batch_norm=False)
    ),
    "DDP, 2 workers": Scenario(
        interval="3ba",
        batch=11,
        resumes_at=9,
        setup=_ddp(data="DistributedSampler, 2 workers, augmentation", duration="3ep"),
    ),
    "DDP, microbatches": Scenario(interval="5ba", batch=12, resumes_at=10, setup=_ddp(microbatch=4)),
    "DDP, StreamingDataset": Scenario(
        interval="3ba", batch=11, resumes_at=9, setup=_ddp(data="StreamingDataset")
    ),
    "DDP, adopting": Scenario(
        interval="3ba", batch=11, resumes_at=9, setup=_ddp(batch_norm=False), adopts=True
    ),
    "DDP, not adopting": Scenario(
        interval="5ba", batch=15, resumes_at=10, setup=_ddp(batch_norm=False), lossy=True
    ),
    "FSDP2, mid epoch": Scenario(interval="3ba", batch=11, resumes_at=9, setup=_fsdp(), options=FSDP2),
    "FSDP2, epoch end": Scenario(
        interval="1ep", batch=10, resumes_at=8, setup=_fsdp(optimizer="DecoupledAdamW"), options=FSDP2
    ),
    "FSDP2, SIGTERM of one process": Scenario(
        interval="1000ba", batch=7, resumes_at=7, setup=_fsdp(optimizer="SGD"), options=FSDP2, signalled=0
    ),
}

OF_THREE = {
    "DDP, three processes": Scenario(interval="2ba", batch=5, resumes_at=4, setup=_ddp(), control=True),
    "DDP, step log": Scenario(interval="4ba", batch=7, resumes_at=4, setup=_ddp(), control=True, logs=True),
    "DDP, three processes, adopting": Scenario(
        interval="2ba", batch=5, resumes_at=4, setup=_ddp(batch_norm=False), adopts=True
    ),
    "DDP, three processes, not adopting": Scenario(
        interval="6ba", batch=17, resumes_at=12, setup=_ddp(batch_norm=False, duration="6ep"), lossy=True
    ),
}


def play(scenario: Scenario, url: str) -> dict[str, Outcome]:
    """The whole run and the end of the interrupted one, as this process has seen them."""

    def saving(url: str = url) -> CompressedCheckpoint:
        if scenario.adopts:
            return CompressedCheckpoint(url, save_interval=scenario.interval, adopt=8, max_degradation=0.5)
        if scenario.lossy:
            return CompressedCheckpoint(
                url,
                save_interval=scenario.interval,
                max_degradation=1.0,
                advanced=Advanced(busy="wait", guards=False),
            )
        log = {}
        if scenario.logs:
            log = {"step_log": StepLog(segment_steps=1, overhead=None), "log_url": f"{url}-log"}
        return CompressedCheckpoint(
            url, **grouped(save_interval=scenario.interval, scheme="lossless", busy="wait", **log)
        )

    signalled = scenario.signalled == dist.get_global_rank()
    crash = Crash(scenario.batch, sigterm=True) if signalled else Crash(scenario.batch)
    if scenario.signalled is not None and not signalled:
        crash = Crash(-1)
    undisturbed = [saving(f"{url}-whole")] if scenario.adopts else []  # which goes on from what it stores
    whole = fit(*undisturbed, setup=scenario.setup, **scenario.options)
    first = fit(saving(), crash, setup=scenario.setup, **scenario.options)
    assert whole.finished
    assert not first.finished
    if scenario.control and dist.get_global_rank() == 0:
        shutil.copytree(url, f"{url}-copy")
    outcomes = {"whole": whole, "rest": fit(saving(), setup=scenario.setup, seed=999, **scenario.options)}
    if scenario.control:
        restore, training_session.restore_buckets = (
            training_session.restore_buckets,
            lambda model, buckets: None,
        )
        copied = saving(f"{url}-copy")
        outcomes["control"] = fit(copied, setup=scenario.setup, seed=999, **scenario.options)
        training_session.restore_buckets = restore
    return outcomes


def starts() -> None:
    """What every such program does first."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A child of CPython 3.11.7 and older hangs for ever if it is forked while another thread makes itself a thread state
    # (python/cpython#112275), as gloo's may to let go of a collective's tensors: they get the time for it.
    os.register_at_fork(before=lambda: time.sleep(0.05))
    dist.initialize_dist("cpu", timeout=60)


def main(folder: str, *names: str) -> None:
    starts()
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1  # several buckets for a tiny model
    scenarios = SCENARIOS | OF_THREE
    for name in names:
        number = list(scenarios).index(name)
        outcomes = play(scenarios[name], f"{folder}/run-{number}")
        torch.save(outcomes, f"{folder}/{name}-{dist.get_global_rank()}.pt")
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
