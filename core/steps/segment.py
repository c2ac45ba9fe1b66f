"""The file of some logged steps: prefix, JSON, tensors; no pickle (core/steps/FORMAT.md).

Every segment names its writer and its predecessor, so that files that are truncated, damaged, exchanged, copied, or of
another run or writer are detected before anything of them is used. Tensors are raw little-endian elements; the sizes that
a file declares are checked against its length before anything is decoded.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
import xxhash

from shrinkpoint.arrays import UInt8s
from shrinkpoint.container.layout import (
    MAX_HEADER_SIZE,
    MAX_HEADER_VALUES,
    check_features,
    count_values,
    dump_json,
    load_json,
)
from shrinkpoint.errors import CannotRepresentError, CorruptionError, FormatError, UnsupportedFormatError
from shrinkpoint.runtime.memory import join_bytes
from shrinkpoint.state.dtypes import dtype_from_name, dtype_name, tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.tree import JSON, Path

_MAGIC = b"\x89SPL\r\n\x1a\n"
_VERSION = 1
PREFIX = struct.Struct("<8sIIQQ16s16s16s")
"""Magic, version, reserved, bytes of the header, bytes of the payload, the payload's xxh3-128, the seal of the segment before,
and the seal: xxh3-128 of all of this before it, and of the header."""

_SEAL_AT = PREFIX.size - 16
_HEX = frozenset("0123456789abcdef")
_KEY = re.compile(r"([0-9]{8})-([0-9a-f]{16})-([0-9]{10})\.steps")
_HEADER = (
    "features", "run", "kind", "key", "begin", "end", "inherits", "layout", "provenance", "records", "tensors",
)  # fmt: skip
_MAX_DIMS = 64
_MAX_NUMEL = 2**48

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
        """Return the key of a file's name; None if the name is not a key."""
        match = _KEY.fullmatch(text)
        return Key(int(match[1]), match[2], int(match[3])) if match else None


@dataclass(frozen=True)
class Place:
    """A state of the training: its step and its digest."""

    step: int
    """Training steps done."""
    digest: str
    """`shrinkpoint.steps.fingerprint` of the state; of a small log, `ReadersWeights.digest`."""

    @staticmethod
    def from_json(node: JSON) -> "Place":
        """Read it from a header.

        Raises:
            FormatError: it is none.
        """
        step, digest = _members(node, "step", "digest")
        if type(step) is not int or not 0 <= step < 2**63 or not _is_hex(digest, 32):
            raise FormatError(f"{str(node)[:80]!r} is not a step with a digest")
        return Place(step, digest)


@dataclass(frozen=True)
class Reference:
    """A reference to a segment, which is not the first one of its writer."""

    key: Key
    seal: str
    """In hexadecimal."""
    begin: Place
    end: Place

    def to_json(self) -> JSON:
        """Give it in the form of a header."""
        return {**asdict(self), "key": str(self.key)}

    @staticmethod
    def from_json(node: JSON) -> "Reference":
        """Read it from a header.

        Raises:
            FormatError: it is none.
        """
        key, seal, begin, end = _members(node, "key", "seal", "begin", "end")
        parsed = Key.parse(key) if isinstance(key, str) else None
        if parsed is None or parsed.number == 0 or not _is_hex(seal, 32):
            raise FormatError(f"{str(node)[:80]!r} does not refer to a segment")
        return Reference(parsed, seal, Place.from_json(begin), Place.from_json(end))


def _members(node: JSON, *names: str) -> list[JSON]:
    if not isinstance(node, Mapping) or not all(name in node for name in names):
        raise FormatError(f"{str(node)[:80]!r} has not the members {', '.join(names)}")
    return [node[name] for name in names]


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
    """Make the file of a segment: its bytes, and its seal.

    Args:
        head: all but the seal.
        parts: the tensors' bytes, in the order of ``head.tensors``.

    Raises:
        CannotRepresentError: the records do not fit in a header.
    """
    try:
        places = (None if place is None else asdict(place) for place in (head.begin, head.end))
        inherits = [reference.to_json() for reference in head.inherits]
        own = head.layout, head.provenance, list(head.records), list(head.tensors)
        values = {}, head.run, head.kind, str(head.key), *places, inherits, *own
        header = dump_json(dict(zip(_HEADER, values, strict=True)))
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
        _MAGIC, _VERSION, 0, len(header), nbytes, digest.digest(), bytes.fromhex(head.previous), bytes(16)
    )[:_SEAL_AT]
    seal = xxhash.xxh3_128(unsealed + header).digest()
    first = unsealed + seal + header
    return join_bytes([first, *parts], len(first) + nbytes), seal.hex()


def header_end(data: bytes, size: int) -> int:
    """Read where the header ends, from the first `PREFIX.size` bytes of a file of `size` bytes; it is safe to act upon.

    Raises:
        FormatError: not a segment. UnsupportedFormatError: of a newer version. CorruptionError: cut short.
    """
    if not data.startswith(_MAGIC):
        raise FormatError(f"not a segment of a step log: it starts with {bytes(data[:8])!r}")
    if len(data) < PREFIX.size:
        raise CorruptionError(f"cut short: {len(data)} bytes do not contain the prefix of a segment")
    _, version, reserved, header, payload, *_ = PREFIX.unpack_from(data)
    if version != _VERSION or reserved:
        raise UnsupportedFormatError(
            f"a step log of version {version} (reserved field {reserved:#x}), and this shrinkpoint reads {_VERSION}: upgrade it"
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
    """Read a segment of some key and run without its tensors, from the file's first bytes, up to `header_end` at least, and its size.

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
    _members(node, *_HEADER)
    check_features(node["features"])
    if node["run"] != run:
        raise ForeignSegmentError("it belongs to another run")
    if node["key"] != str(key):
        raise ForeignSegmentError(f"it is the segment {str(node['key'])[:60]!r} under another name")
    begin, end = (None if node[name] is None else Place.from_json(node[name]) for name in ("begin", "end"))
    if node["kind"] not in get_args(Kind) or not all(
        isinstance(node[name], list) for name in ("inherits", "records", "tensors")
    ):
        raise FormatError("its header is malformed")
    if (begin is None or end is None) != (key.number == 0) or (key.number == 0 and node["records"]):
        raise FormatError("a writer's first segment has no steps, and every other has a beginning and an end")
    if begin is not None and end is not None and begin.step > end.step:
        raise FormatError(f"it goes from step {begin.step} back to {end.step}")
    return Head(
        run=run,
        key=key,
        begin=begin,
        end=end,
        inherits=tuple(map(Reference.from_json, node["inherits"])),
        previous=previous.hex(),
        seal=seal.hex(),
        payload_digest=digest,
        **{name: node[name] for name in ("kind", "records", "tensors", "layout", "provenance")},
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


# ---- the tensors of a segment


class TensorTable:
    """Collects the tensors of a segment; JSON refers to them by their numbers."""

    def __init__(self) -> None:
        self.specs: list[JSON] = []
        """``[dtype, shape]`` of each."""
        self.parts: list[memoryview] = []
        """Their bytes."""

    def add(self, tensor: torch.Tensor) -> int:
        """Take a host tensor; its bytes are not copied."""
        return self._add(dtype_name(tensor.dtype), list(tensor.shape), tensor_to_bytes(tensor))

    def add_array(self, array: np.ndarray[Any, Any]) -> int:
        """Add an array of integers."""
        return self._add(array.dtype.name, [array.size], np.ascontiguousarray(array).view(np.uint8))

    def put(self, path: Path, tensor: torch.Tensor) -> str:
        """For `encode_tree`."""
        return str(self.add(tensor.detach().cpu()))

    def _add(self, dtype: str, shape: list[int], data: UInt8s) -> int:
        self.specs.append([dtype, shape])
        self.parts.append(data.data)
        return len(self.specs) - 1


class Tensors:
    """The tensors of a segment that was read, from the specs that `TensorTable` has collected and their bytes.

    Raises:
        FormatError: they do not take exactly these bytes.
    """

    def __init__(self, specs: JSON, payload: memoryview) -> None:
        if not isinstance(specs, list):
            raise FormatError("a segment's tensors are not a list")
        self._specs = [checked_spec(spec) for spec in specs]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in self._specs]
        ends = np.cumsum([0, *sizes], dtype=object).tolist()
        if ends[-1] != len(payload):
            raise FormatError(f"a segment's tensors take {ends[-1]} bytes, and it has {len(payload)}")
        self._ends: list[int] = ends
        self._payload = payload

    def raw(self, number: JSON) -> tuple[torch.dtype, tuple[int, ...], UInt8s]:
        """Give dtype, shape and bytes of the tensor of this number.

        Raises:
            FormatError: there is none.
        """
        if type(number) is not int or not 0 <= number < len(self._specs):
            raise FormatError(f"a segment refers to tensor {str(number)[:40]}, and has {len(self._specs)}")
        data = self._payload[self._ends[number] : self._ends[number + 1]]
        return *self._specs[number], np.frombuffer(data, dtype=np.uint8)

    def __call__(self, number: JSON) -> torch.Tensor:
        """Give the tensor of this number, in memory of its own; raises as `raw`."""
        dtype, shape, data = self.raw(number)
        # torch aligns memory of its own: elsewhere some kernels may sum in another order
        owned: UInt8s = torch.empty(data.size, dtype=torch.uint8).numpy()
        owned[:] = data
        return tensor_from_bytes(owned, dtype, shape)

    def named(self, name: str) -> torch.Tensor:
        """For `decode_tree`, whose names are the numbers in decimal."""
        if not (isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 10):
            raise FormatError(f"a segment refers to a tensor as {str(name)[:40]!r}")
        return self(int(name))


def checked_spec(spec: JSON) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of a tensor that a file declares.

    Raises:
        FormatError: it is none, or has too many elements.
    """
    try:
        name, shape = spec
    except (TypeError, ValueError):
        raise FormatError(f"{str(spec)[:80]} is not a dtype with a shape") from None
    if type(shape) is not list or len(shape) > _MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError(f"{str(shape)[:80]} is not a shape")
    if any(n > _MAX_NUMEL for n in shape) or math.prod(n or 1 for n in shape) > _MAX_NUMEL:
        raise FormatError(f"the shape {str(shape)[:80]} has too many elements")
    return dtype_from_name(name), tuple(shape)
