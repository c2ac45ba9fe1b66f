"""Makes sure that what several ranks hold under one name and as one box are copies: a save stores one of them.

Ranks of one mesh hold copies by what a DTensor is. Ranks of different meshes need not: with tensor parallelism a layer that is not
parallelized has a copy on every data-parallel mesh, and the stages of a pipeline may have different layers of one name and shape there.
Nothing but their values distinguishes the two, so these are compared: all bytes when the layout is new, and some elements at every
save, since different layers may begin with equal values.
"""

from collections.abc import Mapping, Sequence

import torch
import xxhash

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.sharded.boxes import Box, Piece
from shrinkpoint.sharded.exchange import plain_bytes
from shrinkpoint.sharded.ranks import Ranks

__all__ = ["check_copies", "fingerprints"]

_SOME = 2**14
"""Elements of a tensor that are compared at every save, evenly spread."""
_ABSENT = -(2**62)
_SHOWN = 3

Unproven = Sequence[tuple[str, Box]]


def fingerprints(
    unproven: Unproven, pieces: Mapping[str, Sequence[Piece]], *, whole: bool
) -> list[int | None]:
    """A number of this rank's values for each of some boxes; None where it does not hold one.

    Args:
        unproven: names and boxes.
        pieces: what this rank holds.
        whole: of all elements, or of some of each.
    """
    local_of = {(name, piece.box): piece.local for name, own in pieces.items() for piece in own}
    found: list[int | None] = [None] * len(unproven)
    samples: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, place in enumerate(unproven):
        local = local_of.get(place)
        if local is None:
            continue
        if whole:
            found[number] = _number(plain_bytes(local).cpu())
            continue
        step = -(-local.numel() // _SOME)
        samples.setdefault(local.device, []).append((number, plain_bytes(local.reshape(-1)[::step])))
    for chosen in samples.values():
        # one copy from a GPU for all of them
        joined, at = torch.cat([sample for _, sample in chosen]).cpu(), 0
        for number, sample in chosen:
            found[number] = _number(joined[at : at + sample.numel()])
            at += sample.numel()
    return found


def check_copies(ranks: Ranks, unproven: Unproven, own: Sequence[int | None]) -> None:
    """Refuse different values under one name; a collective of 16 bytes for each box.

    Args:
        ranks: all of them.
        unproven: names and boxes, the same on all ranks.
        own: this rank's `fingerprints` of these.

    Raises:
        CannotRepresentError: they differ; on every rank.
    """
    if not unproven:
        return
    high = [_ABSENT if number is None else number for number in own]
    low = [_ABSENT if number is None else -number for number in own]
    most = ranks.most([*high, *low])
    count = len(unproven)
    differ = sorted({unproven[i][0] for i in range(count) if most[i] != -most[count + i]})
    if differ:
        more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise CannotRepresentError(
            f"ranks that are not on one device mesh have different values under one name, of which a save would keep one:"
            f" {', '.join(differ[:_SHOWN])}{more}. If these are stages of a pipeline, give each stage's tensors names of their own, or"
            " each stage a run of its own. If they should be copies of each other, they have drifted apart: put them on the mesh"
            " of all these ranks, or broadcast them before training"
        )


def _number(data: torch.Tensor) -> int:
    return xxhash.xxh3_64(data.numpy().data).intdigest() >> 2  # lets other threads run
