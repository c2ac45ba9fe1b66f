"""Digests of tensors: they detect a wrong reference or a faulty codec, which checksums of stored bytes cannot.

Those of tensors on a GPU are taken there in the order of the training's own work, without stopping the host.
"""

from collections.abc import Callable, Mapping

import torch
import xxhash

from shrinkpoint.state.dtypes import dtype_name, tensor_to_bytes

_WORDS = 1 << 21
"""8-byte words that are summed at a time: some 50 MB in addition to the tensor."""
_SHIFT = 29
_LOGICAL = (1 << (64 - _SHIFT)) - 1  # torch shifts the sign in
# Odd multipliers of xxHash and splitmix64, as signed numbers.
_PRIMES = (-7046029288634856825, -4417276706812531889)
_MIXED = 0x2545F4914F6CDD1D


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


def device_digests(tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, str]]:
    """Have the digests of dense tensors on devices taken: of their values at this place of the device's work.

    Single numbers get `tensor_digest`: optimizers have them on either side. What is returned waits for the device,
    from any thread.
    """
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    numbers: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 1:
            numbers.setdefault((tensor.device, tensor.dtype), []).append(name)
        else:
            sums.setdefault(tensor.device, {})[name] = device_sums(tensor.detach())
    several = {
        device: (list(rows), _to_host(torch.stack(list(rows.values())))) for device, rows in sums.items()
    }
    single = {
        key: (names, _to_host(torch.stack([tensors[name].detach().reshape(()) for name in names])))
        for key, names in numbers.items()
    }
    devices = {device for device, _ in single} | set(several)
    reached = [
        torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"
    ]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    kinds = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}

    def finish() -> dict[str, str]:
        for event in reached:
            event.synchronize()
        found = {}
        for names, rows in several.values():
            for name, row in zip(names, rows.tolist(), strict=True):
                text = f"{kinds[name]}{list(shapes[name])}{row}"
                found[name] = xxhash.xxh3_128(text.encode()).hexdigest()
        for names, values in single.values():
            for name, value in zip(names, values, strict=True):
                found[name] = tensor_digest(value.reshape(shapes[name]))
        return found

    return finish


def device_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two weighted sums modulo 2^64 over the words of a tensor, on its device; they do not depend on the order of the additions.

    Every word is mixed before it is weighted by its place: in a plain weighted sum, changes of two words' highest bits would cancel.
    """
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    data = flat.view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    rest = data.numel() % 8
    words = data[: data.numel() - rest].view(torch.int64)
    chunks = list(words.split(_WORDS))
    if rest:
        last = torch.zeros(8, dtype=torch.uint8, device=tensor.device)
        last[:rest] = data[data.numel() - rest :]
        chunks.append(last.view(torch.int64))
    weights = _weights(tensor.device)
    found = [torch.zeros(2, dtype=torch.int64, device=tensor.device)]
    for number, chunk in enumerate(chunks):
        mixed = (chunk >> _SHIFT).bitwise_and_(_LOGICAL).bitwise_xor_(chunk)
        sums = [(mixed * weight[: chunk.numel()]).sum() for weight in weights]
        found.append(torch.stack(sums) * _odd(number))
    return torch.stack(found).sum(dim=0)


_known_weights: dict[torch.device, torch.Tensor] = {}


def _weights(device: torch.device) -> torch.Tensor:
    """Return those of the words of a chunk, for each of the two sums: odd, and without a pattern."""
    if device not in _known_weights:
        places = torch.arange(1, _WORDS + 1, dtype=torch.int64, device=device)
        rows = []
        for prime in _PRIMES:
            row = places * prime
            row = (row ^ (row >> 31)) * _MIXED
            rows.append((row ^ (row >> _SHIFT)) | 1)
        _known_weights[device] = torch.stack(rows)
    return _known_weights[device]


def _odd(number: int) -> int:
    """Return the factor of a chunk's sums, by which equal words at equal places of two chunks count differently."""
    mixed = ((2 * number + 1) * _MIXED) % 2**64 | 1
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
