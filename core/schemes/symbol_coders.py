"""The entropy coders for symbol planes, selected by name, independent of the quantizer.

Payload: one byte for the method, then

    0 packed    ceil(log2(alphabet)) bits per symbol, highest first, zero-padded
    1 lzma      the same, through raw LZMA2 (the method inside 7-Zip) with a dictionary of 8 MiB
    2 huffman   shrinkpoint.entropy.static.huffman
    3 cyclic    Huffman codes of the difference to the previous plane, modulo the alphabet
    4 rans      shrinkpoint.entropy.static.rans, alone
    5 given     rANS given the symbol at the same place in the previous plane
    6 lstm      shrinkpoint.entropy.lstm.coder
"""

import lzma
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shrinkpoint.arrays import UInt8s
from shrinkpoint.entropy.static.huffman import decode_huffman, encode_huffman
from shrinkpoint.entropy.static.rans import decode_symbols, encode_given
from shrinkpoint.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from shrinkpoint.entropy.lstm.coder import LstmOptions

SymbolCoder = Literal["packed", "lzma", "huffman", "cyclic", "rans"]
"""``packed`` is plain bits, ``cyclic`` needs a previous plane and is ``huffman`` without one."""

PlaneCoder: TypeAlias = "SymbolCoder | LstmOptions"
"""The latter is `shrinkpoint.entropy.lstm.coder`: slow."""

_PACKED, _LZMA, _HUFFMAN, _CYCLIC, _RANS, _GIVEN, _LSTM = range(7)
_DICTIONARY = 8 << 20
_CHUNK = 1 << 20  # symbols; a multiple of 8, so that every chunk ends with a whole byte
_PRESET = 6


def encode_plane(
    plane: UInt8s,
    alphabet: int,
    coder: PlaneCoder,
    previous: UInt8s | None = None,
    *,
    columns: int | None = None,
) -> bytes:
    """Code a plane.

    Args:
        plane: uint8 (n,), each below `alphabet`, flat in C order.
        alphabet: 1..256.
        coder: how to code.
        previous: uint8 (n,), the same plane of the previous checkpoint, of the same alphabet; None without one.
        columns: of the plane, for the LSTM; None for a plane of one row.

    Returns:
        The payload; `uses_previous` gives from it whether decoding needs the previous plane.
    """
    if not isinstance(coder, str):
        from shrinkpoint.entropy.lstm import coder as lstm  # of one scheme alone

        wide = columns or max(plane.size, 1)
        payload = lstm.encode_plane(plane, alphabet, columns=wide, previous=previous, options=coder)
        return bytes([_LSTM]) + payload
    if coder == "rans":
        payload, given = encode_given(plane, previous, alphabet)
        return bytes([_GIVEN if given else _RANS]) + payload
    if coder == "cyclic" and previous is not None:
        delta = (plane.astype(np.int64) - previous) % alphabet
        return bytes([_CYCLIC]) + encode_huffman(delta)
    if coder in ("huffman", "cyclic"):
        return bytes([_HUFFMAN]) + encode_huffman(plane.astype(np.int64))
    packed = _pack(plane, _width(alphabet))
    if coder == "packed":
        return bytes([_PACKED]) + packed
    return bytes([_LZMA]) + deflate(packed)


def decode_plane(
    payload: bytes, count: int, alphabet: int, previous: UInt8s | None = None, *, columns: int | None = None
) -> UInt8s:
    """Invert `encode_plane`; the payload says how it was coded.

    Args:
        payload: the bytes.
        count: how many symbols there are.
        alphabet: as given to the encoder.
        previous: as given to the encoder, where `uses_previous`.
        columns: as given to the encoder; None for a plane of one row.

    Returns:
        uint8 (count,), each below `alphabet`.

    Raises:
        FormatError: the payload is malformed, or needs a previous plane and there is none.
    """
    if not payload:
        raise FormatError("symbol plane: it has no bytes")
    method, body = payload[0], payload[1:]
    if uses_previous(payload) and (previous is None or previous.size != count):
        raise FormatError("symbol plane: it is coded given a previous plane, and there is none")
    if method == _LSTM:
        from shrinkpoint.entropy.lstm import coder as lstm

        wide = columns or max(count, 1)
        return lstm.decode_plane(body, count, alphabet, columns=wide, previous=previous)
    if method == _RANS:
        return decode_symbols(body, None, count, alphabet, 1)
    if method == _GIVEN:
        return decode_symbols(body, previous, count, alphabet, alphabet)
    if method in (_HUFFMAN, _CYCLIC):
        return _decode_huffman(body, count, alphabet, previous if method == _CYCLIC else None)
    width = _width(alphabet)
    size = -(-count * width // 8)
    if method == _LZMA:
        body = inflate(body, size)
    elif method != _PACKED:
        raise FormatError(f"symbol plane: unknown method {method}")
    if len(body) != size:
        raise FormatError(f"symbol plane: {len(body)} bytes of packed symbols, {size} expected")
    plane = _unpack(np.frombuffer(body, np.uint8), count, width)
    if count and int(plane.max()) >= alphabet:
        raise FormatError(f"symbol plane: symbol {int(plane.max())} of {alphabet}")
    return plane


def uses_previous(payload: bytes) -> bool:
    """Return whether a payload was coded given the previous plane."""
    if payload[:1] == bytes([_LSTM]):
        from shrinkpoint.entropy.lstm import coder as lstm

        return lstm.uses_previous(payload[1:])
    return payload[:1] in (bytes([_CYCLIC]), bytes([_GIVEN]))


def deflate(data: bytes) -> bytes:
    """Return raw LZMA2 of the bytes, as inside a 7-Zip archive."""
    return lzma.compress(data, format=lzma.FORMAT_RAW, filters=_filters(preset=_PRESET))


def inflate(data: bytes, size: int) -> bytes:
    """Invert `deflate`; more than `size` bytes are never made.

    Raises:
        CorruptionError: the data does not decode to exactly so many bytes.
    """
    decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=_filters())
    try:
        plain = decompressor.decompress(data, max_length=size + 1)
        whole = len(plain) == size and (decompressor.eof or not decompressor.decompress(b"", max_length=1))
    except lzma.LZMAError as error:
        raise CorruptionError(f"LZMA data does not decode: {error}") from error
    if not whole or not decompressor.eof or decompressor.unused_data:
        raise CorruptionError(f"LZMA data does not decode to exactly {size} bytes")
    return plain


def _filters(**more: Any) -> list[dict[str, Any]]:
    return [{"id": lzma.FILTER_LZMA2, "dict_size": _DICTIONARY, **more}]


def _decode_huffman(body: bytes, count: int, alphabet: int, previous: UInt8s | None) -> UInt8s:
    values = decode_huffman(body, count)
    if values.size != count:
        raise FormatError(f"symbol plane: {values.size} symbols, {count} expected")
    if count and not (values.min() >= 0 and values.max() < alphabet):
        raise FormatError(f"symbol plane: a symbol is not below {alphabet}")
    if previous is not None:
        values = (values + previous) % alphabet
    return values.astype(np.uint8)


def _width(alphabet: int) -> int:
    return max(1, (alphabet - 1).bit_length())


def _pack(plane: UInt8s, width: int) -> bytes:
    """Pack symbols bit by bit, the first one in the highest bits: with 4 bits, two labels per byte as in ExCP."""
    parts = []
    for start in range(0, plane.size, _CHUNK):
        bits = np.unpackbits(plane[start : start + _CHUNK, None], axis=1)
        parts.append(np.packbits(bits[:, 8 - width :]).tobytes())
    return b"".join(parts)


def _unpack(packed: UInt8s, count: int, width: int) -> UInt8s:
    plane = np.empty(count, dtype=np.uint8)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        first, last = start * width // 8, -(-stop * width // 8)
        bits = np.unpackbits(packed[first:last], count=(stop - start) * width).reshape(-1, width)
        padded = np.zeros((stop - start, 8), dtype=np.uint8)
        padded[:, 8 - width :] = bits
        plane[start:stop] = np.packbits(padded, axis=1)[:, 0]
    return plane
