"""Quantized weight updates in a closed loop: after each record, a reader's weights are close to the training's.

The encoder quantizes the difference between the weights and what a reader has, and advances the reader's values by the
reader's own arithmetic. So errors do not accumulate: they stay within half a quantization step, whatever the optimizer does,
and the error of a lossy checkpoint that the log starts from disappears.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_128

from shrinkpoint.arrays import Float32s, Int64s, UInt8s, widened
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.state.digest import state_digest
from shrinkpoint.state.dtypes import dtype_name, tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.segment import Place, Tensors, TensorTable, checked_spec

_SMALLEST = 1024  # elements: below, tables and scales cost more than they save
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SAMPLE = 4096  # elements of a tensor: its root mean square is then known within a few percent
_SEED = 1
_GROUPED = 1 << 14  # symbols: below, a larger alphabet's table costs more than it saves
_LARGEST = 127  # multiple of the quantization step in one record; what is beyond it follows in the next ones
_LARGEST_SYMBOL = 254
_FINITE = np.float32(3.0e38)
_BLOCK = 1 << 16  # elements that stay in a processor's cache


class Spec(NamedTuple):
    """One tensor of a model."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, by how they are logged; the order is that of the records."""

    coded: tuple[Spec, ...]
    """Large tensors of floating-point numbers: quantized updates."""
    exact: tuple[Spec, ...]
    """All others: whole, where they have changed."""
    aliases: Mapping[str, str]
    """Further names of tied tensors."""

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All tensors; tied ones once."""
        return *self.coded, *self.exact

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(spec.numel * spec.dtype.itemsize for spec in self.specs)

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> "Layout":
        """Lay out a model's ``state_dict``, on any device; tied tensors are the same object, or the same memory."""
        seen: dict[tuple[object, ...], str] = {}
        aliases: dict[str, str] = {}
        coded: list[Spec] = []
        exact: list[Spec] = []
        for name, tensor in tensors.items():
            memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            kept = seen.setdefault(memory, name) if tensor.numel() else name
            if kept != name:
                aliases[name] = kept
                continue
            spec = Spec(name, tensor.dtype, tuple(tensor.shape))
            (coded if tensor.dtype in _FLOATS and tensor.numel() >= _SMALLEST else exact).append(spec)
        return Layout(tuple(coded), tuple(exact), aliases)

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Name a tensor that is missing, or has another shape or dtype; None where all fit."""
        for spec in self.specs:
            tensor = tensors.get(spec.name)
            if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                return spec.name
        return None

    def untied(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Name a tensor, of those that are not `differing`, which no longer shares its memory with another one; None where all do."""
        for alias, kept in self.aliases.items():
            tensor = tensors.get(alias)
            if tensor is None or tensor.data_ptr() != tensors[kept].data_ptr():
                return alias
        return None

    def to_json(self) -> JSON:
        """Give it in the form of a header."""
        coded, exact = (
            [[s.name, dtype_name(s.dtype), list(s.shape)] for s in part] for part in (self.coded, self.exact)
        )
        return {"coded": coded, "exact": exact, "aliases": dict(self.aliases)}

    @staticmethod
    def from_json(node: JSON) -> "Layout":
        """Read it from a header.

        Raises:
            FormatError: it is none.
        """
        try:
            coded, exact = (
                tuple(Spec(name, *checked_spec(spec)) for name, *spec in node[part])
                for part in ("coded", "exact")
            )
            aliases = dict(node["aliases"])
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the layout of a log of updates is malformed: {error!r}") from None
        names = [spec.name for spec in (*coded, *exact)]
        if not all(isinstance(name, str) for name in (*names, *aliases)):
            raise FormatError("the layout of a log of updates has a name that is no text")
        if len(set(names)) != len(names) or any(spec.dtype not in _FLOATS for spec in coded):
            raise FormatError("the layout of a log of updates has a name twice, or codes what are no numbers")
        if any(kept not in names or alias in names for alias, kept in aliases.items()):
            raise FormatError("the layout of a log of updates has an alias of nothing")
        return Layout(coded, exact, aliases)


class UpdateSizes:
    """Root mean squares of the last step's update, by tensor; all but `sample` is for the log's thread.

    The quantization step is `factor` of them.
    """

    def __init__(self, layout: Layout, factor: float) -> None:
        rng = np.random.default_rng(_SEED)  # strides would meet some rows or columns only
        self._places: dict[str, Int64s] = {
            spec.name: np.sort(rng.integers(spec.numel, size=min(_SAMPLE, spec.numel)))
            for spec in layout.coded
        }
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._factor = factor
        self._rms = dict.fromkeys(self._places, 0.0)
        self._last: Mapping[str, Float32s] = {}
        self._step = -1

    def sample(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take some elements of each coded tensor, on its device; for the training's thread."""
        found = {}
        for name, places in self._places.items():
            tensor = tensors[name].detach()
            key = name, tensor.device
            if key not in self._on_device:
                self._on_device[key] = torch.from_numpy(places).to(tensor.device)
            found[name] = torch.take(tensor, self._on_device[key])
        return found

    def note(self, step: int, sampled: Mapping[str, torch.Tensor]) -> None:
        """Take a sample of a step that is not logged itself."""
        self._last = {name: value.to(torch.float32).numpy().copy() for name, value in sampled.items()}
        self._step = step

    def scales(self, step: int, arrays: Sequence[Float32s]) -> list[float]:
        """Give the quantization steps for a record of the coded tensors' values; 0 for a tensor that no update is known of."""
        sampled = {
            name: values[places] for (name, places), values in zip(self._places.items(), arrays, strict=True)
        }
        if step == self._step + 1:
            for name, before in self._last.items():
                with np.errstate(over="ignore", invalid="ignore"):
                    rms = float(np.sqrt(np.mean(np.square(sampled[name].astype(np.float64) - before))))
                # one step without an update (no gradient) does not make the next ones any smaller
                if np.isfinite(rms) and np.finfo(np.float32).tiny < rms < 1e30:
                    self._rms[name] = rms
        self._last, self._step = sampled, step
        return [float(np.float32(self._factor * rms)) for rms in self._rms.values()]


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
        """Give the xxh3-128 of all tensors: 32 hexadecimal digits (core/steps/FORMAT.md)."""
        arrays: list[Float32s | UInt8s] = [*self._read, *self._exact]
        return state_digest(
            {s.name: xxh3_128(a.data).hexdigest() for s, a in zip(self.layout.specs, arrays, strict=True)}
        )

    def compare(self, place: Place, message: str) -> None:
        """Compare the digest with that of a place.

        Raises:
            CorruptionError: it is another one; with the message.
        """
        if self.digest() != place.digest:
            raise CorruptionError(f"step {place.step}: {message}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copy the weights, for ``model.load_state_dict``; tied tensors share their memory."""
        found = {
            spec.name: torch.from_numpy(array.copy()).to(spec.dtype).reshape(spec.shape)
            for spec, array in zip(self.layout.coded, self._read, strict=True)
        }
        for spec, data in zip(self.layout.exact, self._exact, strict=True):
            found[spec.name] = tensor_from_bytes(data.copy(), spec.dtype, spec.shape)
        return found | {alias: found[name] for alias, name in self.layout.aliases.items()}

    def encode(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        scales_of: Callable[[Sequence[Float32s]], Sequence[float]],
        table: TensorTable,
    ) -> JSON:
        """Make the record of one step, and advance.

        Args:
            step: training steps done.
            tensors: the model's, on the host.
            scales_of: the quantization steps for the coded tensors, given their values; 0 leaves a tensor as it is.
            table: of the segment.
        """
        arrays = [widened(tensors[spec.name]) for spec in self.layout.coded]
        scales = scales_of(arrays)
        payloads: list[UInt8s] = []
        largest = np.zeros(len(arrays), dtype=np.uint8)
        strange: dict[str, int] = {}
        for index, (weights, scale) in enumerate(zip(arrays, scales, strict=True)):
            payload = b""
            if scale:
                symbols, not_finite = quantize(weights, self._read[index], np.float32(scale))
                largest[index] = symbols.max()
                alphabet = int(largest[index]) + 1
                together = symbols_together(alphabet, weights.size)
                payload = encode_symbols(pack(symbols, alphabet, together), None, alphabet**together, 1)
                if not_finite:
                    strange[self.layout.coded[index].name] = not_finite
            payloads.append(np.frombuffer(payload, np.uint8))
        changed = self._changed(tensors)
        columns: dict[str, np.ndarray[Any, Any]] = {
            "scales": np.array(scales, dtype=np.float32),
            "largest": largest,
            "lengths": np.array([len(one) for one in payloads], dtype=np.uint64),
            "symbols": _joined(payloads),
            "changed": np.array([*changed], dtype=np.uint32),
            "exact": _joined([*changed.values()]),
        }
        numbers = {name: table.add_array(column) for name, column in columns.items()}
        return {"step": step, **numbers, "not_finite": strange, "digest": self.digest(), "remainder": None}

    def _changed(self, tensors: Mapping[str, torch.Tensor]) -> dict[int, UInt8s]:
        """Return the tensors stored whole whose bytes differ from the reader's, by their places; the reader gets them."""
        found = {}
        for index, spec in enumerate(self.layout.exact):
            data = tensor_to_bytes(tensors[spec.name]).reshape(-1)
            if not np.array_equal(data, self._exact[index]):
                self._exact[index][:] = data
                found[index] = self._exact[index].copy()
        return found

    def apply(self, record: JSON, tensors: Tensors) -> None:
        """Advance by one `checked_record` of a segment with this layout and these tensors.

        Raises:
            FormatError: it is malformed; the state is then not to be used.
        """
        count = len(self.layout.coded)
        scales = _column(tensors(record["scales"]), torch.float32, count)
        largest = _column(tensors(record["largest"]), torch.uint8, count)
        lengths = _column(tensors(record["lengths"]), torch.uint64, count)
        if not np.isfinite(scales).all() or (scales < 0).any() or (largest > _LARGEST_SYMBOL).any():
            raise FormatError("a record has scales or symbols that cannot be")
        payloads = _parts(tensors(record["symbols"]), lengths.tolist())
        for read, payload, last, scale in zip(self._read, payloads, largest, scales, strict=True):
            if scale:
                alphabet = int(last) + 1
                together = symbols_together(alphabet, read.size)
                packed = decode_symbols(payload.data, None, -(-read.size // together), alphabet**together, 1)
                advance(read, unpack(packed, alphabet, together, read.size), scale)
            elif payload.size:
                raise FormatError("a tensor without an update has a payload")
        changed = tensors(record["changed"])
        places = _column(changed, torch.uint32, changed.numel()).tolist()
        if any(place >= len(self._exact) for place in places):
            raise FormatError("a record changes a tensor that is not there")
        sizes = [self._exact[place].size for place in places]
        for place, data in zip(places, _parts(tensors(record["exact"]), sizes), strict=True):
            self._exact[place][:] = data


_MEMBERS = {
    "scales": int, "largest": int, "lengths": int, "symbols": int, "changed": int, "exact": int,
    "not_finite": dict, "digest": str,
}  # fmt: skip


def checked_record(node: JSON) -> JSON:
    """Check the members of a record from anywhere.

    Raises:
        FormatError: one is missing, or of another type.
    """
    step_of(node)
    for name, kind in _MEMBERS.items():
        if type(node.get(name)) is not kind:
            raise FormatError(f"a record's {name} is {str(node.get(name))[:40]!r}")
    return node


def step_of(node: JSON) -> int:
    """Give the step of a record from anywhere.

    Raises:
        FormatError: it has none.
    """
    step = node.get("step") if isinstance(node, dict) else None
    if type(step) is not int or step < 0:
        raise FormatError(f"a record is of step {str(step)[:40]!r}")
    return step


def quantize(weights: Float32s, read: Float32s, step: np.float32) -> tuple[UInt8s, int]:
    """Quantize the difference between the weights and what a reader has, and advance the reader's values by it.

    Returns:
        The symbols: 2k for a multiple k >= 0 of the step, and -2k - 1 for a negative one; and the number of weights that are not
        finite, whose readers' values stay.
    """
    symbols, strange, inverse = np.empty(weights.size, dtype=np.uint8), 0, np.float32(1) / step
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, weights.size, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            multiples = weights[block] - read[block]
            multiples *= inverse
            np.clip(multiples, -_LARGEST, _LARGEST, out=multiples)
            np.rint(multiples, out=multiples)
            finite = np.abs(weights[block]) <= _FINITE
            if not finite.all():
                strange += finite.size - int(np.count_nonzero(finite))
                multiples[~finite] = 0
            integers = multiples.astype(np.int16)
            symbols[block] = (integers << 1) ^ (integers >> 15)
            multiples *= step
            read[block] += multiples
    return symbols, strange


def advance(read: Float32s, symbols: UInt8s, step: np.float32) -> None:
    """Advance a reader's values, as `quantize` does."""
    every = np.arange(256, dtype=np.int16)
    updates = ((every >> 1) ^ -(every & 1)).astype(np.float32) * step
    for begin in range(0, read.size, _BLOCK):
        read[begin : begin + _BLOCK] += updates[symbols[begin : begin + _BLOCK]]


def symbols_together(alphabet: int, count: int) -> int:
    """Count the neighbouring symbols that are coded as one: as many as have at most 256 values together."""
    together = 1
    while count >= _GROUPED and alphabet > 1 and alphabet ** (together + 1) <= 256:
        together += 1
    return together


def pack(symbols: UInt8s, alphabet: int, together: int) -> UInt8s:
    """Combine neighbours: `together` symbols become the digits of one number below 256, the first one the lowest.

    Missing digits of the last number are zero.
    """
    if together == 1:
        return symbols
    digits = np.zeros((-(-symbols.size // together), together), dtype=np.uint8)
    digits.reshape(-1)[: symbols.size] = symbols
    packed = digits[:, -1].copy()
    for digit in range(together - 2, -1, -1):
        packed *= np.uint8(alphabet)
        packed += digits[:, digit]
    return packed


def unpack(packed: UInt8s, alphabet: int, together: int, count: int) -> UInt8s:
    """Return the inverse of `pack`.

    Raises:
        FormatError: a number is not of that form.
    """
    if together == 1:
        return packed
    digits = np.empty((packed.size, together), dtype=np.uint8)
    rest = packed.copy()
    for digit in range(together):
        rest, digits[:, digit] = np.divmod(rest, np.uint8(alphabet))
    symbols = digits.reshape(-1)
    if rest.any() or symbols[count:].any():
        raise FormatError("an update's last symbols are not zero")
    return symbols[:count]


def _joined(arrays: Sequence[UInt8s]) -> UInt8s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint8)


def _parts(tensor: torch.Tensor, sizes: Sequence[int]) -> list[UInt8s]:
    """Return a column of bytes, in parts."""
    data = _column(tensor, torch.uint8, tensor.numel())
    ends = np.cumsum([0, *sizes], dtype=object).tolist()
    if ends[-1] != data.size:
        raise FormatError(f"a record's parts take {ends[-1]} bytes, and it has {data.size}")
    return [data[begin:end] for begin, end in pairwise(ends)]


def _column(tensor: torch.Tensor, dtype: torch.dtype, count: int) -> np.ndarray:  # type: ignore[type-arg]
    if tensor.dtype != dtype or tuple(tensor.shape) != (count,):
        raise FormatError(f"a record has {tuple(tensor.shape)} numbers of {tensor.dtype} for {count} tensors")
    return tensor.numpy()
