"""An HTTP/1.1 proxy that breaks chosen requests in chosen ways.

It sits between an S3 client and an S3 server, so the client's real retries, time-outs and checksums are what gets
tested. ``Host`` passes through unchanged, which keeps SigV4 signatures valid. It understands messages, hence can say
"only the PUT of a manifest" or "the server commits, and the client never hears of it".
"""

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, final

from support.faults import (
    CorruptDown,
    CorruptUp,
    DropResponse,
    Fault,
    Hang,
    Latency,
    ResetBefore,
    ResetUpload,
    Rule,
    Status,
    Truncate,
    Zombie,
)

__all__ = ["FaultProxy", "LoggedRequest"]

_LIMIT = 1 << 20
_PIECE = 1 << 16


class LoggedRequest(NamedTuple):
    """One request that reached the proxy."""

    at: float
    line: str
    fault: Fault | None


class _Piece(NamedTuple):
    """A part of a body: framing, payload, framing (the framing is empty unless the body is chunked)."""

    before: bytes
    payload: bytes
    after: bytes


class _Cut(Exception):
    """A body was cut where the fault wanted it."""


class _Head(NamedTuple):
    raw: bytes
    first: str
    fields: dict[str, str]

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> "_Head":
        raw = await reader.readuntil(b"\r\n\r\n")
        first, *rest = raw.decode("latin1").rstrip("\r\n").split("\r\n")
        pairs = (line.partition(":") for line in rest)
        return cls(raw, first, {name.lower(): value.strip() for name, _, value in pairs})

    @property
    def status(self) -> int:
        return int(self.first.split(" ", 2)[1])

    def has_body(self, method: str) -> bool:
        """Whether this answer to ``method`` is followed by a body."""
        return method != "HEAD" and self.status not in (204, 304)

    def keeps_alive(self, method: str) -> bool:
        """Whether the connection that carried this answer can carry another."""
        framed = "content-length" in self.fields or "transfer-encoding" in self.fields
        return "close" not in self.fields.get("connection", "").lower() and (
            framed or not self.has_body(method)
        )

    def without(self, name: str) -> bytes:
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(line for line in lines if not line.lower().startswith(name.encode() + b":"))


async def _body(
    reader: asyncio.StreamReader, head: _Head, *, until_close: bool = False
) -> AsyncIterator[_Piece]:
    if head.fields.get("transfer-encoding", "").lower() == "chunked":
        while True:
            size = await reader.readuntil(b"\r\n")
            length = int(size.split(b";")[0], 16)
            if length == 0:
                trailer = await reader.readuntil(b"\r\n")
                while not trailer.endswith(b"\r\n\r\n") and trailer != b"\r\n":
                    trailer += await reader.readuntil(b"\r\n")
                yield _Piece(size, b"", trailer)
                return
            yield _Piece(size, await reader.readexactly(length), await reader.readexactly(2))
    if "content-length" in head.fields:
        left = int(head.fields["content-length"])
        while left:
            data = await reader.read(min(left, _PIECE))
            if not data:
                raise ConnectionError("the peer closed in the middle of a body")
            left -= len(data)
            yield _Piece(b"", data, b"")
    elif until_close:
        while data := await reader.read(_PIECE):
            yield _Piece(b"", data, b"")


def _flip(piece: _Piece, start: int, offset: int | None) -> _Piece:
    """The piece, whose payload begins at ``start`` of the body, with the bit at ``offset`` flipped."""
    if offset is None or not start <= offset < start + len(piece.payload):
        return piece
    payload = bytearray(piece.payload)
    payload[offset - start] ^= 1
    return piece._replace(payload=bytes(payload))


async def _copy(
    body: AsyncIterator[_Piece],
    write: Callable[[bytes], Awaitable[None]],
    *,
    cut: int | None = None,
    flip: int | None = None,
) -> None:
    """Copy a body; raise _Cut once ``cut`` payload bytes went through."""
    done = 0
    async for piece in body:
        if cut is not None and done + len(piece.payload) >= cut:
            await write(piece.before + piece.payload[: cut - done])
            raise _Cut
        await write(b"".join(_flip(piece, done, flip)))
        done += len(piece.payload)
    if cut is not None:
        raise _Cut


async def _drain(body: AsyncIterator[_Piece]) -> bytes:
    return b"".join([b"".join(piece) async for piece in body])


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a dying peer or a firewall does."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _writer_of(
    writer: asyncio.StreamWriter, link: "_Link | None" = None
) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        if link is not None:
            await link.carry(len(data))
        writer.write(data)
        await writer.drain()

    return write


class _Link:
    """One direction of a link of so many bytes a second, which all connections share."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free = 0.0

    async def carry(self, count: int) -> None:
        """Wait until so many bytes have passed."""
        if self._rate is not None:
            now = asyncio.get_running_loop().time()
            self._free = max(now, self._free) + count / self._rate
            await asyncio.sleep(self._free - now)


@final
class FaultProxy:
    """A proxy before ``upstream`` (host, port) on a free port of 127.0.0.1, in a thread of its own.

    Rules may be changed while it runs; the first rule that picks a request decides. ``seed`` fixes the draws of rules
    with a probability (the order in which concurrent requests arrive is not fixed by it). ``rate`` is how many bytes a
    second pass in each direction, over all connections together; None: as many as can.
    """

    def __init__(self, upstream: tuple[str, int], *, seed: int | str = 0, rate: float | None = None) -> None:
        self._upstream = upstream
        self._up, self._down = _Link(rate), _Link(rate)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._log: list[LoggedRequest] = []
        self._zombies: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LIMIT)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, rule: Rule) -> Rule:
        """Add a rule after the others and return it."""
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules and the log."""
        with self._lock:
            self._rules = []
            self._log = []

    @property
    def log(self) -> list[LoggedRequest]:
        """The requests so far, in their order of arrival."""
        with self._lock:
            return list(self._log)

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until every zombie request was delivered."""

        async def wait() -> None:
            await asyncio.gather(*self._zombies, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(timeout)

    def close(self) -> None:
        """Stop serving; connections are closed, zombies that still wait are never delivered."""
        if self._loop.is_closed():
            return

        async def stop() -> None:
            self._server.close()
            tasks = [*self._zombies, *self._clients]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _pick(self, line: str) -> Fault | None:
        with self._lock:
            picks = (rule.pick(line, self._rng) for rule in self._rules)
            fault = next((pick for pick in picks if pick is not None), None)
            self._log.append(LoggedRequest(time.time(), line, fault))
        return fault

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            _reset(writer)  # either side went away, or the proxy closes: the other side must not wait
        finally:
            self._clients.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; True where the connection can take another."""
        request = await _Head.read(reader)
        method, target, _ = request.first.split(" ", 2)
        fault = self._pick(f"{method} {target}")
        if "expect" in request.fields:
            await _writer_of(writer)(b"HTTP/1.1 100 Continue\r\n\r\n")
        if isinstance(fault, ResetBefore):
            _reset(writer)
            return False
        if isinstance(fault, Status | Hang | Zombie):
            body = await _drain(_body(reader, request))
            return await self._refuse(fault, method, request.without("expect") + body, writer)
        if isinstance(fault, Latency):
            await asyncio.sleep(fault.seconds)
        return await self._relay(method, request, fault, reader, writer)

    async def _refuse(self, fault: Fault, method: str, message: bytes, writer: asyncio.StreamWriter) -> bool:
        """Faults that keep a whole request from the server, for now or for ever."""
        if isinstance(fault, Status):
            xml = f'<?xml version="1.0"?><Error><Code>{fault.name}</Code><Message>injected</Message></Error>'
            head = f"HTTP/1.1 {fault.code} {fault.name}\r\nContent-Type: application/xml\r\n"
            head += f"Content-Length: {len(xml)}\r\n\r\n"
            await _writer_of(writer)((head + ("" if method == "HEAD" else xml)).encode())
            return True
        if isinstance(fault, Hang):
            await asyncio.sleep(fault.seconds)
        _reset(writer)
        if isinstance(fault, Zombie):
            task = asyncio.ensure_future(self._deliver(message, fault.seconds))
            self._zombies.add(task)
            task.add_done_callback(self._zombies.discard)
        return False

    async def _deliver(self, message: bytes, delay: float) -> None:
        await asyncio.sleep(delay)
        reader, writer = await asyncio.open_connection(*self._upstream, limit=_LIMIT)
        try:
            await _writer_of(writer)(message)
            while (await _Head.read(reader)).status == 100:
                pass
        finally:
            writer.close()

    async def _relay(
        self,
        method: str,
        request: _Head,
        fault: Fault | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        up_reader, up_writer = await asyncio.open_connection(*self._upstream, limit=_LIMIT)
        try:
            up = _writer_of(up_writer, self._up)
            await up(request.without("expect"))
            await _copy(
                _body(reader, request),
                up,
                cut=fault.after if isinstance(fault, ResetUpload) else None,
                flip=fault.offset if isinstance(fault, CorruptUp) else None,
            )
            answer = await _Head.read(up_reader)
            while answer.status == 100:
                answer = await _Head.read(up_reader)
            if isinstance(fault, DropResponse):
                _reset(writer)
                return False
            await self._answer(method, answer, fault, up_reader, writer)
        except _Cut:
            if isinstance(fault, ResetUpload):
                _reset(up_writer)
                _reset(writer)
            return False
        finally:
            up_writer.close()
        return answer.keeps_alive(method)

    async def _answer(
        self,
        method: str,
        answer: _Head,
        fault: Fault | None,
        up: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        down = _writer_of(writer, self._down)
        await down(answer.raw)
        if not answer.has_body(method):
            return
        await _copy(
            _body(up, answer, until_close=True),
            down,
            cut=fault.after if isinstance(fault, Truncate) else None,
            flip=fault.offset if isinstance(fault, CorruptDown) else None,
        )
