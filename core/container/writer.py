"""Checkpoint to bytes."""

from collections.abc import Iterator

import zstandard

from shrinkpoint.container.layout import (
    MAX_HEADER_SIZE,
    MAX_HEADER_VALUES,
    Checkpoint,
    Entry,
    count_values,
    dump_json,
    pack_prefix,
    section_checksum,
)
from shrinkpoint.container.reader import parse_header
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.runtime.memory import Returns, join_bytes
from shrinkpoint.state.tree import JSON

_LEVEL = 9
"""zstd level of the header; higher ones save less than a byte per tensor and take many times longer."""


def write_container(checkpoint: Checkpoint, *, uses_up: bool = False) -> bytes:
    """Return the file of one checkpoint; the same checkpoint gives the same bytes.

    Args:
        checkpoint: with its sections.
        uses_up: whether a tensor's sections are forgotten as soon as they are in the file, so that not all bytes are in memory twice.

    Raises:
        CannotRepresentError: the plain data is not JSON, or more of it than a header holds.
        FormatError: the checkpoint breaks a rule of the format; nothing is written that a reader would refuse.
    """
    try:
        plain = dump_json(_header(checkpoint))
    except (TypeError, ValueError, RecursionError) as error:
        raise CannotRepresentError(
            f"the checkpoint's plain data cannot stand in a header: {error}"
        ) from error
    if len(plain) > MAX_HEADER_SIZE or count_values(plain) > MAX_HEADER_VALUES:
        raise CannotRepresentError(
            f"the checkpoint's plain data takes {len(plain)} bytes of JSON with {count_values(plain)} values, and a"
            f" header holds {MAX_HEADER_SIZE} with {MAX_HEADER_VALUES}: turn long lists in the training state into"
            " tensors or numpy arrays"
        )
    index = b"".join(_index_record(entry) for entry in checkpoint.entries)
    parse_header(plain, index)
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(plain)
    nbytes = sum(entry.encoded.nbytes for entry in checkpoint.entries)
    head = pack_prefix(len(plain), stored, index, nbytes), stored, index

    def parts() -> Iterator[bytes]:
        yield from head
        memory = Returns(nbytes)
        for entry in checkpoint.entries:
            size = entry.encoded.nbytes
            yield from entry.encoded.sections.values()
            if uses_up and isinstance(entry.encoded.sections, dict):
                entry.encoded.sections.clear()
                memory.after(size)

    return join_bytes(parts(), sum(map(len, head)) + nbytes)


def _header(checkpoint: Checkpoint) -> JSON:
    return {
        "features": checkpoint.features,
        "kind": checkpoint.kind,
        "step": checkpoint.step,
        "parent": checkpoint.parent,
        "scheme": checkpoint.scheme,
        "provenance": checkpoint.provenance,
        **({} if checkpoint.exact is None else {"exact": checkpoint.exact}),
        **({} if checkpoint.part is None else {"part": checkpoint.part.to_json()}),
        "tensors": [_tensor(entry) for entry in checkpoint.entries],
        "tree": checkpoint.tree,
    }


def _tensor(entry: Entry) -> JSON:
    encoded = entry.encoded
    return {
        **entry.spec.to_json(),
        "codec": encoded.codec,
        "params": dict(encoded.params),
        "uses_reference": encoded.uses_reference,
        "sections": {name: len(section) for name, section in encoded.sections.items()},
    }


def _index_record(entry: Entry) -> bytes:
    sums = (section_checksum(section) for section in entry.encoded.sections.values())
    return bytes.fromhex(entry.digest) + b"".join(sums)
