"""Several containers that are one checkpoint: put together, they are read like any other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.reader import Header, Record
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.schemes.exactness import pack_reasons, unpack_reasons
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import Head

__all__ = ["PartsHeader", "merged_headers"]


@dataclass(frozen=True)
class PartsHeader(Header):
    """The headers of a checkpoint's parts, or of some of them, as one."""

    digest: str = ""
    places: Mapping[str, int] = field(default_factory=dict)
    """The number of the part that has each tensor."""
    own: Mapping[int, JSON] = field(default_factory=dict)
    """Plain data of the ranks that wrote the parts, by number."""

    @property
    def state_digest(self) -> str:
        """The digest of the whole reconstructed state."""
        return self.digest


def merged_headers(head: Head, headers: Mapping[int, Header]) -> Header:
    """Return one header of a checkpoint's parts, or of some of them, of which it then has the tensors alone.

    Args:
        head: of the checkpoint.
        headers: by the part's number; the tree is there if the first part is.

    Raises:
        FormatError: they are not the parts of one checkpoint.
        CorruptionError: a part holds another state than its head says.
    """
    numbers = sorted(headers)
    parts = [headers[number] for number in numbers]
    _check_same(
        [(p.kind, p.step, p.parent) for p in parts], [p.part for p in parts], numbers, len(head.parts)
    )
    for number, part in zip(numbers, parts, strict=True):
        if part.state_digest != head.parts[number].state_digest or part.step != head.step:
            raise CorruptionError(f"{head.parts[number].ref.key} holds another state than its head says")
    tensors: dict[str, Record] = {}
    for part in parts:
        if tensors.keys() & part.tensors.keys():
            raise FormatError(
                f"two parts of step {head.step} have the tensor {min(tensors.keys() & part.tensors.keys())!r}"
            )
        tensors.update(part.tensors)
    return PartsHeader(
        kind=parts[0].kind,
        step=parts[0].step,
        tree=parts[0].tree,
        scheme=parts[0].scheme,
        parent=parts[0].parent,
        provenance=parts[0].provenance,
        tensors=tensors,
        exact=_exact((part.exact, list(part.tensors)) for part in parts),
        digest=head.state_digest,
        places={name: number for number, part in headers.items() for name in part.tensors},
        own={number: part.part.own for number, part in headers.items() if part.part is not None},
    )


def _check_same(
    facts: Sequence[tuple[str, int, str | None]],
    places: Sequence[PartOf | None],
    numbers: Sequence[int],
    of: int,
) -> None:
    """Refuse what is not of one checkpoint."""
    if len(set(facts)) != 1:
        raise FormatError(f"the parts are not of one checkpoint: they are {sorted(set(facts), key=repr)}")
    found = [None if place is None else (place.number, place.of) for place in places]
    if found != [(number, of) for number in numbers]:
        raise FormatError(
            f"the parts of step {facts[0][1]} are {found[:8]}, and should be {list(numbers)[:8]} of {of}"
        )


def _exact(parts: Iterable[tuple[JSON, list[str]]]) -> JSON:
    reasons: dict[str, str] = {}
    names: list[str] = []
    for exact, own in parts:
        reasons |= unpack_reasons(exact, own)
        names += own
    return pack_reasons(names, reasons)
