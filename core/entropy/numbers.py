"""Exact coding of numbers by their bit patterns, and the exact difference of two arrays of the same dtype.

Numbers of 2, 4 and 8 bytes are coded by `pcodec`: bins of a histogram by tANS, the bits below as they are. Bytes, and what
repeats itself as text does, are coded by zstd where that is shorter.

Payload: for each chunk of 2^20 numbers one method byte and the coded length (varint); then the coded chunks. No bytes
for no numbers. Methods: 0 the numbers themselves, little-endian; 1 one zstd frame of these; 2 a standalone pcodec file of them as
unsigned integers.

Sources: M. Loncaric, N. Jeffrey, M. Smith and others, "Pcodec" (arXiv 2502.06112); differences as in FastCheck (ENG ITEE 27(2):250034).
"""

import threading
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from shrinkpoint.arrays import Unsigned
from shrinkpoint.entropy.wire import ByteReader, Payload, parts_of, write_uvarint
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.memory import to_bytes
from shrinkpoint.runtime.threads import map_in_threads

_RAW, _ZSTD, _PCODEC = 0, 1, 2
_CHUNK = 1 << 20
_LEVEL = 8
_ZSTD_LEVEL = 3
_PROBE = 1 << 14  # numbers that decide whether zstd is tried
_REPETITIVE = 0.85  # of their bytes, for which it is
_LARGE = 1 << 18  # numbers, for which that takes a third as long as pcodec
_CLOSE = 1.1  # of pcodec's share of the bytes: of more than that, nothing was found that zstd codes shorter
_BLOCK_BYTES = 1 << 18  # of differences: temporaries stay in a processor's cache
_MAX_WINDOW_BYTES = 16 << 20  # of any zstd frame that we accept; a chunk needs no more than its own size


class _Local(threading.local):
    """What a thread keeps for probes: making it takes longer than to compress a small tensor."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)


_local = _Local()


def encode_numbers(numbers: Unsigned, *, raw: bool = False) -> bytes:
    """Code numbers exactly.

    Args:
        numbers: of any shape, unsigned and of 1, 2, 4 or 8 bytes: bit patterns.
        raw: store them as they are, in the time of a copy.

    Returns:
        The payload; its length, the dtype and how many numbers there are is the caller's to store.
    """
    flat = np.ascontiguousarray(numbers).reshape(-1)
    coded = map_in_threads(partial(_encode, raw=raw), [flat[part] for part in parts_of(flat.size, _CHUNK)])
    head = bytearray()
    for method, chunk in coded:
        head.append(method)
        write_uvarint(head, len(chunk))
    return b"".join((bytes(head), *(chunk for _, chunk in coded)))


def decode_numbers(payload: Payload, size: int, dtype: npt.DTypeLike) -> Unsigned:
    """Inverse of `encode_numbers`.

    Args:
        payload: the bytes, all of them and nothing else.
        size: how many numbers there are; no more memory than for these, and one chunk per thread, is ever taken.
        dtype: unsigned, as given to the encoder.

    Returns:
        (size,).

    Raises:
        FormatError: the payload is malformed.
        CorruptionError: a chunk does not decode.
    """
    reader = ByteReader(payload, "numbers")
    if reader.remaining < 2 * -(-size // _CHUNK):  # before the list, whose length a hostile size sets
        raise FormatError(f"numbers: {reader.remaining} bytes cannot hold {size}")
    parts = parts_of(size, _CHUNK)
    heads = [(reader.byte(), reader.uvarint(reader.remaining, "chunk length")) for _ in parts]
    work = [(part, method, reader.take(length)) for part, (method, length) in zip(parts, heads, strict=True)]
    reader.finish()
    out: Unsigned = np.empty(size, dtype)

    def decode(item: tuple[slice, int, memoryview]) -> None:
        part, method, chunk = item
        _decode(method, chunk, out[part])

    map_in_threads(decode, work)
    return out


def _encode(numbers: Unsigned, raw: bool) -> tuple[int, bytes]:
    """Return the shortest coding and its method."""
    plain = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    if raw:
        return _RAW, to_bytes(plain)
    config = ChunkConfig(
        compression_level=_LEVEL,
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        enable_8_bit=True,
    )
    method, coded = _PCODEC, standalone.simple_compress(numbers, config)
    limit = _CLOSE * len(coded) / plain.nbytes if numbers.size >= _LARGE else 1.0
    if _share_of_probe(plain) < min(_REPETITIVE, limit):
        compressor = zstandard.ZstdCompressor(
            level=_ZSTD_LEVEL, write_content_size=True, write_checksum=False
        )
        frame = compressor.compress(plain.data)
        if len(frame) < len(coded):
            method, coded = _ZSTD, frame
    return (method, coded) if len(coded) < plain.nbytes else (_RAW, to_bytes(plain))


def _share_of_probe(numbers: Unsigned) -> float:
    """Of their bytes, what zstd leaves of some numbers from the middle."""
    middle = max(numbers.size - _PROBE, 0) // 2
    probe = numbers[middle : middle + _PROBE]
    return len(_local.compressor.compress(probe.data)) / probe.nbytes


def _decode(method: int, chunk: memoryview, out: Unsigned) -> None:
    if method == _PCODEC:
        try:
            progress = standalone.simple_decompress_into(bytes(chunk), out)
        except RuntimeError as error:
            raise CorruptionError(f"numbers: a pcodec file does not decode: {error}") from error
        if progress.n_processed != out.size or not progress.finished:
            raise CorruptionError(f"numbers: a pcodec file has other than {out.size} numbers")
        return
    if method == _ZSTD:
        chunk = memoryview(_decompress(chunk, out.nbytes))
    elif method != _RAW:
        raise FormatError(f"numbers: unknown method {method}")
    if len(chunk) != out.nbytes:
        raise FormatError(f"numbers: a raw chunk has {len(chunk)} bytes, {out.nbytes} expected")
    out[:] = np.frombuffer(chunk, out.dtype.newbyteorder("<"))


def _decompress(frame: memoryview, length: int) -> bytes:
    """Decompress one zstd frame that states ``length`` as its content size; nothing is allocated before that check."""
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != length:
            raise FormatError(f"numbers: a frame states {parameters.content_size} bytes, {length} expected")
        if parameters.window_size > _MAX_WINDOW_BYTES or parameters.dict_id:
            raise FormatError("numbers: a frame needs a dictionary or too large a window")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        data: bytes = decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"numbers: a zstd frame does not decode: {error}") from error
    if len(data) != length:
        raise CorruptionError(f"numbers: a frame gave {len(data)} bytes, {length} expected")
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

    Source: FastCheck (ENG ITEE 27(2):250034), weight difference; its operator is not published, this is ours.
    """
    bits, reference_bits = _as_unsigned(current), _as_unsigned(reference)
    zigzag = np.empty_like(bits)
    for part in parts_of(bits.size, _BLOCK_BYTES // bits.itemsize):
        here, there = bits[part], reference_bits[part]
        delta = _ordered(here) - _ordered(there) if floating else here - there
        signs = _sign_mask(delta)
        delta <<= delta.dtype.type(1)
        np.bitwise_xor(delta, signs, out=zigzag[part])
    return zigzag.reshape(current.shape)


def undelta_bits(delta: Unsigned, reference: npt.NDArray[Any], floating: bool = True) -> Unsigned:
    """Inverse of :func:`delta_bits`: the bit patterns of ``current`` as unsigned integers.

    Args:
        delta: what :func:`delta_bits` returned.
        reference: as given to it.
        floating: as given to it.

    Returns:
        Unsigned integers, same shape and item size; ``.view`` them as the dtype they had.
    """
    zigzag, reference_bits = _as_unsigned(delta), _as_unsigned(reference)
    bits, one = np.empty_like(zigzag), zigzag.dtype.type(1)
    for part in parts_of(bits.size, _BLOCK_BYTES // bits.itemsize):
        difference = zigzag[part] & one
        np.negative(difference, out=difference)
        difference ^= zigzag[part] >> one
        difference += _ordered(reference_bits[part]) if floating else reference_bits[part]
        bits[part] = _ordered(difference) if floating else difference
    return bits.reshape(delta.shape)


def _as_unsigned(array: npt.NDArray[Any]) -> Unsigned:
    """The bit patterns, flat: numpy turns results of 0-D arrays into scalars, which warn when they wrap."""
    flat: Unsigned = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    return flat


def _sign_mask(bits: Unsigned) -> Unsigned:
    """Return all ones where the top bit is set, else 0."""
    signed = bits.view(f"i{bits.dtype.itemsize}")
    masks: Unsigned = (signed >> signed.dtype.type(8 * bits.dtype.itemsize - 1)).view(bits.dtype)
    return masks


def _ordered(bits: Unsigned) -> Unsigned:
    """Sign-and-magnitude patterns to two's complement integers in the order of the values, and back."""
    ordered = _sign_mask(bits)
    ordered >>= bits.dtype.type(1)  # old numpy would widen by a Python integer
    ordered ^= bits
    return ordered
