"""Saves from which a sharded training itself goes on: owners quantize, and all shards get the restored values.

What is decided, and on what it depends, is as in `shrinkpoint.engine.adopt`, over all ranks' tensors and losses. The number of
ranks is one of the settings.
"""

from collections.abc import Mapping

import torch

from shrinkpoint.engine.takeover import Adoption, Takeover, unsuitable
from shrinkpoint.group.group import Distributed
from shrinkpoint.sharded.boxes import Pieces
from shrinkpoint.sharded.layout import block_box, tensors_of_rank
from shrinkpoint.sharded.probing import Probe
from shrinkpoint.sharded.spreading import Shards, spread
from shrinkpoint.state.training import Describe, TrainingState

__all__ = ["take_over", "takeover_for"]

_FIRST_LOOK_S = 0.01
_LONGEST_PAUSE_S = 0.5


def takeover_for(shards: Shards, describe: Describe, adoption: Adoption, waited_s: float) -> Takeover:
    """Return what this rank's background hands the restored values over by; a collective.

    Args:
        shards: of the state that is saved.
        describe: as of the save.
        adoption: of the planned save.
        waited_s: seconds that training waited for the save before.

    Raises:
        ShrinkpointError: a rank's state cannot be captured once more; on every rank.
    """
    group = shards.group

    def own() -> dict[str, str]:
        again = TrainingState.capture(adoption.live(), describe, shards=True)
        _, pieces = tensors_of_rank(again.tensors, again.specs)
        specs = {name: shards.layout.specs[name] for name in shards.pieces if name in shards.layout.specs}
        return unsuitable(TrainingState(None, _locals(shards.pieces, specs), specs), _locals(pieces, pieces))

    exactly: dict[str, str] = {}
    for found in group.gather(group.on_every(own)):
        exactly |= found
    blocks = {
        name: exactly[of]
        for name, (spec, _) in shards.owners.items()
        if (of := block_box(spec)[0]) in exactly
    }
    return Takeover({}, blocks, {**adoption.settings, "ranks": group.size}, waited_s)


def _locals(pieces: Pieces, names: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: next(iter(own.values())) for name, own in pieces.items() if own and name in names}


def take_over(shards: Shards, takeover: Takeover, probe: Probe, *, started: float) -> None:
    """Make the evaluations that are asked for until all ranks have quantized what they own, and write the restored values into all shards; a collective.

    If one rank could not, none takes anything over, and the save fails on all of them.

    Args:
        shards: of the state that is saved.
        takeover: as `takeover_for` gave it to this rank's background.
        probe: makes the evaluations.
        started: `time.perf_counter` of when the training began to wait.

    Raises:
        StateMismatchError: a rank holds other values than its owner has restored; on every rank, and the save fails.
    """
    try:
        _wait_together(shards.group, takeover, probe)
        values = takeover.values()
        changed = shards.group.gather(None if values is None else sorted(values))
        if values is None or any(names is None for names in changed):
            return
        names = {name for own in changed if own is not None for name in own}
        spread(shards, [name for name in shards.owners if name in names], values, proved=True)
        takeover.accept(tuple(sorted(names)), started=started)
    finally:
        takeover.leave()


def _wait_together(group: Distributed, takeover: Takeover, probe: Probe) -> None:
    """Wait until it is settled on every rank; a rank that is gone ends this as it ends any collective."""
    pause_s = _FIRST_LOOK_S
    while group.most([not takeover.is_settled(pause_s)])[0]:
        takeover.note_served(probe.serve())
        pause_s = _FIRST_LOOK_S if probe.is_active else min(2 * pause_s, _LONGEST_PAUSE_S)
