"""The ITMO coder: an LSTM over the 3x3 neighbourhood in the previous plane, and an arithmetic coder (arXiv 2506.12000).

Every symbol is predicted from the nine symbols around its place in the same plane of the previous checkpoint, by two LSTM
layers and a softmax. The network learns while it codes: after every 256 symbols both sides take the same step of Adam
on what has just become known. Without a previous plane all contexts are zeros, as in the paper, and only frequencies are
learned.

Both sides must agree on every probability to the last bit, for ever and on any machine, so that all of it is integers
(:mod:`shrinkpoint.entropy.lstm.network_kernels`), and every chunk is decoded again when it is written: one that does not come
back as it was, or that is no shorter for it, leaves the plane to :mod:`shrinkpoint.entropy.static.rans`.

What differs from the paper: layers are 32 units wide by default and not 512, which would take hours for a small model,
and learn faster (1/128, where the paper has 1/1000 for its 512), the embedding is one with the first layer's input
weights, and the network starts from the plane's frequencies rather than from chance. Not stated there, and chosen here:
symbols in raster order; the neighbourhood row by row with the symbol at the same place last, zeros outside of the plane;
every chunk starts anew.

The coder is here for comparison. It is slow, in both directions alike: some twenty thousand symbols a second and
thread at the default width, where neighbourhoods differ, and its time grows with the square of the width; planes of
nearly nothing but zeros take a tenth of that.

Payload (integers are little-endian, "varint" is 7 bits per byte)::

    nothing                                                  if there are no symbols
    0x00, rANS payload                                       entropy/static/rans.py, alone
    0x01, rANS payload                                       given the symbol at the same place in the previous plane
    0x02, width / 4, rate, chunk, rarities, lengths, chunks  LSTM, all contexts zero
    0x03, the same                                           LSTM given the previous plane

Rate and chunk are bytes: the learning rate is ``2^-rate``, a chunk has ``2^chunk`` symbols. Rarities are a byte per symbol
of the alphabet: how many bits it would take at its share of the plane, in 1/8. Lengths are one varint per chunk but the last. A chunk
is the CRC-32 of its symbols and the arithmetic code without its trailing zeros. Chunks do not depend on each other
nor on the number of threads.
"""

import zlib
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.static.rans import decode_symbols, encode_given
from shrinkpoint.entropy.static.tables import count_symbols, frozen
from shrinkpoint.entropy.wire import ByteReader, Payload, parts_of, write_uvarint
from shrinkpoint.errors import ConfigError, CorruptionError, FormatError
from shrinkpoint.runtime.threads import map_in_threads

if TYPE_CHECKING:
    from shrinkpoint.entropy.lstm.chunk_kernels import Learner
    from shrinkpoint.entropy.lstm.network_kernels import Curves

_ALONE, _GIVEN, _LSTM, _LSTM_GIVEN = range(4)
_MIN_WIDTH, _MAX_WIDTH = 4, 512
_MIN_RATE, _MAX_RATE = 3, 12
_MIN_CHUNK, _MAX_CHUNK = 8, 24
_MIN_SYMBOLS = 256  # below, nothing is learned before the end
_CHECKSUM = 4
_ONE = 1 << 24
_SEED = 2506_12000
_PER_BIT = 8  # a rarity is in 1/8 bit
_LOG_2_PER_RARITY = 1453635  # ln(2) / 8 in 2^-24
_MOST_RARE = 160  # 20 bits: the network's weights cannot say less


@dataclass(frozen=True, kw_only=True)
class LstmOptions:
    """Settings of the network; they are stored with every plane."""

    width: int = 32
    """Units per layer, a multiple of 4; the paper has 512."""
    rate: int = 7
    """The learning rate is 2^-rate: wide layers want a smaller one."""
    chunk: int = 18
    """A chunk has at most 2^chunk symbols: threads share the chunks, and each learns from nothing."""

    def __post_init__(self) -> None:
        ranges = {
            "width": (_MIN_WIDTH, _MAX_WIDTH),
            "rate": (_MIN_RATE, _MAX_RATE),
            "chunk": (_MIN_CHUNK, _MAX_CHUNK),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
        if self.width % 4:
            raise ConfigError(f"width must be a multiple of 4, not {self.width!r}")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How the chunks of one plane are coded."""

    options: LstmOptions
    rarity: bytes
    previous: UInt8s
    """(rows, columns), frozen; no rows where contexts are zero."""

    def code(self, offset: int, symbols: UInt8s, stream: UInt8s, decoding: bool) -> int:
        """Code one chunk; how many bytes that takes when encoding, has taken at most when decoding."""
        from shrinkpoint.entropy.lstm import chunk_kernels  # numba

        learner = new_learner(self.rarity, self.options.width, 1 << (24 - self.options.rate))
        ahead = int.from_bytes(bytes(stream[:4]).ljust(4, b"\0"), "big") if decoding else 0
        coder = np.array([0, 0xFFFFFFFF, ahead, 4 if decoding else 0])
        arguments: tuple[Any, ...] = (learner, curves(), self.previous, offset, symbols, 0, symbols.size)
        chunk_kernels.code_span(*arguments, coder, stream, decoding)
        if decoding:
            return int(coder[3]) - 3  # four bytes were read ahead, of which the encoder may have written one
        chunk_kernels.finish(coder, stream)
        return int(coder[3])


def encode_plane(
    symbols: UInt8s,
    alphabet: int,
    *,
    columns: int,
    previous: UInt8s | None = None,
    options: LstmOptions | None = None,
) -> bytes:
    """Code a plane and decode it again.

    Args:
        symbols: uint8 (n,), flat in C order, each below ``alphabet``.
        alphabet: how many symbols there are, 1..256.
        columns: the plane's columns, which divide n.
        previous: uint8 (n,), the same plane of the previous checkpoint, each below ``alphabet``; None without one.
        options: settings of the network.

    Returns:
        The payload; :func:`uses_previous` says whether decoding it needs the previous plane.
    """
    options = options or LstmOptions()
    if symbols.size == 0:
        return b""
    payload, given = encode_given(symbols, previous, alphabet)
    ordinary = bytes([_GIVEN if given else _ALONE]) + payload
    total = count_symbols(symbols, None, alphabet, 1)[0]
    if symbols.size < _MIN_SYMBOLS or np.count_nonzero(total) < 2:
        return ordinary
    plan = _Plan(
        options=options,
        rarity=rarities(total),
        previous=_matrix(previous, columns),
    )
    spans = parts_of(symbols.size, 1 << options.chunk)
    chunks = map_in_threads(lambda span: _encode_chunk(plan, symbols, span), spans)
    head = bytearray([_LSTM if previous is None else _LSTM_GIVEN])
    head += bytes([options.width // 4, options.rate, options.chunk]) + plan.rarity
    parts: list[bytes] = []
    for chunk in chunks:
        if chunk is None:
            return ordinary
        parts.append(chunk)
    for chunk in parts[:-1]:
        write_uvarint(head, len(chunk))
    return min(ordinary, bytes(head) + b"".join(parts), key=len)


def decode_plane(
    payload: Payload,
    size: int,
    alphabet: int,
    *,
    columns: int,
    previous: UInt8s | None = None,
) -> UInt8s:
    """Inverse of :func:`encode_plane`.

    Args:
        payload: the bytes of :func:`encode_plane`, all of them and nothing else.
        size: how many symbols there are; what is allocated is that and a network for each thread.
        alphabet: as given to the encoder.
        columns: as given to the encoder.
        previous: as given to the encoder; not looked at where the payload does not need it.

    Returns:
        uint8 (size,), each below ``alphabet``.

    Raises:
        FormatError: the payload is malformed, or needs a previous plane and there is none.
        CorruptionError: the payload is well-formed, but a chunk does not decode to the symbols that were coded.
    """
    reader = ByteReader(payload, "LSTM payload")
    given = uses_previous(payload)
    if given and previous is None:
        raise FormatError("LSTM payload: it is coded given a previous plane, and there is none")
    if size == 0:
        reader.finish()
        return np.zeros(0, dtype=np.uint8)
    mode = reader.byte()
    if mode in (_ALONE, _GIVEN):
        contexts = (previous, alphabet) if given else (None, 1)
        return decode_symbols(reader.rest(), contexts[0], size, alphabet, contexts[1])
    if mode not in (_LSTM, _LSTM_GIVEN):
        raise FormatError(f"LSTM payload: unknown mode {mode}")
    plan = _read_plan(reader, alphabet, _matrix(previous if given else None, columns))
    count = -(-size >> plan.options.chunk)
    if count * (_CHECKSUM + 1) > reader.remaining + 1:  # all but one chunk have a length, too
        raise FormatError(f"LSTM payload: {reader.remaining} bytes are too few for {count} chunks")
    spans = parts_of(size, 1 << plan.options.chunk)
    lengths = [reader.uvarint(reader.remaining, "chunk length") for _ in spans[:-1]]
    chunks = [reader.take(length) for length in lengths] + [reader.rest()]
    out = np.empty(size, dtype=np.uint8)

    def decode(work: tuple[slice, memoryview]) -> None:
        span, chunk = work
        _decode_chunk(plan, chunk, span.start, out[span])

    map_in_threads(decode, zip(spans, chunks, strict=True))
    return out


def uses_previous(payload: Payload) -> bool:
    """Return whether a payload of :func:`encode_plane` was coded given the previous plane."""
    return len(payload) > 0 and payload[0] in (_GIVEN, _LSTM_GIVEN)


def _matrix(previous: UInt8s | None, columns: int) -> UInt8s:
    plane = np.zeros(0, dtype=np.uint8) if previous is None else previous
    return frozen(plane.reshape(-1, columns))


def _encode_chunk(plan: _Plan, symbols: UInt8s, span: slice) -> bytes | None:
    """Return a chunk that decodes to its symbols; None if for any reason it does not."""
    chunk = symbols[span].copy()
    stream = np.empty(2 * chunk.size + chunk.size // 64 + 16, dtype=np.uint8)
    used = plan.code(span.start, chunk, stream, decoding=False)
    coded = stream[:used].tobytes().rstrip(b"\0") if used <= stream.size else b""
    again = np.empty_like(chunk)
    plan.code(span.start, again, np.frombuffer(bytearray(coded), dtype=np.uint8), decoding=True)
    if not np.array_equal(again, chunk):
        return None
    return zlib.crc32(chunk.data).to_bytes(_CHECKSUM, "little") + coded


def _decode_chunk(plan: _Plan, chunk: memoryview, offset: int, out: UInt8s) -> None:
    reader = ByteReader(chunk, "LSTM chunk")
    checksum = int.from_bytes(reader.take(_CHECKSUM), "little")
    stream = np.frombuffer(bytearray(reader.rest()), dtype=np.uint8)
    limit = plan.code(offset, out, stream, decoding=True)
    if stream.size > limit:
        raise CorruptionError(f"LSTM chunk: {stream.size} bytes, of which {limit} at most are symbols")
    if zlib.crc32(out.data) != checksum:
        raise CorruptionError("LSTM chunk: it does not decode to the symbols whose checksum it has")


def _read_plan(reader: ByteReader, alphabet: int, previous: UInt8s) -> _Plan:
    try:
        options = LstmOptions(width=4 * reader.byte(), rate=reader.byte(), chunk=reader.byte())
    except ConfigError as error:
        raise FormatError(f"LSTM payload: {error}") from error
    rarity = bytes(reader.take(alphabet))
    if max(rarity) > _MOST_RARE:
        raise FormatError(f"LSTM payload: a rarity of {max(rarity)} is not in this format")
    return _Plan(options=options, rarity=rarity, previous=previous)


@lru_cache(maxsize=1)
def curves() -> "Curves":
    """Return the network's tables, by decimal arithmetic that is exact to the last digit everywhere."""
    from shrinkpoint.entropy.lstm.network_kernels import Curves  # numba

    with localcontext() as context:
        context.prec = 25
        powers = [(Decimal(-i) / 64).exp() for i in range(1025)]
        above = [int((32768 / (1 + power)).to_integral_value()) for power in powers[:513]]
        decay = [int((_ONE * power).to_integral_value()) for power in powers]
    sigmoid = [32768 - value for value in above[:0:-1]] + above
    return Curves(np.array(sigmoid, dtype=np.int32), np.array(decay, dtype=np.int32))


def rarities(counts: Int64s) -> bytes:
    """For each symbol how many bits it would take at its share of the plane, in 1/8, rounded down; at most 160."""
    total = int(counts.sum())
    return bytes(
        min(((total**_PER_BIT // int(count) ** _PER_BIT).bit_length() - 1), _MOST_RARE)
        if count
        else _MOST_RARE
        for count in counts
    )


def new_learner(rarity: bytes, width: int, rate: int) -> "Learner":
    """Return a network that has seen nothing but how rare each symbol is.

    Args:
        rarity: of each symbol, as `rarities` gives it.
        width: units per layer, a multiple of 4.
        rate: learning rate in 2^-24.
    """
    from shrinkpoint.entropy.lstm.chunk_kernels import Learner  # numba
    from shrinkpoint.entropy.lstm.network_kernels import GATES, LAYERS, Network

    alphabet, gates = len(rarity), GATES * width
    shapes = (
        (alphabet, gates),
        (LAYERS, width, gates),
        (width, gates),
        (gates,),
        (width, alphabet),
        (alphabet,),
    )
    sizes = [int(np.prod(shape)) for shape in shapes]

    def views(flat: npt.NDArray[Any]) -> Network:
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return Network(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))

    weights = np.zeros(sum(sizes), dtype=np.int32)
    gradients, squares = np.zeros(weights.size, dtype=np.int64), np.zeros(weights.size, dtype=np.int64)
    net = views(weights)
    random = _uniform(weights.size)
    # about sqrt(6 / (5 width)): Glorot's range for a matrix from the width to four of it
    spread = int(np.sqrt(np.float64(6 * _ONE * _ONE // (5 * width))))
    weights[: sum(sizes[:3])] = random[: sum(sizes[:3])] * spread >> 24
    # a gate that forgets half of everything at every step has nothing to learn from at first
    net.entry[:, width : 2 * width] += _ONE
    net.bias[width : 2 * width] += _ONE
    net.prior[:] = -_LOG_2_PER_RARITY * np.frombuffer(rarity, dtype=np.uint8).astype(np.int32)
    return Learner(net, views(gradients), weights, gradients, squares, rate)


def _uniform(count: int) -> Int64s:
    """Numbers from -2^24 to 2^24 by SplitMix64, which is the same everywhere."""
    with np.errstate(over="ignore"):
        x = np.uint64(_SEED) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(39)).astype(np.int64) - _ONE
