"""Saves from which a sharded training itself goes on: owners quantize, and all shards get the restored values.

What is decided, and on what it depends, is as in `shrinkpoint.engine.adopt`, over all ranks' tensors and losses. The number of
ranks is one of the settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from shrinkpoint.coding.selective import header_of
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.retention import Adopted, adopted_of
from shrinkpoint.engine.takeover import Adoption, Takeover, unsuitable
from shrinkpoint.group.group import Distributed
from shrinkpoint.sharded.boxes import Pieces
from shrinkpoint.sharded.layout import block_box, tensors_of_rank
from shrinkpoint.sharded.probing import Probe
from shrinkpoint.sharded.restoring import Decoded
from shrinkpoint.sharded.spreading import Shards, spread
from shrinkpoint.state.training import Describe, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

__all__ = ["continue_adopting", "take_over", "takeover_for"]

_FIRST_LOOK_S = 0.01
_LONGEST_PAUSE_S = 0.5


def takeover_for(shards: Shards, describe: Describe, adoption: Adoption, waited_s: float) -> Takeover:
    """What this rank's background hands the restored values over by; a collective.

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


def continue_adopting(
    store: RunStore,
    group: Distributed,
    background: Background,
    decoded: Decoded,
    read: Callable[[Manifest], Decoded],
) -> Manifest | None:
    """Bring a rank's background into the state of the undisturbed run's at the last planned save; a collective.

    Args:
        store: the run.
        group: all ranks.
        background: of this rank.
        decoded: the checkpoint that the training has been restored from.
        read: reads another one; a collective.

    Returns:
        What the next planned save builds on, on the first rank; None for a base.

    Raises:
        ShrinkpointError: the planned save before an exact one cannot be read; on every rank.
    """
    manifest = decoded.plan.manifest
    last = adopted_of(manifest)
    go_on = partial(background.continue_from, manifest, last, lasting=True)
    if last is None or last.planned:
        values = decoded.own_state, manifest.step
        go_on(decoded.reference, values, digest=manifest.state_digest)
        return manifest
    before = group.on_first(lambda: _planned_before(store, manifest, last))
    if before is None:
        # before the first one, nothing is known of the movement
        go_on({}, (decoded.own_state, manifest.step) if last.count else None)
        if group.rank == 0 and last.count and last.step != manifest.step:
            warn(
                f"the last planned save before step {manifest.step} could not be stored, and with it where the weights were: the next"
                " save's bits differ from those of an undisturbed run. This run stays reproducible from there on"
            )
        return None
    whole = read(before)

    def is_before(other: Manifest) -> bool:
        return (other.state_digest, other.step) == (before.state_digest, before.step)

    parent = group.on_first(lambda: next(filter(is_before, store.manifests()), None))
    digest = None if parent is None else parent.state_digest
    go_on(whole.reference, (whole.own_state, before.step), digest=digest)
    return parent


def _planned_before(store: RunStore, manifest: Manifest, last: Adopted) -> Manifest | None:
    """The chain of an exact checkpoint without its own end; None where that is not the last planned save."""
    if manifest.kind == "base" or not last.count:
        return None
    chain = manifest.chain[:-1]
    header = header_of(store, chain[-1])
    if header.step != last.step:
        return None
    return replace(
        manifest,
        chain=chain,
        kind="base" if len(chain) == 1 else "delta",
        step=header.step,
        state_digest=header.state_digest,
    )
