"""The file of some logged steps: prefix, JSON, tensors; no pickle (core/steps/FORMAT.md).

Every segment names its writer and its predecessor, so that files that are truncated, damaged, exchanged, copied, or of
another run or writer are detected before anything of them is used.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import xxhash

from shrinkpoint.container.layout import (
    MAX_HEADER_SIZE,
    MAX_HEADER_VALUES,
    check_features,
    count_values,
    dump_json,
    load_json,
)
from shrinkpoint.errors import CannotRepresentError, CorruptionError, FormatError, UnsupportedFormatError
from shrinkpoint.runtime.unlocked import join_bytes
from shrinkpoint.state.tree import JSON

__all__ = [
    "MAGIC",
    "PREFIX",
    "VERSION",
    "ForeignSegmentError",
    "Head",
    "Key",
    "Kind",
    "Place",
    "Reference",
    "check_payload",
    "header_end",
    "pack",
    "read_head",
]

MAGIC = b"\x89SPL\r\n\x1a\n"
VERSION = 1
PREFIX = struct.Struct("<8sIIQQ16s16s16s")
"""Magic, version, reserved, bytes of the header, bytes of the payload, the payload's xxh3-128, the seal of the segment before,
and the seal: xxh3-128 of all of this before it, and of the header."""

_SEAL_AT = PREFIX.size - 16
_HEX = frozenset("0123456789abcdef")
_KEY = re.compile(r"([0-9]{8})-([0-9a-f]{16})-([0-9]{10})\.steps")


Kind: TypeAlias = Literal["exact", "small"]
"""``exact``: inputs of optimizer steps; ``small``: quantized weight updates."""


class ForeignSegmentError(FormatError):
    """A sound segment that does not match its name, or belongs to another run."""


@dataclass(frozen=True, order=True)
class Key:
    """A segment's writer and number."""

    turn: int
    """The writer's turn: each writer of a run takes a higher one than all before."""
    session: str
    """The writer's nonce, 16 hexadecimal digits."""
    number: int
    """0 is the writer's first segment, which names the segments that it continues from and contains no steps."""

    def __str__(self) -> str:
        return f"{self.turn:08d}-{self.session}-{self.number:010d}.steps"

    @staticmethod
    def parse(text: str) -> "Key | None":
        """The key of a file's name; None if the name is not a key."""
        match = _KEY.fullmatch(text)
        return Key(int(match[1]), match[2], int(match[3])) if match else None


@dataclass(frozen=True)
class Place:
    """A state of the training: its step and its digest."""

    step: int
    """Training steps done."""
    digest: str
    """`shrinkpoint.steps.fingerprint` of the state."""

    def to_json(self) -> JSON:
        """In the form of a header."""
        return {"step": self.step, "digest": self.digest}

    @staticmethod
    def from_json(node: JSON) -> "Place":
        """Read it from a header.

        Raises:
            FormatError: it is none.
        """
        try:
            step, digest = node["step"], node["digest"]
        except (KeyError, TypeError):
            raise FormatError(f"{str(node)[:80]!r} is not a step with a digest") from None
        if type(step) is not int or not 0 <= step < 2**63 or not _is_hex(digest, 32):
            raise FormatError(f"{str(node)[:80]!r} is not a step with a digest")
        return Place(step, digest)


@dataclass(frozen=True)
class Reference:
    """A reference to a segment."""

    key: Key
    seal: str
    """In hexadecimal."""
    begin: Place
    end: Place

    def to_json(self) -> JSON:
        """In the form of a header."""
        return {
            "key": str(self.key),
            "seal": self.seal,
            "begin": self.begin.to_json(),
            "end": self.end.to_json(),
        }

    @staticmethod
    def from_json(node: JSON) -> "Reference":
        """Read it from a header.

        Raises:
            FormatError: it is none.
        """
        try:
            key, seal, begin, end = node["key"], node["seal"], node["begin"], node["end"]
        except (KeyError, TypeError):
            raise FormatError(f"{str(node)[:80]!r} does not refer to a segment") from None
        parsed = Key.parse(key) if isinstance(key, str) else None
        if parsed is None or not _is_hex(seal, 32):
            raise FormatError(f"{str(node)[:80]!r} does not refer to a segment")
        return Reference(parsed, seal, Place.from_json(begin), Place.from_json(end))


@dataclass(frozen=True, kw_only=True)
class Head:
    """A segment without its tensors."""

    run: str
    """The run that it belongs to: the nonce in its ``format.json``."""
    kind: Kind
    key: Key
    begin: Place | None
    """The state that its records begin with; None in the first segment of a writer, which has none."""
    end: Place | None
    """The state after its last record."""
    inherits: tuple[Reference, ...] = ()
    """In the first segment of a writer: the segments of earlier writers whose replay it continues from."""
    records: Sequence[JSON] = ()
    tensors: JSON = ()
    layout: JSON = None
    """Of a log of updates: the model's tensors, in the order of the records."""
    provenance: JSON = None
    previous: str = "0" * 32
    """The seal of the segment before, of the same writer."""
    seal: str = ""
    """Known once it is packed."""
    payload_digest: bytes = b""
    """The xxh3-128 of the tensors' bytes, of a segment that was read."""

    @property
    def reference(self) -> Reference:
        """A reference to this segment; not for a writer's first segment."""
        assert self.begin is not None
        assert self.end is not None
        return Reference(self.key, self.seal, self.begin, self.end)


def pack(head: Head, parts: Sequence[memoryview]) -> tuple[bytes, str]:
    """The file of a segment.

    Args:
        head: all but the seal.
        parts: the tensors' bytes, in the order of ``head.tensors``.

    Returns:
        The bytes, and the seal.

    Raises:
        CannotRepresentError: the records do not fit in a header.
    """
    try:
        header = dump_json(
            {
                "features": {},
                "run": head.run,
                "kind": head.kind,
                "key": str(head.key),
                "begin": head.begin.to_json() if head.begin else None,
                "end": head.end.to_json() if head.end else None,
                "inherits": [reference.to_json() for reference in head.inherits],
                "layout": head.layout,
                "provenance": head.provenance,
                "records": list(head.records),
                "tensors": list(head.tensors),
            }
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise CannotRepresentError(f"steps cannot be written as JSON: {error}") from error
    if len(header) > MAX_HEADER_SIZE or count_values(header) > MAX_HEADER_VALUES:
        raise CannotRepresentError(
            f"a segment's header of {len(header)} bytes is too long: choose a smaller segment_steps"
        )
    digest, nbytes = xxhash.xxh3_128(), sum(map(len, parts))
    for part in parts:
        digest.update(part)
    unsealed = PREFIX.pack(
        MAGIC,
        VERSION,
        0,
        len(header),
        nbytes,
        digest.digest(),
        bytes.fromhex(head.previous),
        bytes(16),
    )[:_SEAL_AT]
    seal = xxhash.xxh3_128(unsealed + header).digest()
    first = unsealed + seal + header
    return join_bytes([first, *parts], len(first) + nbytes), seal.hex()


def header_end(data: bytes, size: int) -> int:
    """Read where the header ends from the first `PREFIX.size` bytes of a file of `size` bytes; it is safe to act upon.

    Raises:
        FormatError: not a segment. UnsupportedFormatError: of a newer version. CorruptionError: cut short.
    """
    if not data.startswith(MAGIC):
        raise FormatError(f"not a segment of a step log: it starts with {bytes(data[:8])!r}")
    if len(data) < PREFIX.size:
        raise CorruptionError(f"cut short: {len(data)} bytes do not contain the prefix of a segment")
    _, version, reserved, header, payload, *_ = PREFIX.unpack_from(data)
    if version != VERSION or reserved:
        raise UnsupportedFormatError(
            f"a step log of version {version} (reserved field {reserved:#x}), and this shrinkpoint reads {VERSION}: upgrade it"
        )
    if PREFIX.size + header + payload != size:
        raise CorruptionError(
            f"{size} bytes, and its prefix says {PREFIX.size + header + payload}: cut short, or damaged"
        )
    if header > MAX_HEADER_SIZE:
        raise FormatError(f"a header of {header} bytes is larger than the limit of {MAX_HEADER_SIZE}")
    end: int = PREFIX.size + header
    return end


def read_head(data: bytes, size: int, key: Key, run: str) -> Head:
    """Read a segment without its tensors.

    Args:
        data: the first bytes of the file, up to `header_end` at least.
        size: of the file.
        key: by which it was found.
        run: that it must belong to.

    Raises:
        CorruptionError: the seal does not match.
        ForeignSegmentError: another run's, or another segment.
        FormatError: malformed.
    """
    header = data[PREFIX.size : header_end(data, size)]
    *_, digest, previous, seal = PREFIX.unpack_from(data)
    if xxhash.xxh3_128(data[:_SEAL_AT] + header).digest() != seal:
        raise CorruptionError("its seal does not match: the file is damaged")
    node = load_json(header)
    if not isinstance(node, Mapping):
        raise FormatError("its header is not a JSON object")
    try:
        check_features(node["features"])
        if node["run"] != run:
            raise ForeignSegmentError("it belongs to another run")
        if node["key"] != str(key):
            raise ForeignSegmentError(f"it is the segment {str(node['key'])[:60]!r} under another name")
        begin, end = (
            None if node[name] is None else Place.from_json(node[name]) for name in ("begin", "end")
        )
        inherits, records, tensors = node["inherits"], node["records"], node["tensors"]
        layout, provenance = node["layout"], node["provenance"]
        kind: Kind = node["kind"]
    except KeyError as error:
        raise FormatError(f"its header lacks {error}") from error
    if kind not in get_args(Kind) or not all(
        isinstance(value, list) for value in (inherits, records, tensors)
    ):
        raise FormatError("its header is malformed")
    if (begin is None or end is None) != (key.number == 0) or (key.number == 0 and records):
        raise FormatError("a writer's first segment has no steps, and every other has a beginning and an end")
    if begin is not None and end is not None and begin.step > end.step:
        raise FormatError(f"it goes from step {begin.step} back to {end.step}")
    return Head(
        run=run,
        kind=kind,
        key=key,
        begin=begin,
        end=end,
        inherits=tuple(Reference.from_json(item) for item in inherits),
        records=records,
        tensors=tensors,
        layout=layout,
        provenance=provenance,
        previous=previous.hex(),
        seal=seal.hex(),
        payload_digest=digest,
    )


def check_payload(payload: memoryview, head: Head) -> None:
    """Compare the tensors' bytes with their checksum.

    Raises:
        CorruptionError: they are not those that were written.
    """
    if xxhash.xxh3_128(payload).digest() != head.payload_digest:
        raise CorruptionError("the checksum of its tensors does not match: the file is damaged")


def _is_hex(value: object, digits: int) -> bool:
    return type(value) is str and len(value) == digits and _HEX.issuperset(value)
