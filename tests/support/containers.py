"""Checkpoints without a scheme: every tensor as its own bytes, so that the container is tested alone."""

import json
import struct
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard

from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import Describe, TrainingState, plain

PREFIX_SIZE = 64
MAGIC = b"\x89SHR\r\n\x1a\n"


def store_raw(
    obj: object,
    *,
    step: int = 0,
    parent: str | None = None,
    describe: Describe = plain,
    uses_reference: bool = False,
) -> Checkpoint:
    """A checkpoint of any state, with the bytes of each tensor split over two sections."""
    state = TrainingState.capture(obj, describe)
    entries = []
    for name, tensor in state.tensors.items():
        data = tensor_to_bytes(tensor).tobytes()
        half = len(data) // 2
        sections = {"head": data[:half], "tail": data[half:]}
        encoded = EncodedTensor("test.raw", {"half": half}, sections, uses_reference)
        entries.append(Entry(state.specs[name], encoded, tensor_digest(tensor)))
    kind = "base" if parent is None else "delta"
    return Checkpoint(
        kind=kind,
        step=step,
        tree=state.tree,
        entries=tuple(entries),
        scheme={"name": "raw"},
        parent=parent,
        provenance={"library": "0.1.0"},
    )


def load_raw(checkpoint: Checkpoint) -> Any:
    """The state that `store_raw` was given."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in checkpoint.entries:
        data = np.frombuffer(b"".join(entry.encoded.sections.values()), dtype=np.uint8)
        tensors[entry.spec.name] = tensor_from_bytes(data, entry.spec.dtype, entry.spec.shape)
    specs = {entry.spec.name: entry.spec for entry in checkpoint.entries}
    return TrainingState(checkpoint.tree, tensors, specs).to_object()


def take_apart(data: bytes) -> tuple[Any, bytes, bytes]:
    """Header, index and sections of a sound file, by nothing but docs/format.md."""
    stored, plain_size, index_size, size = struct.unpack_from("<4Q", data, 16)
    assert size == len(data)
    header_end = PREFIX_SIZE + stored
    header = zstandard.ZstdDecompressor().decompress(data[PREFIX_SIZE:header_end])
    assert len(header) == plain_size
    return json.loads(header), data[header_end : header_end + index_size], data[header_end + index_size :]


def assemble(
    header: Any,
    index: bytes,
    sections: bytes,
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    reserved: int = 0,
    stored: bytes | None = None,
    plain_size: int | None = None,
    stored_size: int | None = None,
    index_size: int | None = None,
    file_size: int | None = None,
) -> bytes:
    """A file with a valid seal around anything; sizes that are given replace the true ones in the prefix."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    if stored is None:
        stored = zstandard.ZstdCompressor(level=9).compress(text)
    sizes = (
        len(stored) if stored_size is None else stored_size,
        len(text) if plain_size is None else plain_size,
        len(index) if index_size is None else index_size,
        PREFIX_SIZE + len(stored) + len(index) + len(sections) if file_size is None else file_size,
    )
    unsealed = magic + struct.pack("<2I4Q", version, reserved, *sizes)
    seal = xxhash.xxh3_128(unsealed + stored + index).digest()
    return unsealed + seal + stored + index + sections


def identical(left: Any, right: Any) -> bool:
    """Whether two states are the same down to types and bits; NaNs equal themselves, minus zero is not zero."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return _identical_tensors(left, right)
    if isinstance(left, (np.ndarray, np.generic)):
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(identical(a, b) for a, b in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)
    if hasattr(left, "__dict__") and vars(left):
        return identical(vars(left), vars(right))
    return bool(left == right)


def _identical_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.layout == torch.sparse_coo:
        parts = (left._indices(), right._indices()), (left._values(), right._values())
        return left.is_coalesced() == right.is_coalesced() and all(_identical_tensors(a, b) for a, b in parts)
    if left.layout == torch.sparse_csr:
        parts = (left.crow_indices(), right.crow_indices()), (left.col_indices(), right.col_indices())
        return all(_identical_tensors(a, b) for a, b in (*parts, (left.values(), right.values())))
    return bool((tensor_to_bytes(left) == tensor_to_bytes(right)).all())
