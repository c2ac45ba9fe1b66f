"""What ranks do in the tests of sharded trainings."""

from typing import Any

import torch
from support.sharded import build, full_state, train

import shrinkpoint


def hop(
    rank: int, world: int, url: str, true: str, kind: str, optimizer: str, options: dict[str, Any]
) -> Any:
    """Continue the run, compare with the true state, make two saves."""
    model, opt = build(kind, world, rank, optimizer, seed=world, **options)
    checkpointer = shrinkpoint.Checkpointer(
        url, model, opt, every=1, scheme="lossless", busy="wait", threads=1
    )
    start = checkpointer.resume()
    if start:
        wanted, found = torch.load(true, weights_only=True), full_state(model, opt)
        differ = [name for name in wanted if not torch.equal(wanted[name], found[name])]
        assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
        assert not differ, differ
    for step in range(start, start + 2):
        train(model, opt, step)
        checkpointer.step(step + 1)
    checkpointer.close()
    state = full_state(model, opt)
    if rank == 0:
        torch.save(state, true)
    return [(report.step, report.kind) for report in checkpointer.reports()]
