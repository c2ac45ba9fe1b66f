"""Quantized weight updates in a closed loop: after each record, a reader's weights are close to the training's.

The encoder quantizes the difference between the weights and what a reader has, and advances the reader's values by the
reader's own arithmetic. So errors do not accumulate: they stay within half a quantization step, whatever the optimizer does,
and the error of a lossy checkpoint that the log starts from disappears.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from xxhash import xxh3_128

from shrinkpoint.arrays import Float32s, UInt8s, widened
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols
from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.fingerprint import combined
from shrinkpoint.steps.layout import Layout
from shrinkpoint.steps.record import Tensors, TensorTable

__all__ = ["ReadersWeights", "encode_updates", "symbols_together"]

_GROUPED = 1 << 14  # symbols: below, a larger alphabet's table costs more than it saves
_LARGEST_SYMBOL = 254


class ReadersWeights:
    """The weights that a reader of the log has after some record.

    Args:
        layout: of the model.
        base: the tensors that a reader of a checkpoint has, by their names in the model; copied.

    Raises:
        FormatError: a tensor is missing, or has another shape or dtype.
    """

    def __init__(self, layout: Layout, base: Mapping[str, torch.Tensor]) -> None:
        name = layout.differing(base)
        if name is not None:
            raise FormatError(
                f"the checkpoint has no tensor {name!r} of the shape and dtype that the log has"
            )
        self.layout = layout
        self._read: list[Float32s] = [widened(base[s.name]).copy() for s in layout.coded]
        self._exact: list[UInt8s] = [
            tensor_to_bytes(base[s.name].detach().cpu()).reshape(-1).copy() for s in layout.exact
        ]

    def digest(self) -> str:
        """xxh3-128 of all tensors: 32 hexadecimal digits (docs/steps.md, "The small log")."""
        arrays: list[Float32s | UInt8s] = [*self._read, *self._exact]
        names = [spec.name for spec in (*self.layout.coded, *self.layout.exact)]
        return combined(
            {name: xxh3_128(array.data).hexdigest() for name, array in zip(names, arrays, strict=True)}
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the weights, for ``model.load_state_dict``; tied tensors share their memory."""
        found = {
            spec.name: torch.from_numpy(array.copy()).to(spec.dtype).reshape(spec.shape)
            for spec, array in zip(self.layout.coded, self._read, strict=True)
        }
        for spec, data in zip(self.layout.exact, self._exact, strict=True):
            found[spec.name] = tensor_from_bytes(data.copy(), spec.dtype, spec.shape)
        return found | {alias: found[name] for alias, name in self.layout.aliases.items()}

    def quantize(self, index: int, weights: Float32s, scale: float) -> tuple[bytes, int, int]:
        """Quantize one coded tensor's update, and advance the reader's values.

        Args:
            index: its place in the layout.
            weights: its present values.
            scale: the quantization step, a single-precision number; 0 leaves the tensor unchanged.

        Returns:
            The payload, the largest symbol, and the number of weights that are not finite.
        """
        from shrinkpoint.steps import update_kernels as kernels  # numba

        if not scale:
            return b"", 0, 0
        symbols = np.empty(weights.size, dtype=np.uint8)
        step = np.float32(scale)
        largest, strange = kernels.quantize(weights, self._read[index], np.float32(1) / step, step, symbols)
        alphabet = largest + 1
        together = symbols_together(alphabet, weights.size)
        if together > 1:
            packed = np.empty(-(-symbols.size // together), dtype=np.uint8)
            kernels.pack(symbols, alphabet, together, packed)
            symbols = packed
        return encode_symbols(symbols, None, alphabet**together, 1), largest, strange

    def advance(self, index: int, payload: memoryview, largest: int, scale: float) -> None:
        """A reader's half of `quantize`.

        Raises:
            FormatError: the payload is malformed.
        """
        from shrinkpoint.steps import update_kernels as kernels  # numba

        read = self._read[index]
        if not scale:
            if len(payload):
                raise FormatError("a tensor without an update has a payload")
            return
        alphabet = largest + 1
        together = symbols_together(alphabet, read.size)
        symbols = decode_symbols(payload, None, -(-read.size // together), alphabet**together, 1)
        if together > 1:
            unpacked = np.empty(read.size, dtype=np.uint8)
            if not kernels.unpack(symbols, alphabet, together, unpacked):
                raise FormatError("an update's last symbols are not zero")
            symbols = unpacked
        kernels.advance(read, symbols, np.float32(scale))

    def changed(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[int, UInt8s]]:
        """The tensors stored whole whose bytes differ from the reader's, with their places; the reader gets them."""
        found = []
        for index, spec in enumerate(self.layout.exact):
            data = tensor_to_bytes(tensors[spec.name]).reshape(-1)
            if not np.array_equal(data, self._exact[index]):
                self._exact[index][:] = data
                found.append((index, self._exact[index].copy()))
        return found

    def apply(self, record: JSON, tensors: Tensors) -> None:
        """Advance by one record.

        Args:
            record: of a segment whose layout is this one.
            tensors: of the same segment.

        Raises:
            FormatError: it is malformed; the state is then not to be used.
        """
        count = len(self.layout.coded)
        scales = _column(tensors(record["scales"]), torch.float32, count)
        largest = _column(tensors(record["largest"]), torch.uint8, count)
        lengths = _column(tensors(record["lengths"]), torch.uint64, count)
        data = _bytes(tensors(record["symbols"]))
        if not np.isfinite(scales).all() or (scales < 0).any() or (largest > _LARGEST_SYMBOL).any():
            raise FormatError("a record has scales or symbols that cannot be")
        ends = np.cumsum([0, *lengths.tolist()], dtype=object).tolist()
        if ends[-1] != data.size:
            raise FormatError(f"a record's payloads take {ends[-1]} bytes, and it has {data.size}")
        for index in range(count):
            payload = data[ends[index] : ends[index + 1]].data
            self.advance(index, payload, int(largest[index]), float(scales[index]))
        self._apply_exact(record, tensors)

    def _apply_exact(self, record: JSON, tensors: Tensors) -> None:
        changed = tensors(record["changed"])
        places = _column(changed, torch.uint32, changed.numel()).tolist()
        data, at = _bytes(tensors(record["exact"])), 0
        for place in places:
            if place >= len(self._exact) or at + self._exact[place].size > data.size:
                raise FormatError("a record changes a tensor that is not there")
            self._exact[place][:] = data[at : at + self._exact[place].size]
            at += self._exact[place].size
        if at != data.size:
            raise FormatError(f"a record's tensors take {at} bytes, and it has {data.size}")


def encode_updates(
    reader: ReadersWeights,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    scales_of: Callable[[Sequence[Float32s]], Sequence[float]],
    table: TensorTable,
) -> JSON:
    """The record of one step; the reader advances.

    Args:
        reader: what the readers have of the record before.
        step: training steps done.
        tensors: the model's, on the host.
        scales_of: the quantization steps for the coded tensors, given their values.
        table: of the segment.
    """
    coded: list[tuple[float, bytes, int]] = []
    strange: dict[str, int] = {}
    arrays = [widened(tensors[spec.name]) for spec in reader.layout.coded]
    for index, (spec, scale) in enumerate(zip(reader.layout.coded, scales_of(arrays), strict=True)):
        values = arrays[index]
        payload, largest, not_finite = reader.quantize(index, values, scale)
        coded.append((scale, payload, largest))
        if not_finite:
            strange[spec.name] = not_finite
    changed = reader.changed(tensors)
    return {
        "step": step,
        "scales": table.add_array(np.array([scale for scale, _, _ in coded], dtype=np.float32)),
        "largest": table.add_array(np.array([largest for _, _, largest in coded], dtype=np.uint8)),
        "lengths": table.add_array(np.array([len(p) for _, p, _ in coded], dtype=np.uint64)),
        "symbols": table.add_array(_joined([np.frombuffer(p, np.uint8) for _, p, _ in coded])),
        "changed": table.add_array(np.array([place for place, _ in changed], dtype=np.uint32)),
        "exact": table.add_array(_joined([data for _, data in changed])),
        "not_finite": strange,
        "digest": reader.digest(),
    }


def symbols_together(alphabet: int, count: int) -> int:
    """How many neighbouring symbols are coded as one: as many as have at most 256 values together."""
    if count < _GROUPED or alphabet < 2:
        return 1
    together = 1
    while alphabet ** (together + 1) <= 256:
        together += 1
    return together


def _joined(arrays: Sequence[UInt8s]) -> UInt8s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint8)


def _bytes(tensor: torch.Tensor) -> UInt8s:
    data: UInt8s = _column(tensor, torch.uint8, tensor.numel())
    return data


def _column(tensor: torch.Tensor, dtype: torch.dtype, count: int) -> np.ndarray:  # type: ignore[type-arg]
    if tensor.dtype != dtype or tuple(tensor.shape) != (count,):
        raise FormatError(f"a record has {tuple(tensor.shape)} numbers of {tensor.dtype} for {count} tensors")
    return tensor.numpy()
