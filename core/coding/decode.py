"""Decode the tensors of one checkpoint, and find which are needed; `shrinkpoint.coding.selective` reads whole chains."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from shrinkpoint.coding.grouping import for_codec, groups_of, mapped, matching, siblings_of
from shrinkpoint.container.layout import Entry
from shrinkpoint.container.reader import Header, Record
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.threads import map_in_order
from shrinkpoint.schemes.auto.followers import CopiedCodec, RoundedCodec
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.catalogue import codec_for_reading
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.training import TensorSpec

EXPANSION = 2**20
"""Most bytes of a tensor for each byte that is stored of it without a reference: exact coding stays below, whatever the values."""
_FOLLOW = (
    RoundedCodec.id,
    CopiedCodec.id,
)  # use the memory of another tensor of the same parameter and shape
_UNSUSPICIOUS = 2**30
"""Bytes that any base may decode to."""

Row: TypeAlias = tuple[Entry, ReferenceState, torch.Tensor]
"""A stored tensor, what a reader holds of it for the next delta, and its value."""


def required(wanted: Collection[str], stored: Iterable[Record]) -> set[str]:
    """Return what of a chain's last checkpoint must be decoded to restore some of its tensors, these among them.

    Args:
        wanted: names of tensors; those that the checkpoint lacks are passed over.
        stored: all that it holds, in decoding order.
    """
    by_name = {item.spec.name: item for item in stored}
    needed = {name for name in wanted if name in by_name}
    for group in groups_of(item.spec for item in by_name.values()):
        for at in range(len(group) - 1, 0, -1):  # what a tensor needs stands before it
            spec, earlier = group[at], group[:at]
            if spec.name not in needed:
                continue
            codec = codec_for_reading(by_name[spec.name].codec)
            siblings = siblings_of({other.name: other.name for other in earlier}, spec, group)
            needed.update(siblings[role] for role in codec.needs if role in siblings)
    return needed


def stands_alone(stored: EncodedTensor | Record) -> bool:
    """Return whether a tensor's own bytes are all that its size rests on."""
    return not stored.uses_reference and stored.codec not in _FOLLOW


def check_sizes(header: Header, names: Iterable[str]) -> None:
    """Refuse a small file that declares large tensors before memory is taken for them.

    What uses a reference is as large as that, which was decoded from a file of its own.

    Args:
        header: of the checkpoint.
        names: of the tensors that are to be decoded.

    Raises:
        FormatError: the tensors cannot be what so few bytes hold.
    """
    alone = [record for name in names if stands_alone(record := header.tensors[name])]
    declared, stored = sum(one.spec.nbytes for one in alone), sum(one.nbytes for one in alone)
    if declared > max(_UNSUSPICIOUS, EXPANSION * stored):
        largest = max((one.spec for one in alone), key=lambda spec: spec.nbytes)
        raise FormatError(
            f"the checkpoint of step {header.step} declares tensors of {declared} bytes ({largest.name!r} alone of"
            f" {largest.nbytes}), and holds {stored} bytes of them: no checkpoint is that small"
        )


def decode_planes(
    entries: Iterable[Entry], reference: Mapping[str, ReferenceState], threads: int
) -> dict[str, ReferenceState]:
    """Return what a reader holds after a checkpoint in the middle of a chain.

    Args:
        entries: its tensors, or those that are `required`.
        reference: the reader's, after the checkpoint before.
        threads: tensors decoded side by side.
    """

    def decode(entry: Entry) -> tuple[str, ReferenceState]:
        return entry.spec.name, _after(entry, reference)

    return dict(map_in_order(decode, list(entries), threads, lambda entry: entry.spec.nbytes))


def decode_values(
    entries: Iterable[Entry],
    step: int,
    reference: Mapping[str, ReferenceState],
    threads: int,
    *,
    lasting: bool = False,
) -> Iterator[Row]:
    """Yield the tensors of a chain's last checkpoint, each compared with its digest: one parameter's are decoded when they are asked for.

    Args:
        entries: its tensors, or those that are `required`.
        step: of the checkpoint, for messages.
        reference: the reader's, after the checkpoint before.
        threads: parameters decoded side by side.
        lasting: nobody will write to the tensors, so that they may share the memory of what the reader holds.

    Raises:
        CorruptionError: a restored tensor's digest is not the one that was stored.
        FormatError: sections are malformed.
    """
    by_name = {entry.spec.name: entry for entry in entries}

    def restore(group: Sequence[TensorSpec]) -> list[Row]:
        values: dict[str, torch.Tensor] = {}
        rows: list[Row] = []
        for spec in group:
            entry = by_name[spec.name]
            now = _after(entry, reference)
            context = Context(siblings=siblings_of(values, spec, group), lasting=lasting)
            values[spec.name] = value = _restored(entry, now, context, step)
            rows.append((entry, now, value))
        return rows

    for rows in mapped(restore, groups_of(entry.spec for entry in by_name.values()), threads):
        yield from rows
        rows.clear()  # whoever wants to keep them has them


def _after(entry: Entry, reference: Mapping[str, ReferenceState]) -> ReferenceState:
    """Return what a reader holds of a tensor, given what it had of the checkpoint before."""
    spec, stored = entry.spec, entry.encoded
    context = for_codec(Context(matching(reference.get(spec.name), spec)), stored.codec, spec)
    if stored.uses_reference and context.reference is None:
        raise FormatError(f"{spec.name} needs its predecessor, which the chain before it does not hold")
    planes = codec_for_reading(stored.codec).decode(stored, spec, context)
    return ReferenceState(stored.codec, stored.params, planes)


def _restored(entry: Entry, now: ReferenceState, context: Context, step: int) -> torch.Tensor:
    spec, codec = entry.spec, codec_for_reading(entry.encoded.codec)
    value = codec.reconstruct(entry.encoded, now.planes, spec, context)
    if (value.dtype, tuple(value.shape)) != (spec.dtype, spec.shape):
        raise FormatError(f"{spec.name}: codec {codec.id!r} cannot hold {spec.dtype} {spec.shape}")
    if tensor_digest(value) != entry.digest:
        raise CorruptionError(
            f"step {step}: {spec.name} decodes to other values than were stored"
            " (a wrong reference, or a fault of this machine's decoder)"
        )
    return value
