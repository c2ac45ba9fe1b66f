"""Bytes to checkpoint: whole, or tensor by tensor from a store that reads ranges.

The bytes may come from anywhere. Nothing is executed, every size is compared with the file's before memory is taken,
and every failure is a `FormatError`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from shrinkpoint.container.layout import (
    DIGEST_SIZE,
    PREFIX,
    Checkpoint,
    Entry,
    Facts,
    PartOf,
    check_features,
    check_fields,
    check_seal,
    decompress_header,
    load_json,
    section_checksum,
    split_index,
    unpack_prefix,
)
from shrinkpoint.errors import CorruptionError, FormatError, StateMismatchError
from shrinkpoint.runtime.memory import join_bytes
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.state.digest import state_digest
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

_FIRST_READ = 64 * 2**10
"""Bytes of the first read: one request to a store brings prefix, header and index of most containers."""


@dataclass(frozen=True)
class Record:
    """What the header and the index say about one tensor."""

    spec: TensorSpec
    codec: str
    params: Mapping[str, JSON]
    uses_reference: bool
    digest: str
    offset: int
    """Of its first section, in bytes after the first section of the file; the others follow."""
    lengths: Mapping[str, int]
    """Bytes of each section."""
    checksums: tuple[bytes, ...]
    """xxh3-64 of each section."""

    @property
    def nbytes(self) -> int:
        """Size of all sections, in bytes."""
        return sum(self.lengths.values())


@dataclass(frozen=True, kw_only=True)
class Header(Facts):
    """Everything in a container but the sections."""

    tensors: Mapping[str, Record]
    """By name, in decoding order."""

    @property
    def state_digest(self) -> str:
        """The digest of the whole reconstructed state."""
        return state_digest({name: record.digest for name, record in self.tensors.items()})

    @property
    def decoded_nbytes(self) -> int:
        """Bytes that the decoded tensors claim to take: compare with the memory you have for files you do not trust."""
        return sum(record.spec.nbytes for record in self.tensors.values())

    @property
    def sections_nbytes(self) -> int:
        """Size of all sections, in bytes."""
        return sum(record.nbytes for record in self.tensors.values())


class ContainerReader:
    """A container of which only the asked-for parts are read."""

    def __init__(
        self, read_range: Callable[[int, int], bytes | memoryview], size: int, *, verify: bool = True
    ) -> None:
        """Read the header, with one call to `read_range` for most containers and two at most.

        Args:
            read_range: ``read_range(offset, length)`` gives that many bytes of the file; never asked past its end.
            size: the file's size in bytes, from the store and not from the file.
            verify: whether `entry` checks the sections' checksums. The header's is always checked.

        Raises:
            FormatError: not a sound container; `UnsupportedFormatError` and `CorruptionError` are kinds of it.
        """
        self._read_range = read_range
        self._verify = verify
        first = bytes(self._read(0, min(size, _FIRST_READ)))
        prefix = unpack_prefix(first, size)
        missing = prefix.sections - len(first)
        head = first[: prefix.sections] if missing <= 0 else first + bytes(self._read(len(first), missing))
        check_seal(head, prefix)
        index_at = PREFIX.size + prefix.stored_header
        plain = decompress_header(head[PREFIX.size : index_at], prefix.plain_header)
        self._sections_at = prefix.sections
        self.header = parse_header(plain, head[index_at:])
        if self._sections_at + self.header.sections_nbytes != size:
            raise FormatError("the container's sections do not fill the file exactly")

    def span(self, name: str) -> tuple[int, int]:
        """Return where a tensor's bytes begin in the file, and where they end."""
        record = self.header.tensors[name]
        start = self._sections_at + record.offset
        return start, start + record.nbytes

    def entry(self, name: str) -> Entry:
        """Return one tensor, by reading its bytes and no others.

        Raises:
            StateMismatchError: no such tensor. CorruptionError: a section is damaged.
        """
        try:
            record = self.header.tensors[name]
        except KeyError:
            raise StateMismatchError(
                f"the checkpoint of step {self.header.step} has no tensor {name!r}; it has"
                f" {len(self.header.tensors)}, see `header.tensors`"
            ) from None
        data = (
            self._read(self._sections_at + record.offset, record.nbytes) if record.nbytes else memoryview(b"")
        )
        sections: dict[str, bytes] = {}
        at = 0
        for (part, length), checksum in zip(record.lengths.items(), record.checksums, strict=True):
            section = join_bytes([data[at : at + length]], length)
            if self._verify and section_checksum(section) != checksum:
                raise CorruptionError(f"tensor {name!r}: the checksum of section {part!r} does not match")
            sections[part] = section
            at += length
        encoded = EncodedTensor(record.codec, record.params, sections, record.uses_reference)
        return Entry(record.spec, encoded, record.digest)

    def _read(self, offset: int, length: int) -> memoryview:
        data = memoryview(self._read_range(offset, length))
        if len(data) != length:
            raise CorruptionError(
                f"the container is cut short: {len(data)} of {length} bytes came from offset {offset}"
            )
        return data


def read_container(data: bytes | memoryview, *, verify: bool = True) -> Checkpoint:
    """Return the checkpoint in a whole file.

    Args:
        data: the file's bytes; the sections are copied out of it.
        verify: whether to check the sections' checksums. The header's is always checked.

    Raises:
        FormatError: not a sound container; `UnsupportedFormatError` and `CorruptionError` are kinds of it.
    """
    view = memoryview(data).cast("B")
    reader = ContainerReader(
        lambda offset, length: view[offset : offset + length], view.nbytes, verify=verify
    )
    facts = {field.name: getattr(reader.header, field.name) for field in fields(Facts)}
    return Checkpoint(entries=tuple(map(reader.entry, reader.header.tensors)), **facts)


def parse_header(plain: bytes, index: bytes) -> Header:
    """Read a header and the index that belongs to it.

    Raises:
        FormatError: malformed. UnsupportedFormatError: it names features that this code lacks.
    """
    top = load_json(plain)
    if type(top) is not dict:
        raise FormatError("the header is not an object")
    check_features(_get(top, "features"))
    kind, step, parent, nodes = (_get(top, field) for field in ("kind", "step", "parent", "tensors"))
    if type(nodes) is not list:
        raise FormatError("the header's tensors are not a list")
    specs = [TensorSpec.from_json(node) for node in nodes]
    lengths = [_lengths(node, spec) for node, spec in zip(nodes, specs, strict=True)]
    if len(index) != sum(DIGEST_SIZE + 8 * len(sections) for sections in lengths):
        raise FormatError("the container's index does not have the size that its tensors and sections need")
    records: dict[str, Record] = {}
    offset = 0
    parts = split_index(index, map(len, lengths))
    for node, spec, sections, (digest, sums) in zip(nodes, specs, lengths, parts, strict=True):
        records[spec.name] = _record(node, spec, digest, offset, sections, sums)
        offset += sum(sections.values())
    check_fields(kind, step, parent, specs, any(record.uses_reference for record in records.values()))
    plain_data = {field: _get(top, field) for field in ("scheme", "provenance", "tree")}
    part = PartOf.from_json(top["part"]) if top.get("part") is not None else None
    return Header(
        kind=kind, step=step, parent=parent, tensors=records, exact=top.get("exact"), part=part, **plain_data
    )


def _record(
    node: Mapping[str, JSON],
    spec: TensorSpec,
    digest: str,
    offset: int,
    lengths: Mapping[str, int],
    checksums: tuple[bytes, ...],
) -> Record:
    codec, params, uses_reference = (_get(node, field) for field in ("codec", "params", "uses_reference"))
    if type(codec) is not str or type(params) is not dict or type(uses_reference) is not bool:
        raise FormatError(f"tensor {spec.name!r}: its codec, params or uses_reference is of the wrong kind")
    return Record(spec, codec, params, uses_reference, digest, offset, lengths, checksums)


def _lengths(node: Mapping[str, JSON], spec: TensorSpec) -> Mapping[str, int]:
    lengths = _get(node, "sections")
    if type(lengths) is not dict or any(type(n) is not int or n < 0 for n in lengths.values()):
        raise FormatError(f"tensor {spec.name!r}: its sections are not an object of lengths")
    return lengths


def _get(node: Mapping[str, JSON], field: str) -> JSON:
    try:
        return node[field]
    except KeyError:
        raise FormatError(f"the header lacks the field {field!r}") from None
