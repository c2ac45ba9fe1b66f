"""Reading and writing the small headers of coded payloads, with every length checked before it is used."""

from shrinkpoint.errors import FormatError

__all__ = ["BitReader", "BitWriter", "ByteReader", "Payload", "write_uvarint"]

Payload = bytes | bytearray | memoryview

_MAX_UVARINT_BYTES = 9  # 63 bits: no length in a payload needs more, and the value stays a C int64


def write_uvarint(out: bytearray, value: int) -> None:
    """Append ``value`` (0 <= value < 2^63) to ``out``: 7 bits per byte, low bits first, top bit = "more follows"."""
    if not 0 <= value < 1 << 63:
        raise ValueError(f"a varint holds 0 <= value < 2^63, got {value}")
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


class ByteReader:
    """A cursor over a payload that raises :class:`~shrinkpoint.errors.FormatError` instead of reading past its end.

    Args:
        payload: the bytes; they are not copied.
        what: name of the payload in error messages.
    """

    def __init__(self, payload: Payload, what: str) -> None:
        self._view = memoryview(payload).cast("B")
        self._position = 0
        self.what = what

    @property
    def remaining(self) -> int:
        """How many bytes have not been read."""
        return len(self._view) - self._position

    def take(self, length: int) -> memoryview:
        """Return the next ``length`` bytes without copying them."""
        if length > self.remaining:
            raise FormatError(f"{self.what}: {length} bytes expected, {self.remaining} are left")
        start = self._position
        self._position += length
        return self._view[start : self._position]

    def byte(self) -> int:
        """Return the next byte as an integer."""
        return self.take(1)[0]

    def uvarint(self, limit: int, field: str) -> int:
        """Return the next varint, which must not exceed ``limit``."""
        value = 0
        for index in range(_MAX_UVARINT_BYTES):
            byte = self.byte()
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                if value > limit:
                    raise FormatError(f"{self.what}: {field} is {value}, at most {limit} is possible")
                return value
        raise FormatError(f"{self.what}: {field} is a varint of more than {_MAX_UVARINT_BYTES} bytes")

    def rest(self) -> memoryview:
        """Return everything that has not been read."""
        return self.take(self.remaining)

    def finish(self) -> None:
        """Raise unless every byte has been read."""
        if self.remaining:
            raise FormatError(f"{self.what}: {self.remaining} bytes follow the end of the data")


class BitWriter:
    """Fields of so many bits each, low bits first, the first field in a byte's low bits."""

    def __init__(self) -> None:
        self._bits: list[int] = []

    def __len__(self) -> int:
        return len(self._bits)

    def put(self, value: int, width: int) -> None:
        """Append ``value``, which is below ``2 ** width``."""
        self._bits += [value >> place & 1 for place in range(width)]

    def put_rice(self, value: int, low: int) -> None:
        """Append a Rice code: ``value >> low`` ones, a zero, then the ``low`` lowest bits."""
        self._bits += [1] * (value >> low) + [0]
        self.put(value & ((1 << low) - 1), low)

    def to_bytes(self) -> bytes:
        """All fields, filled up with zeros to whole bytes."""
        padded = self._bits + [0] * (-len(self._bits) % 8)
        octets = [padded[start : start + 8] for start in range(0, len(padded), 8)]
        return bytes(sum(bit << place for place, bit in enumerate(octet)) for octet in octets)


class BitReader:
    """Inverse of `BitWriter`: takes bytes from a reader as they are needed."""

    def __init__(self, reader: ByteReader) -> None:
        self._reader = reader
        self._bits = self._filled = 0

    def take(self, width: int) -> int:
        """Return the next ``width`` bits as an integer."""
        while self._filled < width:
            self._bits |= self._reader.byte() << self._filled
            self._filled += 8
        value = self._bits & ((1 << width) - 1)
        self._bits >>= width
        self._filled -= width
        return value

    def take_rice(self, low: int, limit: int) -> int:
        """Return the next Rice code, which must not exceed ``limit``."""
        high = 0
        while True:
            ones = (~self._bits & self._bits + 1).bit_length() - 1  # a byte at a time: hostile codes are long
            high += ones
            if high << low > limit:
                raise FormatError(f"{self._reader.what}: a Rice code is above {limit}")
            if ones < self._filled:
                break
            self._bits, self._filled = self._reader.byte(), 8
        self.take(ones + 1)
        value = high << low | self.take(low)
        if value > limit:
            raise FormatError(f"{self._reader.what}: a Rice code is above {limit}")
        return value

    def finish(self) -> None:
        """Raise unless what fills the last byte is zero."""
        if self._bits:
            raise FormatError(f"{self._reader.what}: the bits behind the last field are not zero")
