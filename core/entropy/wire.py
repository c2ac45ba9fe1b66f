"""Reading and writing the small headers of coded payloads, with every length checked before it is used."""

from shrinkpoint.errors import FormatError

Payload = bytes | bytearray | memoryview

_MAX_UVARINT_BYTES = 9  # 63 bits: no length in a payload needs more, and the value stays a C int64


def parts_of(count: int, most: int) -> list[slice]:
    """Cut so many elements into parts of `most` elements, the last one of fewer."""
    return [slice(start, min(start + most, count)) for start in range(0, count, most)]


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
