"""A digest of live weights and optimizer states, by which a replay is accepted or rejected.

It covers every parameter of the optimizers, in their order, and everything in the optimizers' states, but not the
hyperparameters, which loops set before or after a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import xxhash

from shrinkpoint.state.digest import device_digests, state_digest, tensor_digest
from shrinkpoint.state.stateful import parameters_of


def fingerprint(
    optimizers: Sequence[torch.optim.Optimizer], more: Mapping[str, torch.Tensor] | None = None
) -> str:
    """Give the xxh3-128 of parameters, optimizer states, and other tensors that a replay must reproduce: 32 hexadecimal digits."""
    return begin_fingerprint(optimizers, more or {})()


def begin_fingerprint(
    optimizers: Sequence[torch.optim.Optimizer], more: Mapping[str, torch.Tensor]
) -> Callable[[], str]:
    """Begin the `fingerprint`, as `begin_digest` does."""
    parts = {name: value for index, one in enumerate(optimizers) for name, value in _parts(index, one)}
    return begin_digest(parts | {f"more/{name}": value for name, value in more.items()})


def begin_digest(parts: Mapping[str, Any]) -> Callable[[], str]:
    """Begin the digest of tensors and other values at this place of the devices' work; the host does its own part at once.

    Returns:
        Waits for the devices, from any thread, and returns the digest.
    """
    there = {name: value for name, value in parts.items() if _is_elsewhere(value)}
    from_devices = device_digests(there)
    here = {name: _digest(value) for name, value in parts.items() if name not in there}
    names = list(parts)
    del parts, there  # what waits for the digest keeps no state

    def finish() -> str:
        found = {**here, **from_devices()}
        return state_digest({name: found[name] for name in names})

    return cache(finish)


def _is_elsewhere(value: Any) -> bool:
    return torch.is_tensor(value) and not value.is_cpu and value.layout == torch.strided


def _parts(index: int, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    parameters = parameters_of(optimizer)
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
    return tensor_digest(value.detach().cpu())
