"""The manifest: the small sealed record whose appearance commits a checkpoint."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from shrinkpoint.errors import ConfigError, CorruptionError, FormatError, UnsupportedFormatError
from shrinkpoint.store.keys import MAX_SEQ, MAX_STEP, check_data_key, is_session

FORMAT = 1
PARTS = "parts"
"""The feature of a run whose checkpoints have several containers each (`Head`)."""
READER_FEATURES: tuple[str, ...] = (PARTS,)
"""Additions to `FORMAT` that this version reads; a manifest lists those that it needs."""
MAX_MANIFEST_BYTES = 2**20
MAX_CHAIN = 1024
_MAX_INT = 2**63 - 1
_MAGIC = "shrinkpoint-manifest"
_HEAD_MAGIC = "shrinkpoint-parts"
_HEX = frozenset("0123456789abcdef")
_SEAL_BYTES = 66  # newline, 64 hexadecimal digits, newline


def seal(record: Mapping[str, Any]) -> bytes:
    """Canonical JSON of ``record``, and one line with its SHA-256.

    Raises:
        FormatError: A value is not JSON, or not finite.
    """
    try:
        body = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"cannot be written as JSON: {error}") from error
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """Return the record that :func:`seal` wrote; nothing is parsed before size and checksum are right.

    Raises:
        CorruptionError: The checksum does not match.
        FormatError: Too long, or not a JSON object.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{what} has {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are allowed")
    body, line = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if line != b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise CorruptionError(
            f"{what} does not match its checksum: it is damaged, cut short, or something else"
        )
    try:
        record = json.loads(
            body, parse_constant=_refuse_constant, parse_int=_bounded_int, parse_float=_finite_float
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise FormatError(f"{what} is not a JSON object")
    return record


def is_sealed(data: bytes) -> bool:
    """Return whether `unseal` reads these bytes."""
    try:
        unseal(data, "a record")
    except FormatError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _bounded_int(text: str) -> int:
    """Larger ones overflow wherever they meet a float, long after this."""
    if len(text) > 20 or not -_MAX_INT - 1 <= (value := int(text)) <= _MAX_INT:
        raise ValueError(f"the integer {text[:24]} does not fit in 64 bits")
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:24]} is out of range")
    return value


@dataclass(frozen=True, kw_only=True)
class BlobRef:
    """One stored object: its key below the run's prefix, its length in bytes and the SHA-256 of its bytes.

    It is a container; or, where `parts` is not 0, the head of so many containers (`Head`).
    """

    key: str
    size: int
    sha256: str
    parts: int = 0
    parts_bytes: int = 0
    """Size of these containers together."""

    def __post_init__(self) -> None:
        _check(isinstance(self.key, str), "key", self.key, "text")
        check_data_key(self.key)
        _check_int("size", self.size, 0, _MAX_INT)
        _check_hex("sha256", self.sha256)
        _check_int("parts", self.parts, 0, _MAX_INT)
        _check_int("parts_bytes", self.parts_bytes, 0, _MAX_INT)

    @property
    def total(self) -> int:
        """Bytes of the checkpoint's own containers, and of their head if they have one."""
        return self.size + self.parts_bytes

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest or head."""
        own: dict[str, Any] = {name: getattr(self, name) for name in _REF_FIELDS}
        return own | ({name: getattr(self, name) for name in _PARTS_FIELDS} if self.parts else {})

    @classmethod
    def from_json(cls, node: Mapping[str, Any]) -> "BlobRef":
        """Read what `to_json` gave.

        Raises:
            KeyError, TypeError: a field is missing, or it is no object. FormatError: a field is out of its range.
        """
        more = {name: node[name] for name in _PARTS_FIELDS} if "parts" in node else {}
        return cls(**{name: node[name] for name in _REF_FIELDS}, **more)

    def verify(self, data: bytes, shown: str) -> bytes:
        """``data``, or a CorruptionError unless it is what was written; ``shown`` names it in the message."""
        if len(data) != self.size:
            raise CorruptionError(f"{shown} has {len(data)} bytes instead of {self.size}")
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CorruptionError(f"{shown} does not match its checksum: the stored bytes are damaged")
        return data


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One committed checkpoint.

    Attributes:
        seq: Number of this manifest in its run; from 0.
        epoch: Number of the writer's turn in its run; a later writer has a higher one. Newest is highest (epoch, seq).
        session: Nonce of the writer.
        step: Training step.
        kind: ``"base"``: readable alone; ``"delta"``: needs the whole chain.
        chain: The containers that a restore reads: the base first, this checkpoint's own last. Those that an anchor makes
            unnecessary are left out.
        parent_digest: ``digest`` of the manifest that this delta builds on; None for a base.
        state_digest: Digest of the decoded state; opaque here.
        format: Version of this record.
        reader_features: What a reader must know beyond ``format``.
        wall_time: Writer's clock, seconds since 1970; for people only.
        library: Name and version of what wrote it.
        meta: Free JSON: metrics, sizes, degradation, seconds.
        replaces: (epoch, seq) of the checkpoint whose place among the others this one takes, with the same state
            (compaction) or its weights alone; None for every other.

    Raises:
        UnsupportedFormatError: A newer version or an unknown feature.
        FormatError: Any other field is out of its range.

    Examples:
        >>> manifest = shrinkpoint.Saver("runs/7").store.manifests()[0]
        >>> manifest.step, manifest.kind, len(manifest.chain)
        (3000, 'delta', 3)
        >>> manifest.meta["save"]["metrics"]["val_loss"] < 1
        True
    """

    seq: int
    epoch: int
    session: str
    step: int
    kind: Literal["base", "delta"]
    chain: tuple[BlobRef, ...]
    parent_digest: str | None
    state_digest: str
    format: int = FORMAT
    reader_features: tuple[str, ...] = ()
    wall_time: float
    library: str
    meta: dict[str, Any] = field(default_factory=dict, hash=False)
    replaces: tuple[int, int] | None = None
    # The very bytes it was read from: a field that only a newer version knows still counts for the digest.
    _raw: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_version(self.format, self.reader_features, self.library)
        _check_int("seq", self.seq, 0, MAX_SEQ)
        _check_int("epoch", self.epoch, 1, _MAX_INT)
        is_nonce = isinstance(self.session, str) and is_session(self.session)
        _check(is_nonce, "session", self.session, "16 hex digits")
        _check_int("step", self.step, 0, MAX_STEP)
        _check(self.kind in ("base", "delta"), "kind", self.kind, "'base' or 'delta'")
        self._check_chain()
        for name in ("state_digest", "library"):
            text = getattr(self, name)
            _check(isinstance(text, str) and len(text) <= 256, name, "...", "short text")
        # A comparison, which integers of any size stand, and NaN fails.
        is_time = type(self.wall_time) in (float, int) and abs(self.wall_time) <= _MAX_INT
        _check(is_time, "wall_time", self.wall_time, "finite seconds")
        _check(isinstance(self.meta, dict), "meta", self.meta, "a JSON object")
        if self.replaces is not None:
            _check(len(self.replaces) == 2, "replaces", self.replaces, "epoch and seq")
            _check_int("replaces.epoch", self.replaces[0], 1, self.epoch)
            _check_int("replaces.seq", self.replaces[1], 0, MAX_SEQ)

    def _check_chain(self) -> None:
        _check(1 <= len(self.chain) <= MAX_CHAIN, "chain length", len(self.chain), f"1 to {MAX_CHAIN}")
        features, expected = self.reader_features, f"{PARTS!r} among them, as the chain has heads"
        _check(PARTS in features or not self.has_parts, "reader_features", features, expected)
        keys = [ref.key for ref in self.chain]
        _check(len(set(keys)) == len(keys), "chain", keys, "different keys")
        own = f"data/{self.step:012d}-{self.session}-"
        _check(keys[-1].startswith(own), "last key of the chain", keys[-1], f"one that begins with {own}")
        if self.kind == "base":
            _check(len(keys) == 1, "chain length of a base", len(keys), "1")
            _check(self.parent_digest is None, "parent_digest of a base", self.parent_digest, "absent")
        else:
            _check(len(keys) >= 2, "chain length of a delta", len(keys), "2 or more")
            _check_hex("parent_digest", self.parent_digest)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, seq) by which the run's checkpoints are ordered; the highest is what a run resumes from."""
        return self.replaces or (self.epoch, self.seq)

    @property
    def digest(self) -> str:
        """SHA-256 of the record, as its last line says; what a delta names as its parent."""
        return self.to_bytes()[-_SEAL_BYTES + 1 : -1].decode("ascii")

    @property
    def stored_bytes(self) -> int:
        """Bytes to read for a restore: the whole chain."""
        return sum(ref.total for ref in self.chain)

    @property
    def has_parts(self) -> bool:
        """Whether reading it takes heads (`Head`)."""
        return any(ref.parts for ref in self.chain)

    def to_bytes(self) -> bytes:
        """Return the stored form: the bytes it was read from, or canonical JSON with its checksum line.

        Raises:
            FormatError: ``meta`` is not finite JSON, or the record is too long.
        """
        if self._raw is not None:
            return self._raw
        record = {name: getattr(self, name) for name in _FIELDS}
        if self.replaces is not None:
            record["replaces"] = self.replaces
        record["chain"] = [ref.to_json() for ref in self.chain]
        try:
            data = seal({**record, "type": _MAGIC})
        except FormatError as error:
            raise FormatError(f"the checkpoint's meta {error}") from error
        if len(data) > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"the manifest has {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are allowed: put less in meta"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "manifest") -> "Manifest":
        """Read what :meth:`to_bytes` wrote; unknown fields are ignored. ``what`` names it in messages.

        Raises:
            CorruptionError: The checksum does not match.
            UnsupportedFormatError: It needs a newer version.
            FormatError: It is not a manifest, or a field is out of its range.
        """
        record = unseal(data, what)
        if record.get("type") != _MAGIC:
            raise FormatError(f"{what} is not a manifest")
        try:
            # Before the rest: another version may have other fields.
            features = tuple(_list(record["reader_features"]))
            _check_version(record["format"], features, record.get("library"))
            values: dict[str, Any] = {name: record[name] for name in _FIELDS}
            values["reader_features"] = features
            values["chain"] = tuple(BlobRef.from_json(ref) for ref in _list(record["chain"]))
            if record.get("replaces") is not None:
                values["replaces"] = tuple(_list(record["replaces"]))
            manifest = cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{what} lacks a field or has one of the wrong type: {error}") from error
        except FormatError as error:
            raise type(error)(f"{what}: {error}") from error
        object.__setattr__(manifest, "_raw", bytes(data))
        return manifest


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
    """The sealed table of the parts that several ranks have written of one checkpoint, in their order.

    A manifest's chain names heads, so that its size does not depend on the number of ranks. The head is put after all parts
    and before the manifest.

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
        """Return the stored form: a sealed record (docs/store.md).

        Raises:
            ConfigError: there are more parts than a record may name.
        """
        parts = [part.ref.to_json() | {"state_digest": part.state_digest} for part in self.parts]
        data = seal({"type": _HEAD_MAGIC, "step": self.step, "parts": parts})
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
        if record.get("type") != _HEAD_MAGIC:
            raise FormatError(f"{what} is not the head of a checkpoint")
        try:
            nodes = record["parts"]
            parts = (Part(ref=BlobRef.from_json(node), state_digest=node["state_digest"]) for node in nodes)
            return cls(step=record["step"], parts=tuple(parts))
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{what} lacks a field or has one of the wrong type: {error}") from error


@dataclass(frozen=True)
class Anchor:
    """A checkpoint that later ones can build on without those in between.

    Attributes:
        containers: How many containers of a chain it needs, from the base to its own.
        digest: `Manifest.digest` of its manifest, which may have been removed since.
    """

    containers: int
    digest: str


_REF_FIELDS = ("key", "size", "sha256")
_PARTS_FIELDS = ("parts", "parts_bytes")
_FIELDS = tuple(each.name for each in fields(Manifest) if each.init and each.name != "replaces")


def _check_version(version: object, features: object, library: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"format={version!r:.200}: expected an integer from 1")
    if not isinstance(features, tuple) or not all(isinstance(name, str) for name in features):
        raise FormatError(f"reader_features={features!r:.200}: expected a list of names")
    unknown = sorted(set(features) - set(READER_FEATURES))
    if version > FORMAT or unknown:
        needs = f"features {unknown}" if unknown else f"format {version}, this version reads {FORMAT}"
        raise UnsupportedFormatError(f"written by {library!r:.100}, needs {needs}: upgrade shrinkpoint")


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{value!r:.200}: expected a list")
    return value


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise FormatError(f"{name}={value!r:.200}: expected {expected}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _check(ok, name, value, f"an integer from {low} to {high}")


def _check_hex(name: str, value: object) -> None:
    ok = isinstance(value, str) and len(value) == 64 and _HEX.issuperset(value)
    _check(ok, name, value, "64 hexadecimal digits")
