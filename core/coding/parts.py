"""Several containers that are one checkpoint: put together, they are read like any other."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shrinkpoint.container.reader import Header, Record
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.schemes.exactness import pack_reasons, unpack_reasons
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import Head


@dataclass(frozen=True, kw_only=True)
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
    facts = {(part.kind, part.step, part.parent) for part in parts}
    if len(facts) != 1:
        raise FormatError(f"the parts are not of one checkpoint: they are {sorted(facts, key=repr)}")
    found = [None if part.part is None else (part.part.number, part.part.of) for part in parts]
    if found != [(number, len(head.parts)) for number in numbers]:
        raise FormatError(
            f"the parts of step {parts[0].step} are {found[:8]}, and should be {numbers[:8]} of {len(head.parts)}"
        )
    for number, part in zip(numbers, parts, strict=True):
        if part.state_digest != head.parts[number].state_digest or part.step != head.step:
            raise CorruptionError(f"{head.parts[number].ref.key} holds another state than its head says")
    tensors: dict[str, Record] = {}
    reasons: dict[str, str] = {}
    for part in parts:
        if tensors.keys() & part.tensors.keys():
            raise FormatError(
                f"two parts of step {head.step} have the tensor {min(tensors.keys() & part.tensors.keys())!r}"
            )
        tensors.update(part.tensors)
        reasons |= unpack_reasons(part.exact, list(part.tensors))
    return PartsHeader(
        kind=parts[0].kind,
        step=parts[0].step,
        tree=parts[0].tree,
        scheme=parts[0].scheme,
        parent=parts[0].parent,
        provenance=parts[0].provenance,
        tensors=tensors,
        exact=pack_reasons(tensors, reasons),
        digest=head.state_digest,
        places={name: number for number, part in headers.items() for name in part.tensors},
        own={number: part.part.own for number, part in headers.items() if part.part is not None},
    )
