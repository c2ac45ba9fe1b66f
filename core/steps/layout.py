"""Which tensors of a model a log of updates contains, how, and in which steps of quantization."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from shrinkpoint.arrays import Float32s, Int64s
from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import dtype_from_name, dtype_name
from shrinkpoint.state.tree import JSON

__all__ = ["Layout", "Spec", "UpdateSizes"]

_SMALLEST = 1024  # elements: below, tables and scales cost more than they save
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS, _MAX_NUMEL = 64, 2**48


class Spec(NamedTuple):
    """One tensor of a model."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, by how they are logged; the order is that of the records."""

    coded: tuple[Spec, ...]
    """Large tensors of floating-point numbers: quantized updates."""
    exact: tuple[Spec, ...]
    """All others: whole, where they have changed."""
    aliases: Mapping[str, str]
    """Further names of tied tensors."""

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors; tied ones count once."""
        return sum(spec.nbytes for spec in (*self.coded, *self.exact))

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> "Layout":
        """The layout of a model.

        Args:
            tensors: of its ``state_dict``, on any device; tied ones are the same object, or the same memory.
        """
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
        """The name of a tensor that is missing, or has another shape or dtype; None where all fit."""
        for spec in (*self.coded, *self.exact):
            tensor = tensors.get(spec.name)
            if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                return spec.name
        return None

    def untied(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """A name whose tensor has no longer the memory that it shared with another one; None where all are tied as they were.

        Args:
            tensors: live ones, of which none is `differing`.
        """
        for alias, kept in self.aliases.items():
            tensor = tensors.get(alias)
            if tensor is None or tensor.data_ptr() != tensors[kept].data_ptr():
                return alias
        return None

    def to_json(self) -> JSON:
        """In the form of a header."""
        return {
            "coded": [[s.name, dtype_name(s.dtype), list(s.shape)] for s in self.coded],
            "exact": [[s.name, dtype_name(s.dtype), list(s.shape)] for s in self.exact],
            "aliases": dict(self.aliases),
        }

    @staticmethod
    def from_json(node: JSON) -> "Layout":
        """Read it from a header.

        Raises:
            FormatError: it is none.
        """
        try:
            coded, exact = (tuple(_spec(item) for item in node[part]) for part in ("coded", "exact"))
            aliases = dict(node["aliases"])
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the layout of a log of updates is malformed: {error!r}") from None
        names = [spec.name for spec in (*coded, *exact)]
        if len(set(names)) != len(names) or any(spec.dtype not in _FLOATS for spec in coded):
            raise FormatError("the layout of a log of updates has a name twice, or codes what are no numbers")
        if any(not isinstance(a, str) or kept not in names or a in names for a, kept in aliases.items()):
            raise FormatError("the layout of a log of updates has an alias of nothing")
        return Layout(coded, exact, aliases)


def _spec(item: JSON) -> Spec:
    name, dtype, shape = item
    if not isinstance(name, str) or not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        raise FormatError(f"{str(item)[:80]} is not a name, a dtype and a shape")
    numel = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise FormatError(f"{str(shape)[:80]} is not a shape")
        numel *= max(size, 1)
        if numel > _MAX_NUMEL:
            raise FormatError(f"the shape {str(shape)[:80]} has too many elements")
    return Spec(name, dtype_from_name(dtype), tuple(shape))


_SAMPLE = 4096  # elements of a tensor: its root mean square is then known within a few percent
_SEED = 1


class UpdateSizes:
    """Root mean squares of the last step's update, by tensor; all but `sample` is for the log's thread.

    Args:
        layout: of the model.
        factor: the quantization step, in root mean squares of an update.
    """

    def __init__(self, layout: Layout, factor: float) -> None:
        rng = np.random.default_rng(_SEED)  # strides would meet some rows or columns only
        self._places: list[Int64s] = [
            np.sort(rng.integers(spec.numel, size=min(_SAMPLE, spec.numel))) for spec in layout.coded
        ]
        self._names = [spec.name for spec in layout.coded]
        self._on_device: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._factor = factor
        self._last: list[Float32s | None] = [None] * len(self._names)
        self._rms = [0.0] * len(self._names)
        self._step = -1

    def sample(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Some elements of each coded tensor, on its device; for the training's thread."""
        found = {}
        for index, name in enumerate(self._names):
            tensor = tensors[name].detach()
            key = index, tensor.device
            if key not in self._on_device:
                self._on_device[key] = torch.from_numpy(self._places[index]).to(tensor.device)
            found[str(index)] = torch.take(tensor, self._on_device[key])
        return found

    def note(self, step: int, sampled: Mapping[str, torch.Tensor]) -> None:
        """Take a sample of a step that is not logged itself."""
        self._last = [
            sampled[str(index)].to(torch.float32).numpy().copy() for index in range(len(self._names))
        ]
        self._step = step

    def scales(self, step: int, arrays: Sequence[Float32s]) -> list[float]:
        """The quantization steps for a record.

        Args:
            step: training steps done.
            arrays: the values of the coded tensors.

        Returns:
            Single-precision numbers; 0 for a tensor that no update is known of.
        """
        sampled = [values[places] for values, places in zip(arrays, self._places, strict=True)]
        if step == self._step + 1:
            for index, (now, before) in enumerate(zip(sampled, self._last, strict=True)):
                if before is not None:
                    self._note_rms(index, now, before)
        self._last, self._step = list(sampled), step
        return [float(np.float32(self._factor * rms)) for rms in self._rms]

    def _note_rms(self, index: int, now: Float32s, before: Float32s) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            rms = float(np.sqrt(np.mean(np.square(now.astype(np.float64) - before))))
        # one step without an update (no gradient) does not make the next ones any smaller
        if np.isfinite(rms) and np.finfo(np.float32).tiny < rms < 1e30:
            self._rms[index] = rms
