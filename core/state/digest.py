"""Digests of decoded tensors: they detect a wrong reference or a faulty codec, which checksums of stored bytes
cannot."""

from collections.abc import Mapping

import torch
import xxhash

from shrinkpoint.state.dtypes import dtype_name, tensor_to_bytes

__all__ = ["state_digest", "tensor_digest"]


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128, in hexadecimal, of a host tensor's dtype, shape and little-endian bytes."""
    digest = xxhash.xxh3_128(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    digest.update(tensor_to_bytes(tensor).data)
    return digest.hexdigest()


def state_digest(tensor_digests: Mapping[str, str]) -> str:
    """Return one digest for a whole state, from its tensors' names and digests in the container's order."""
    digest = xxhash.xxh3_128()
    for name, value in tensor_digests.items():
        digest.update(f"{len(name)}:{name}{value}".encode())
    return digest.hexdigest()
