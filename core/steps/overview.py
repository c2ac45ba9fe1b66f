"""What the step log in a run's own store holds, by a listing and the head of its newest segment."""

from collections.abc import Iterable
from dataclasses import dataclass

from shrinkpoint.errors import FormatError
from shrinkpoint.steps.reader import load_head
from shrinkpoint.steps.segment import Key, Kind
from shrinkpoint.store.objects import ObjectInfo, ObjectStore

__all__ = ["LogOverview", "overview"]

_TRIED = 3


@dataclass(frozen=True)
class LogOverview:
    """A log, for people.

    Attributes:
        segments: how many files it has.
        bytes: their size.
        kind: of the log; None where its newest segments are damaged.
        last_step: the last step that is logged; None where that is not known, or nothing is.
    """

    segments: int
    bytes: int
    kind: Kind | None = None
    last_step: int | None = None


def overview(objects: ObjectStore, listed: Iterable[ObjectInfo], run: str) -> LogOverview | None:
    """What is logged in a folder of segments; None where there is none.

    Args:
        objects: the folder.
        listed: what lies in it.
        run: the nonce of the run.

    Raises:
        StoreError: it cannot be read.
    """
    sizes = {key: info.size for info in listed if (key := Key.parse(info.key)) is not None}
    if not sizes:
        return None
    newest = sorted(sizes, key=lambda key: (key.turn, key.number), reverse=True)
    for key in newest[:_TRIED]:
        try:
            head = load_head(objects, key, sizes[key], run)
        except FormatError:  # `resume` and `load_weights` say so, and do without it
            continue
        ends = [place.step for place in (head.end, *(one.end for one in head.inherits)) if place is not None]
        return LogOverview(len(sizes), sum(sizes.values()), head.kind, max(ends, default=None))
    return LogOverview(len(sizes), sum(sizes.values()))
