"""What a container holds, and how its prefix, header and index are laid out (docs/format.md, "The container").

A file is a prefix of fixed size, a compressed header of JSON, a binary index of checksums, and the tensors' sections
back to back. Offsets are not stored: they are sums of lengths, so that holes and overlaps cannot be expressed.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash
import zstandard

from shrinkpoint.errors import CorruptionError, FormatError, UnsupportedFormatError
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.state.digest import state_digest
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

MAGIC = b"\x89SHR\r\n\x1a\n"
"""First eight bytes. As in PNG, each transfer that damages files breaks it: 7-bit channels the first byte,
translation of line ends the last four."""

FORMAT_VERSION = 1
"""The one version of the layout that this code writes and reads."""

PARTS, BLOCKS, BOXES = "parts", "blocks", "boxes"
FEATURES: Mapping[str, str] = {PARTS: "0.1.0", BLOCKS: "0.1.0", BOXES: "0.1.0"}
"""Additions to this version of the format that this code can read: names in a header, and the first release that reads each."""

PREFIX = struct.Struct("<8sIIQQQQ16s")
"""Magic, version, reserved, stored header, plain header, index, file (all sizes in bytes), seal."""

DIGEST_SIZE = 16
"""Bytes of a tensor's digest in the index; xxh3-128."""

MAX_HEADER_SIZE = 64 * 2**20
"""Most bytes of a header, plain as well as stored: a state's plain data belongs in tensors long before that."""

MAX_HEADER_VALUES = 2**21
"""Most bytes ``,``, ``[`` and ``{`` in a plain header. They bound the number of JSON values, and with it the memory
that a small hostile file makes a reader take: a Python object is up to a hundred times larger than its JSON."""

_SEAL_OFFSET = PREFIX.size - 16
_INT64 = range(-(2**63), 2**63)
_HEX = frozenset("0123456789abcdef")

Kind = Literal["base", "delta"]


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint."""

    spec: TensorSpec
    encoded: EncodedTensor
    digest: str
    """`shrinkpoint.state.digest.tensor_digest` of the reconstruction."""

    def __post_init__(self) -> None:
        if not _is_digest(self.digest):
            raise FormatError(f"tensor {self.spec.name!r}: {self.digest!r} is not 32 hexadecimal digits")


@dataclass(frozen=True)
class PartOf:
    """Place of a container among those of one checkpoint, which as many ranks have written (`shrinkpoint.store.manifest`).

    The first part has the tree of the state. `Checkpoint.parent` is the digest of the whole previous checkpoint.
    """

    number: int
    of: int
    own: JSON = None
    """Plain data of this rank alone, such as its generators; its tensors are in this container."""

    def __post_init__(self) -> None:
        if type(self.number) is not int or type(self.of) is not int or not 0 <= self.number < self.of < 2**31:
            raise FormatError(f"a container cannot be part {self.number!r:.40} of {self.of!r:.40}")

    def to_json(self) -> JSON:
        """As in a container's header."""
        return {"number": self.number, "of": self.of, "own": self.own}

    @classmethod
    def from_json(cls, node: JSON) -> "PartOf":
        """Read what `to_json` gave.

        Raises:
            FormatError: it is something else.
        """
        if type(node) is not dict or not {"number", "of", "own"} <= node.keys():
            raise FormatError("the header's part is not an object with number, of and own")
        return cls(number=node["number"], of=node["of"], own=node["own"])


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a container says about a checkpoint as a whole."""

    kind: Kind
    step: int
    """Optimizer steps made when the state was captured."""
    tree: JSON
    """The state's plain data (`shrinkpoint.state.tree`)."""
    scheme: JSON
    """What the scheme says about itself; for people and logs, decoding depends on the entries alone."""
    parent: str | None
    """`state_digest` of the predecessor that a delta is decoded against; None in a base."""
    provenance: JSON
    """Where the checkpoint comes from (library versions, wall time); never needed to decode."""
    exact: JSON = None
    """Why tensors are stored exactly (`shrinkpoint.schemes.exactness`); never needed to decode. None where there is nothing to say."""
    part: PartOf | None = None
    """Where other ranks' containers belong to the same checkpoint: which this is."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Facts):
    """One checkpoint, encoded: what a container holds."""

    entries: tuple[Entry, ...]
    """The tensors in decoding order: siblings that a codec needs stand before the tensor that needs them."""

    @property
    def features(self) -> dict[str, str]:
        """What a reader must know beyond `FORMAT_VERSION`."""
        specs = [entry.spec for entry in self.entries if entry.spec.block is not None]
        boxes = any(not spec.block.is_rows(spec.shape) for spec in specs if spec.block is not None)
        used = {PARTS: self.part is not None, BLOCKS: bool(specs), BOXES: boxes}
        return {name: since for name, since in FEATURES.items() if used[name]}

    def __post_init__(self) -> None:
        specs = [entry.spec for entry in self.entries]
        references = any(entry.encoded.uses_reference for entry in self.entries)
        check_fields(self.kind, self.step, self.parent, specs, references)

    @property
    def state_digest(self) -> str:
        """The digest of the whole reconstructed state."""
        return state_digest({entry.spec.name: entry.digest for entry in self.entries})


def check_fields(
    kind: object, step: object, parent: object, specs: Sequence[TensorSpec], references: bool
) -> None:
    """Check the rules that every checkpoint obeys, before it is written and after it is read.

    Raises:
        FormatError: names the rule that is broken.
    """
    if kind not in ("base", "delta"):
        raise FormatError(f"a checkpoint's kind is 'base' or 'delta', not {kind!r}")
    if type(step) is not int or not 0 <= step < 2**63:
        raise FormatError(f"a checkpoint's step is an integer from 0 to 2^63 - 1, not {step!r}")
    if kind == "base" and (parent is not None or references):
        raise FormatError("a base has no parent, and none of its tensors uses a reference")
    if kind == "delta" and not _is_digest(parent):
        raise FormatError(f"a delta's parent is a state digest of 32 hexadecimal digits, not {parent!r}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise FormatError(f"the tensor {spec.name!r} is in the checkpoint twice")
        seen.add(spec.name)


@dataclass(frozen=True)
class Prefix:
    """Sizes, in bytes, of the parts of a file; they follow each other in this order, after the prefix."""

    stored_header: int
    plain_header: int
    index: int
    file: int
    seal: bytes
    """xxh3-128 of the prefix before this field, the stored header and the index."""

    @property
    def sections(self) -> int:
        """Offset of the first section."""
        return PREFIX.size + self.stored_header + self.index


def pack_prefix(plain_header: int, stored_header: bytes, index: bytes, sections: int) -> bytes:
    """Return the first bytes of a file with these parts; `plain_header` and `sections` are sizes in bytes."""
    size = PREFIX.size + len(stored_header) + len(index) + sections
    unsealed = PREFIX.pack(
        MAGIC, FORMAT_VERSION, 0, len(stored_header), plain_header, len(index), size, bytes(16)
    )[:_SEAL_OFFSET]
    return unsealed + _seal(unsealed, stored_header, index)


def unpack_prefix(data: bytes, size: int) -> Prefix:
    """Read the prefix of a file of `size` bytes, of which `data` are the first.

    What it returns is safe to act upon: every size has been compared with the file's and with the limits.

    Raises:
        FormatError: not a container. UnsupportedFormatError: of a newer version. CorruptionError: cut short.
    """
    _check_magic(data)
    if len(data) < PREFIX.size:
        raise CorruptionError(f"the container is cut short: {len(data)} bytes do not even hold its prefix")
    _, version, reserved, stored_header, plain_header, index, file, seal = PREFIX.unpack_from(data)
    if version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"the container has format version {version}, and this shrinkpoint reads version {FORMAT_VERSION}:"
            " upgrade with `pip install -U shrinkpoint`"
        )
    if version != FORMAT_VERSION:
        raise FormatError(f"the container says that it has format version {version}, which never existed")
    if reserved:
        raise UnsupportedFormatError(
            f"the container sets the reserved field {reserved:#x}: a newer shrinkpoint wrote it, or it is damaged"
        )
    prefix = Prefix(stored_header, plain_header, index, file, seal)
    if prefix.file != size:
        raise CorruptionError(f"the container has {size} bytes, and its prefix says {prefix.file}")
    if max(prefix.stored_header, prefix.plain_header) > MAX_HEADER_SIZE:
        raise FormatError(f"the container's header is larger than the limit of {MAX_HEADER_SIZE} bytes")
    if prefix.sections > size:
        raise FormatError("the container's header and index end behind the end of the file")
    return prefix


def check_seal(data: bytes, prefix: Prefix) -> None:
    """Check the first `prefix.sections` bytes of a file, which are `data`.

    Raises:
        CorruptionError: they are not those that were written.
    """
    if _seal(data[:_SEAL_OFFSET], data[PREFIX.size : prefix.sections]) != prefix.seal:
        raise CorruptionError("the checksum of the container's header does not match: the file is damaged")


def section_checksum(section: bytes | memoryview) -> bytes:
    """xxh3-64 in its canonical (big-endian) form."""
    digest = xxhash.xxh3_64()
    digest.update(section)  # the function for all at once keeps the interpreter's lock
    return digest.digest()


def dump_json(value: JSON) -> bytes:
    """JSON as a header holds it: ASCII, no blanks, members in the order of the dicts.

    Raises:
        ValueError: a float is not finite. TypeError: an object is not JSON.
    """
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def count_values(data: bytes) -> int:
    """Return an upper bound of the number of values in JSON, without parsing it."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def load_json(data: bytes) -> JSON:
    """Return the inverse of `dump_json`, for data from anywhere.

    Raises:
        FormatError: not JSON, nested too deeply, too many values, a number out of range, or one key twice in an
            object.
    """
    if count_values(data) > MAX_HEADER_VALUES:
        raise FormatError(f"the header holds more than {MAX_HEADER_VALUES} values")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_bounded_int,
            parse_float=_finite_float,
            parse_constant=_no_constant,
        )
    except RecursionError:
        raise FormatError("the header is nested too deeply") from None
    except ValueError as error:  # also malformed UTF-8
        raise FormatError(f"the header is not JSON: {error}") from error


def decompress_header(stored: bytes, plain_size: int) -> bytes:
    """Return the plain header.

    Args:
        stored: one zstd frame.
        plain_size: bytes that the prefix promises, within `MAX_HEADER_SIZE`.

    Raises:
        FormatError: not such a frame.
    """
    try:
        # First what the frame says it needs: the decompressor takes that much memory before it looks further.
        if zstandard.frame_content_size(stored) != plain_size:
            raise FormatError("the header's zstd frame does not have the size that the prefix says")
        plain: bytes = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"the header is not a zstd frame: {error}") from error
    if len(plain) != plain_size:
        raise FormatError(f"the header has {len(plain)} bytes, and the prefix says {plain_size}")
    return plain


def check_features(features: JSON) -> None:
    """Refuse what this code cannot read.

    Args:
        features: the header's ``features``: names, each with the first version of shrinkpoint that reads it.

    Raises:
        UnsupportedFormatError: names the missing features and the version to install.
    """
    if type(features) is not dict or any(type(since) is not str for since in features.values()):
        raise FormatError(f"the header's features are not an object of strings: {features!r}")
    missing = {name: since for name, since in features.items() if name not in FEATURES}
    if missing:
        needs = ", ".join(f"{name!r} (shrinkpoint {since} or newer)" for name, since in missing.items())
        raise UnsupportedFormatError(
            f"the container needs {needs}: upgrade with `pip install -U shrinkpoint`"
        )


def split_index(index: bytes, counts: Iterator[int]) -> Iterator[tuple[str, tuple[bytes, ...]]]:
    """Return the tensor digest and the section checksums of each tensor, from their numbers of sections."""
    at = 0
    for count in counts:
        sums = at + DIGEST_SIZE
        end = sums + 8 * count
        yield index[at:sums].hex(), tuple(index[i : i + 8] for i in range(sums, end, 8))
        at = end


def _check_magic(data: bytes) -> None:
    if data.startswith(MAGIC):
        return
    start = bytes(data[:8])
    if start and MAGIC.startswith(start):
        raise CorruptionError(f"the container is cut short: it has {len(start)} bytes")
    if b"SHR" in start[:4]:
        raise CorruptionError(
            "the container was damaged by a transfer in text mode; copy it again in binary mode"
        )
    raise FormatError(
        f"not a shrinkpoint container: it starts with {start!r}. Give a file of shrinkpoint.save or a run's *.shrink;"
        " those of torch.save are for torch.load, and for `shrinkpoint try` and `import`"
    )


def _seal(*parts: bytes) -> bytes:
    seal = xxhash.xxh3_128()
    for part in parts:
        seal.update(part)
    return seal.digest()


def _is_digest(value: object) -> bool:
    return type(value) is str and len(value) == 2 * DIGEST_SIZE and _HEX.issuperset(value)


def _unique(pairs: list[tuple[str, JSON]]) -> Mapping[str, JSON]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise FormatError("an object in the header has one key twice")
    return members


def _bounded_int(text: str) -> int:
    if len(text) > 20 or (value := int(text)) not in _INT64:
        raise FormatError(f"the integer {text[:24]} in the header does not fit in 64 bits")
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"the number {text[:24]} in the header is out of range")
    return value


def _no_constant(text: str) -> JSON:
    raise FormatError(f"{text} is not a number that JSON allows")
