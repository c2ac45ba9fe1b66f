"""Writes safetensors files piece by piece, in any order: the safetensors package takes all tensors of a file at once.

The format is https://github.com/huggingface/safetensors#format: eight bytes of length, a JSON header, the tensors' bytes.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import TensorSpec

__all__ = ["SafetensorsWriter", "check_file"]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class SafetensorsWriter:
    """One file, of which the tensors' names and sizes are known beforehand.

    Args:
        path: a new file.
        specs: by the tensors' names in the file; dtypes and shapes count.
        metadata: text by name.

    Raises:
        CannotRepresentError: the format has no such dtype.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._specs, self._at = specs, {}
        at = 0
        # as the package does: the largest elements first, so that each tensor is aligned
        for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
            spec = specs[name]
            if spec.dtype not in _NAMES:
                raise CannotRepresentError(
                    f"{name} is of {spec.dtype}, which safetensors does not know: export to .ckpt"
                )
            self._at[name] = at
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._path = path
        self._start = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self._start + at)

    def put(self, name: str, tensor: torch.Tensor, offset: Sequence[int] | None = None) -> None:
        """Write a tensor, or a box of it.

        Args:
            name: of the whole tensor.
            tensor: the whole one, or the box; on the host.
            offset: first index of the box in each dimension; None for a whole tensor.

        Raises:
            OSError: the file cannot be written.
        """
        spec = self._specs[name]
        at = self._start + self._at[name]
        if offset is not None and tuple(tensor.shape[1:]) != spec.shape[1:]:
            self._put_box(at, spec, tensor, offset)
            return
        if offset is not None:  # whole rows
            at += offset[0] * (spec.nbytes // spec.shape[0])
        self._file.seek(at)
        self._file.write(tensor_to_bytes(tensor).data)

    def _put_box(self, at: int, spec: TensorSpec, tensor: torch.Tensor, offset: Sequence[int]) -> None:
        self._file.flush()
        place = np.memmap(self._path, dtype=np.uint8, mode="r+", offset=at, shape=(spec.nbytes,))
        size = spec.dtype.itemsize
        inner = place.reshape(*spec.shape, size)
        cut = tuple(slice(low, low + n) for low, n in zip(offset, tensor.shape, strict=True))
        inner[cut] = tensor_to_bytes(tensor).reshape(*tensor.shape, size)
        place.flush()

    def close(self) -> None:
        """Write out what is buffered.

        Raises:
            OSError: the file cannot be written.
        """
        self._file.close()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_file(path: Path) -> None:
    """Let the safetensors package read the header of a written file.

    Raises:
        CannotRepresentError: it does not accept it.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise CannotRepresentError(
            f"safetensors does not accept this model ({error}): export to .ckpt"
        ) from error
