"""A digest of live weights and optimizer states, by which a replay is accepted or rejected.

It covers every parameter of the optimizers, in their order, and everything in the optimizers' states, but not the
hyperparameters, which loops set before or after a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from shrinkpoint.state.dtypes import dtype_name, tensor_to_bytes

__all__ = ["combined", "device_sums", "differing", "digests_of", "fingerprint", "fingerprints", "parts_of"]

_CHUNK = 1 << 22  # elements at a time on a device: some 100 MiB in addition to the tensor
# Odd 32-bit multipliers of xxHash: a changed element changes each sum, and an exchange of two elements does.
_PRIMES = (0x9E3779B1, 0x85EBCA77)


def fingerprint(
    optimizers: Sequence[torch.optim.Optimizer], more: Mapping[str, torch.Tensor] | None = None
) -> str:
    """xxh3-128 of weights, optimizer states and further tensors, 32 hexadecimal digits.

    Args:
        optimizers: their parameters and their states.
        more: other tensors that a replay must reproduce, by name.
    """
    return combined(fingerprints(optimizers, more))


def fingerprints(
    optimizers: Sequence[torch.optim.Optimizer], more: Mapping[str, torch.Tensor] | None = None
) -> dict[str, str]:
    """The digests of all parts; that of an optimizer's k-th parameter is called ``<optimizer>/<k>``."""
    return digests_of(parts_of(optimizers, more))


def parts_of(
    optimizers: Sequence[torch.optim.Optimizer], more: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """The parts themselves: live tensors and other values, by the names that `fingerprints` gives them."""
    parts = {name: value for index, one in enumerate(optimizers) for name, value in _parts(index, one)}
    return parts | {f"more/{name}": value for name, value in (more or {}).items()}


def digests_of(parts: Mapping[str, Any]) -> dict[str, str]:
    """The digests of what `parts_of` returns."""
    sums = _device_sums(
        {name: value for name, value in parts.items() if torch.is_tensor(value) and not value.is_cpu}
    )
    return {name: sums[name] if name in sums else _digest(value) for name, value in parts.items()}


def combined(parts: Mapping[str, str]) -> str:
    """One digest of several digests."""
    whole = xxhash.xxh3_128()
    for name, value in parts.items():
        whole.update(f"{len(name)}:{name}{value}".encode())
    return whole.hexdigest()


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the parts that two states do not share."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _parts(index: int, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, parameter in enumerate(parameters):
        yield f"{index}/{place}", parameter.detach()
        # a lookup in the optimizer's state may have created an empty entry
        for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
            yield f"{index}/{place}/{key}", value
    known = set(parameters)
    for key, value in optimizer.state.items():
        if key not in known:
            yield f"{index}/{key}" if not torch.is_tensor(key) else f"{index}/other", value


def _digest(value: Any) -> str:
    if not torch.is_tensor(value):
        if isinstance(value, Mapping):
            return xxhash.xxh3_128(
                "".join(f"{key}:{_digest(item)}" for key, item in value.items())
            ).hexdigest()
        if isinstance(value, list | tuple):
            return xxhash.xxh3_128("".join(_digest(item) for item in value)).hexdigest()
        return xxhash.xxh3_128(f"{type(value).__name__}{value!r}".encode()).hexdigest()
    if value.layout != torch.strided:
        value = value.detach().coalesce() if value.layout == torch.sparse_coo else value.detach()
        return xxhash.xxh3_128(_digest(value.to_dense()) + str(value.layout)).hexdigest()
    digest = xxhash.xxh3_128(f"{dtype_name(value.dtype)}{list(value.shape)}".encode())
    digest.update(tensor_to_bytes(value.detach().cpu()).data)
    return digest.hexdigest()


def _device_sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digests of device tensors from two position-weighted sums of their bits; only 32 bytes of each reach the host."""
    if not tensors:
        return {}
    sums = {name: device_sums(tensor.detach()) for name, tensor in tensors.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    found = {}
    for names in by_device.values():
        for name, row in zip(names, torch.stack([sums[name] for name in names]).cpu(), strict=True):
            tensor = tensors[name]
            text = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{row.tolist()}"
            found[name] = xxhash.xxh3_128(text.encode()).hexdigest()
    return found


def device_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums modulo 2^64 over the bits of a tensor, on its device; they do not depend on the order of the additions."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(torch.uint8) if flat.dtype is torch.bool else flat.view(same_size)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        values = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + values.numel(), dtype=torch.int64, device=tensor.device)
        for index, prime in enumerate(_PRIMES):
            # Multiplied once more after mixing: a plain weighted sum would not distinguish bits of neighbours.
            mixed = (values + places * prime) * 0x27D4EB2F165667C5
            total[index] += ((mixed ^ (mixed >> 29)) * prime).sum()
    return total
