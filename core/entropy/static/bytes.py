"""Exact coding of raw tensor bytes, and the exact difference of two tensors of the same dtype.

Bytes of the same significance are put side by side (byte planes): sign and exponent bytes compress, low mantissa bytes
are noise, and mixed they hide each other. Each plane is cut into chunks of 1 MiB, and each chunk takes the smallest of
raw, zstd and order-0 rANS, which beats zstd on exponents: skewed, but without repetitions.

Payload: for each chunk, planes in order, one method byte and the coded length (varint); then the coded chunks. No bytes
for no data.

Sources: byte planes as in FastCheck's split of prefixes and suffixes and its weight difference (ENG ITEE 27(2):250034).
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from shrinkpoint.arrays import Int64s, UInt8s, Unsigned
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols, map_in_threads, predict_bytes
from shrinkpoint.entropy.symbols import check_array, count_symbols
from shrinkpoint.entropy.wire import ByteReader, Payload, write_uvarint
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.unlocked import to_bytes

__all__ = ["decode_bytes", "delta_bits", "encode_bytes", "undelta_bits"]

_RAW, _ZSTD, _RANS = 0, 1, 2
_CHUNK_BYTES = 1 << 20
_MAX_WINDOW_BYTES = 8 << 20  # of any zstd frame that we accept; a chunk needs no more than its own size
_ITEM_SIZES = (1, 2, 4, 8, 16)


def encode_bytes(data: UInt8s, item_size: int, level: int = 3, threads: int = 1) -> bytes:
    """Code the bytes of a tensor exactly.

    Args:
        data: uint8 (size,), the bytes of whole elements.
        item_size: bytes per element: 1, 2, 4, 8 or 16.
        level: zstd's compression level, 1..22.
        threads: how many threads share the chunks; the bytes do not depend on it.

    Returns:
        The payload; its length, ``size`` and ``item_size`` are the caller's to store.

    Raises:
        ValueError: an argument is out of range, or ``data`` does not hold whole elements.
    """
    check_array(data, "data")
    if not 1 <= level <= 22:
        raise ValueError(f"level must be 1..22, got {level}")
    planes = data.reshape(-1, _check_item_size(data.size, item_size))

    def encode(where: tuple[int, int, int]) -> tuple[int, bytes]:
        plane, start, stop = where
        return _encode_chunk(np.ascontiguousarray(planes[start:stop, plane]), level)

    coded = map_in_threads(encode, _chunks(data.size, item_size), threads)
    head = bytearray()
    for method, chunk in coded:
        head.append(method)
        write_uvarint(head, len(chunk))
    return b"".join((bytes(head), *(chunk for _, chunk in coded)))


def decode_bytes(payload: Payload, size: int, item_size: int, threads: int = 1) -> UInt8s:
    """Inverse of :func:`encode_bytes`.

    Args:
        payload: the bytes of :func:`encode_bytes`, all of them and nothing else.
        size: how many bytes there are; no more than that, and one chunk per thread, is ever allocated.
        item_size: as given to the encoder.
        threads: how many threads share the chunks.

    Returns:
        uint8 (size,).

    Raises:
        FormatError: the payload is malformed.
        CorruptionError: a chunk does not decode.
        ValueError: ``item_size`` is not one of 1, 2, 4, 8, 16, or does not divide ``size``.
    """
    _check_item_size(size, item_size)
    reader = ByteReader(payload, "byte planes")
    count = item_size * -(
        -size // item_size // _CHUNK_BYTES
    )  # before the list, whose length a hostile size sets
    if reader.remaining < 2 * count:
        raise FormatError(f"byte planes: {reader.remaining} bytes cannot hold {count} chunks")
    chunks = _chunks(size, item_size)
    heads = [(reader.byte(), reader.uvarint(reader.remaining, "chunk length")) for _ in chunks]
    work = [
        (where, method, reader.take(length)) for where, (method, length) in zip(chunks, heads, strict=True)
    ]
    reader.finish()
    out = np.empty(size, dtype=np.uint8)
    planes = out.reshape(-1, item_size)

    def decode(item: tuple[tuple[int, int, int], int, memoryview]) -> None:
        (plane, start, stop), method, chunk = item
        planes[start:stop, plane] = _decode_chunk(method, chunk, stop - start)

    map_in_threads(decode, work, threads)
    return out


def _check_item_size(size: int, item_size: int) -> int:
    if item_size not in _ITEM_SIZES:
        raise ValueError(f"item_size must be one of {_ITEM_SIZES}, got {item_size}")
    if size < 0 or size % item_size:
        raise ValueError(f"{size} bytes are not whole elements of {item_size} bytes")
    return item_size


def _chunks(size: int, item_size: int) -> list[tuple[int, int, int]]:
    """(plane, start, stop) of every chunk, in payload order; start and stop count elements."""
    n = size // item_size
    starts = range(0, n, _CHUNK_BYTES)
    return [(plane, start, min(start + _CHUNK_BYTES, n)) for plane in range(item_size) for start in starts]


def _encode_chunk(chunk: UInt8s, level: int) -> tuple[int, bytes]:
    """Return the shortest coding and its method; raw on ties, then zstd, which are faster to read."""
    best_method, best = _RAW, to_bytes(chunk)
    packed = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False).compress(
        best
    )
    if len(packed) < len(best):
        best_method, best = _ZSTD, packed
    # Counting is cheap and predicts the size well, so noise is never coded only to be thrown away. The entropy alone,
    # without any table, decides for the many small planes for which even planning the tables would cost too much.
    counts = count_symbols(chunk, None, 256, 1)
    if _order_0_bytes(counts) < len(best) and predict_bytes(counts) < len(best):
        coded = encode_symbols(chunk, None, 256, 1)
        if len(coded) < len(best):
            best_method, best = _RANS, coded
    return best_method, best


def _order_0_bytes(counts: Int64s) -> float:
    """A size that no coder with one static table can reach: the entropy, and a byte for each symbol in the table."""
    present = counts[counts > 0].astype(np.float64)
    total = present.sum()
    return float((present * np.log2(total / present)).sum() / 8 + present.size) if present.size > 1 else 0.0


def _decode_chunk(method: int, chunk: memoryview, length: int) -> UInt8s:
    if method == _RAW:
        if len(chunk) != length:
            raise FormatError(f"byte planes: a raw chunk has {len(chunk)} bytes, {length} expected")
        return np.frombuffer(chunk, dtype=np.uint8)
    if method == _RANS:
        return decode_symbols(chunk, None, length, 256, 1)
    if method == _ZSTD:
        return np.frombuffer(_decompress(chunk, length), dtype=np.uint8)
    raise FormatError(f"byte planes: unknown method {method}")


def _decompress(frame: memoryview, length: int) -> bytes:
    """Decompress one zstd frame that states ``length`` as its content size; nothing is allocated before that check."""
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != length:
            raise FormatError(
                f"byte planes: a frame states {parameters.content_size} bytes, {length} expected"
            )
        if parameters.window_size > _MAX_WINDOW_BYTES or parameters.dict_id:
            raise FormatError("byte planes: a frame needs a dictionary or too large a window")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        data: bytes = decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"byte planes: a zstd frame does not decode: {error}") from error
    if len(data) != length:
        raise CorruptionError(f"byte planes: a frame gave {len(data)} bytes, {length} expected")
    return data


def delta_bits(current: npt.NDArray[Any], reference: npt.NDArray[Any], floating: bool = True) -> Unsigned:
    """Difference of two arrays' bit patterns, small where the values are close; any bits, NaN included, are exact.

    Patterns are mapped to unsigned integers in the order of the values, subtracted modulo 2^k and zigzagged, so that
    the next float up or down has the difference 2 or 1 whatever its exponent, and high bytes are mostly 0.

    Args:
        current: any shape; a dtype of 1, 2, 4 or 8 bytes, real or viewed as unsigned (bfloat16 as uint16).
        reference: same shape and item size.
        floating: the patterns are sign and magnitude, as IEEE floats are; False for integers.

    Returns:
        Unsigned integers, same shape and item size.

    Raises:
        ValueError: shapes or item sizes differ, or the item size is not 1, 2, 4 or 8.

    Source: FastCheck (ENG ITEE 27(2):250034), weight difference; its operator is not published, this is ours.
    """
    _check_alike(current, reference)
    bits, reference_bits = _as_unsigned(current), _as_unsigned(reference)
    if floating:
        bits, reference_bits = _to_ordered(bits), _to_ordered(reference_bits)
    delta = bits - reference_bits
    zigzag: Unsigned = (delta << _as_type(delta, 1)) ^ _sign_mask(delta)
    return zigzag.reshape(current.shape)


def undelta_bits(delta: Unsigned, reference: npt.NDArray[Any], floating: bool = True) -> Unsigned:
    """Inverse of :func:`delta_bits`: the bit patterns of ``current`` as unsigned integers.

    Args:
        delta: what :func:`delta_bits` returned.
        reference: as given to it.
        floating: as given to it.

    Returns:
        Unsigned integers, same shape and item size; ``.view`` them as the dtype they had.

    Raises:
        ValueError: shapes or item sizes differ, or the item size is not 1, 2, 4 or 8.
    """
    _check_alike(delta, reference)
    zigzag, reference_bits = _as_unsigned(delta), _as_unsigned(reference)
    one = _as_type(zigzag, 1)
    difference = (zigzag >> one) ^ (~(zigzag & one) + one)
    if floating:
        current = _from_ordered(_to_ordered(reference_bits) + difference)
    else:
        current = reference_bits + difference
    return current.reshape(delta.shape)


def _check_alike(array: npt.NDArray[Any], reference: npt.NDArray[Any]) -> None:
    if array.dtype.itemsize not in (1, 2, 4, 8):
        raise ValueError(f"elements must have 1, 2, 4 or 8 bytes, got {array.dtype}")
    if array.shape != reference.shape or array.dtype.itemsize != reference.dtype.itemsize:
        raise ValueError(
            f"arrays must have the same shape and item size, got {array.shape} {array.dtype} and "
            f"{reference.shape} {reference.dtype}"
        )


def _as_unsigned(array: npt.NDArray[Any]) -> Unsigned:
    """The bit patterns, flat: numpy turns results of 0-D arrays into scalars, which warn when they wrap."""
    flat: Unsigned = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    return flat


def _as_type(like: Unsigned, value: int) -> Any:
    """``value`` in the dtype of ``like``: mixed with Python integers, old numpy would widen."""
    return like.dtype.type(value)


def _sign_mask(bits: Unsigned) -> Unsigned:
    """All ones where the top bit is set, else 0."""
    signed = bits.view(f"i{bits.dtype.itemsize}")
    masks: Unsigned = (signed >> signed.dtype.type(8 * bits.dtype.itemsize - 1)).view(bits.dtype)
    return masks


def _top_bit(bits: Unsigned) -> Any:
    return _as_type(bits, 1 << (8 * bits.dtype.itemsize - 1))


def _to_ordered(bits: Unsigned) -> Unsigned:
    """Sign-and-magnitude patterns to integers in the order of the values: negatives are inverted, positives move up."""
    ordered: Unsigned = bits ^ (_sign_mask(bits) | _top_bit(bits))
    return ordered


def _from_ordered(ordered: Unsigned) -> Unsigned:
    bits: Unsigned = ordered ^ (~_sign_mask(ordered) | _top_bit(ordered))
    return bits
