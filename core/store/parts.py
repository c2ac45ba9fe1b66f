"""The head of a checkpoint that several ranks have written: the sealed table of its parts, one container each.

A manifest's chain names heads, so that its size does not depend on the number of ranks. The head is put after all parts
and before the manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shrinkpoint.errors import ConfigError, FormatError
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, BlobRef, seal, unseal

__all__ = ["Head", "Part"]

_MAGIC = "shrinkpoint-parts"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's container, and the digest of the tensors in it."""

    ref: BlobRef
    state_digest: str

    def __post_init__(self) -> None:
        if self.ref.parts:
            raise FormatError(f"{self.ref.key} is a part, and cannot have parts")
        if not isinstance(self.state_digest, str) or len(self.state_digest) != 32:
            raise FormatError(f"state_digest={self.state_digest!r:.80}: expected 32 hexadecimal digits")


@dataclass(frozen=True, kw_only=True)
class Head:
    """All parts of one checkpoint, in the order of the ranks that wrote them.

    Raises:
        FormatError: there are none, or two are the same.
    """

    step: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        keys = {part.ref.key for part in self.parts}
        if not self.parts or len(keys) != len(self.parts):
            raise FormatError(f"a head of {len(self.parts)} parts with {len(keys)} keys")

    @property
    def state_digest(self) -> str:
        """Digest of the whole checkpoint: over the parts' digests, by their numbers."""
        from shrinkpoint.state.digest import state_digest  # torch, which listing a run does without

        return state_digest({str(number): part.state_digest for number, part in enumerate(self.parts)})

    @property
    def parts_bytes(self) -> int:
        """Size of all parts together."""
        return sum(part.ref.size for part in self.parts)

    def to_bytes(self) -> bytes:
        """The stored form: a sealed record (docs/store.md).

        Raises:
            ConfigError: there are more parts than a record may name.
        """
        parts = [part.ref.to_json() | {"state_digest": part.state_digest} for part in self.parts]
        data = seal({"type": _MAGIC, "step": self.step, "parts": parts})
        if len(data) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                f"a checkpoint of {len(self.parts)} parts needs a head of {len(data)} bytes, and {MAX_MANIFEST_BYTES} are allowed:"
                " save from fewer ranks"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Head":
        """Read what `to_bytes` wrote.

        Args:
            data: the bytes.
            what: names it in messages.

        Raises:
            CorruptionError: the checksum does not match. FormatError: it is not a head.
        """
        record = unseal(data, what)
        if record.get("type") != _MAGIC:
            raise FormatError(f"{what} is not the head of a checkpoint")
        try:
            return cls(step=record["step"], parts=tuple(map(_part, record["parts"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{what} lacks a field or has one of the wrong type: {error}") from error


def _part(node: Mapping[str, Any]) -> Part:
    return Part(ref=BlobRef.from_json(node), state_digest=node["state_digest"])
