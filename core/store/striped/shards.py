"""One shard of a blob: its name, which gives the whole geometry, and its bytes, every MiB of which has a checksum."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.memory import join_bytes
from shrinkpoint.store.keys import is_data_key
from shrinkpoint.store.striped.parity import MAX_PARITY, Shard, parity_of

BLOCK = 2**20
"""Bytes of a shard that one checksum stands for, and that are rebuilt at a time."""
MAX_STORES = 32
"""Most stores that a set may have."""

_SUM = 16
_MAX_LENGTH = 2**63 - 1
_SUFFIX = re.compile(
    r"(?P<k>[1-9][0-9]{0,2})\+(?P<spare>0|[1-9][0-9]{0,2})\.(?P<place>0|[1-9][0-9]{0,2})\.(?P<length>0|[1-9][0-9]{0,18})"
)


@dataclass(frozen=True, order=True)
class Geometry:
    """How a blob was cut.

    Attributes:
        k: Data shards.
        spare: Further shards; any `k` of all are enough.
        length: Bytes of the blob.
    """

    k: int
    spare: int
    length: int

    def __post_init__(self) -> None:
        within = self.k >= 1 and self.spare >= 0 and self.k + self.spare <= MAX_STORES
        if not within or not 0 <= self.length <= _MAX_LENGTH or (self.k > 1 and self.spare > MAX_PARITY):
            raise FormatError(f"{self.k}+{self.spare} shards of {self.length} bytes are no geometry")

    @property
    def shards(self) -> int:
        """Data and spare."""
        return self.k + self.spare

    @property
    def shard_bytes(self) -> int:
        """Of the blob's bytes in each shard, the last one padded with zeros; whole words where there is parity."""
        if self.k == 1:
            return self.length
        return -(-self.length // (8 * self.k)) * 8

    @property
    def blocks(self) -> int:
        """Blocks of a shard, the last one mostly shorter."""
        return -(-self.shard_bytes // BLOCK)

    @property
    def header_bytes(self) -> int:
        """Checksums at the beginning of a shard's file: one of each block, and one of those and the name."""
        return _SUM * (self.blocks + 1)

    @property
    def file_bytes(self) -> int:
        """Size of a shard's file."""
        return self.header_bytes + self.shard_bytes


@dataclass(frozen=True)
class ShardName:
    """The key of a shard's file: ``<key>.<k>+<spare>.<place>.<length>``, the numbers without leading zeros.

    Attributes:
        key: The blob's.
        geometry: How it was cut.
        place: Which shard; data from 0, then parity.
    """

    key: str
    geometry: Geometry
    place: int

    @classmethod
    def parse(cls, text: str) -> "ShardName | None":
        """Return the name that `text` is; None for anything else, however similar."""
        key, _, rest = text.partition(".shrink.")
        match = _SUFFIX.fullmatch(rest)
        if match is None:
            return None
        k, spare, place, length = (int(match[name]) for name in ("k", "spare", "place", "length"))
        try:
            geometry = Geometry(k, spare, length)
        except FormatError:
            return None
        key = f"{key}.shrink"
        return cls(key, geometry, place) if is_data_key(key) and place < geometry.shards else None

    def __str__(self) -> str:
        cut = self.geometry
        return f"{self.key}.{cut.k}+{cut.spare}.{self.place}.{cut.length}"


def cut_data(geometry: Geometry, data: bytes) -> list[Shard]:
    """Return the data shards; only those that reach beyond the end are copied, to pad them with zeros."""
    size, flat = geometry.shard_bytes, np.frombuffer(data, np.uint8)
    if geometry.k == 1:
        return [flat]
    shards = []
    for start in range(0, size * geometry.k, size) if size else [0] * geometry.k:
        part = flat[start : start + size]
        if len(part) < size:
            part = np.concatenate([part, np.zeros(size - len(part), np.uint8)])
        shards.append(part)
    return shards


def encode_shard(name: ShardName, cut: Sequence[Shard]) -> bytes:
    """Make the file of one shard: the blocks' checksums, the seal on them, the bytes.

    Args:
        name: Of the shard.
        cut: The blob's data shards.
    """
    shard = cut[name.place] if name.place < len(cut) else parity_of(cut, name.place - len(cut))
    sums = b"".join(xxhash.xxh3_128(shard[i : i + BLOCK].data).digest() for i in range(0, len(shard), BLOCK))
    parts = sums, _seal(name, sums), shard.data
    return join_bytes(parts, sum(map(len, parts)))


def block_sums(name: ShardName, header: bytes) -> list[bytes]:
    """Return the blocks' checksums out of a shard's header.

    Raises:
        CorruptionError: It is not the header of this very shard.
    """
    sums, seal = header[:-_SUM], header[-_SUM:]
    if len(header) != name.geometry.header_bytes or seal != _seal(name, sums):
        raise CorruptionError(f"{name} does not match its checksum: it is damaged, or another file")
    return [sums[i : i + _SUM] for i in range(0, len(sums), _SUM)]


def sound_blocks(sums: Sequence[bytes], blocks: bytes | memoryview) -> list[Shard | None]:
    """Consecutive blocks of a shard as arrays, None in place of one that does not match its checksum."""
    view = memoryview(blocks)
    result: list[Shard | None] = []
    for number, wanted in enumerate(sums):
        block = view[number * BLOCK : (number + 1) * BLOCK]
        sound = xxhash.xxh3_128(block).digest() == wanted
        result.append(np.frombuffer(block, np.uint8) if sound else None)
    return result


def _seal(name: ShardName, sums: bytes) -> bytes:
    # With the name in it, a shard that was renamed, or copied from another blob, is none.
    return xxhash.xxh3_128_digest(str(name).encode() + b"\n" + sums)
