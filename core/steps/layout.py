"""Which tensors of a model a log of updates contains, and how."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import dtype_from_name, dtype_name
from shrinkpoint.state.tree import JSON

__all__ = ["Layout", "Spec"]

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
