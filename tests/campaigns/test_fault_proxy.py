"""The fault proxy does to a request exactly what its rule says, and nothing to the others."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.fault_proxy import FaultProxy
from support.faults import (
    CorruptDown,
    CorruptUp,
    DropResponse,
    Hang,
    Latency,
    ResetBefore,
    ResetUpload,
    Rule,
    Status,
    Truncate,
    Zombie,
)

BODY = bytes(range(256)) * 400


class _Server(ThreadingHTTPServer):
    """Stores what is PUT to a path and gives it back."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.served: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # resets are what these tests are about


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        body = self.rfile.read(size)
        if len(body) == size:
            self.server.objects[self.path] = body
            self._answer(200, b"")

    def do_GET(self) -> None:
        body = self.server.objects.get(self.path)
        self._answer(404 if body is None else 200, body or b"")

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes) -> None:
        self.server.served.append(f"{self.command} {self.path}")
        self.send_response(status)
        chunked = "chunked" in self.path
        self.send_header(
            *(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body))))
        )
        self.end_headers()
        if self.command == "HEAD":
            return
        pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)] if chunked else [body]
        for piece in pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: _Server) -> Iterator[FaultProxy]:
    with FaultProxy(("127.0.0.1", server.server_port)) as proxy:
        yield proxy


def _ask(proxy: FaultProxy, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    try:
        client.request(method, path, body)
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


@pytest.mark.parametrize("path", ["/plain", "/chunked"])
def test_passes_untouched(server: _Server, proxy: FaultProxy, path: str) -> None:
    assert _ask(proxy, "PUT", path, BODY) == (200, b"")
    assert _ask(proxy, "GET", path) == (200, BODY)
    assert _ask(proxy, "HEAD", path) == (200, b"")
    assert [entry.line for entry in proxy.log] == [f"PUT {path}", f"GET {path}", f"HEAD {path}"]


def test_keeps_a_connection(server: _Server, proxy: FaultProxy) -> None:
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    client.connect()
    first = client.sock
    for body in (b"one", b"two"):
        client.request("PUT", "/a", body)
        assert client.getresponse().read() == b""
    assert client.sock is first
    assert server.objects["/a"] == b"two"
    client.close()


def test_sends_100_continue_itself(server: _Server, proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(b"PUT /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(b"abc")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    assert server.objects["/a"] == b"abc"


def test_status_answers_without_the_server(server: _Server, proxy: FaultProxy) -> None:
    proxy.add(Rule("^PUT", Status(500, "InternalError")))
    status, body = _ask(proxy, "PUT", "/a", BODY)
    assert status == 500
    assert b"<Code>InternalError</Code>" in body
    assert server.served == []
    assert _ask(proxy, "PUT", "/a", BODY) == (200, b"")


@pytest.mark.parametrize("fault", [ResetBefore(), ResetUpload(1000), Hang(0.05)])
def test_server_never_has_the_object(server: _Server, proxy: FaultProxy, fault: object) -> None:
    proxy.add(Rule("^PUT", fault))  # type: ignore[arg-type]
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        _ask(proxy, "PUT", "/a", BODY)
    assert server.objects == {}


def test_dropped_response_is_carried_out(server: _Server, proxy: FaultProxy) -> None:
    proxy.add(Rule("^PUT", DropResponse()))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        _ask(proxy, "PUT", "/a", BODY)
    assert server.objects["/a"] == BODY


def test_zombie_arrives_later(server: _Server, proxy: FaultProxy) -> None:
    proxy.add(Rule("^PUT", Zombie(0.3)))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        _ask(proxy, "PUT", "/a", b"late")
    assert _ask(proxy, "PUT", "/a", b"early") == (200, b"")
    proxy.settle()
    assert server.objects["/a"] == b"late"


@pytest.mark.parametrize("path", ["/plain", "/chunked"])
def test_truncate_cuts_the_answer(server: _Server, proxy: FaultProxy, path: str) -> None:
    server.objects[path] = BODY
    proxy.add(Rule("^GET", Truncate(1234)))
    with pytest.raises(http.client.IncompleteRead) as caught:
        _ask(proxy, "GET", path)
    assert BODY.startswith(caught.value.partial)
    assert len(caught.value.partial) <= 1234


@pytest.mark.parametrize("path", ["/plain", "/chunked"])
@pytest.mark.parametrize("offset", [0, 5, 70_000])
def test_corruption_flips_one_bit(server: _Server, proxy: FaultProxy, path: str, offset: int) -> None:
    bad = BODY[:offset] + bytes([BODY[offset] ^ 1]) + BODY[offset + 1 :]
    proxy.add(Rule("^GET", CorruptDown(offset)))
    proxy.add(Rule("^PUT /up", CorruptUp(offset)))
    server.objects[path] = BODY
    assert _ask(proxy, "GET", path) == (200, bad)
    _ask(proxy, "PUT", "/up", BODY)
    assert server.objects["/up"] == bad


def test_latency_changes_nothing(server: _Server, proxy: FaultProxy) -> None:
    proxy.add(Rule("^PUT", Latency(0.05)))
    assert _ask(proxy, "PUT", "/a", BODY) == (200, b"")
    assert server.objects["/a"] == BODY


def test_skip_times_and_order_of_rules(server: _Server, proxy: FaultProxy) -> None:
    second = proxy.add(Rule("^GET /a", Status(), skip=1, times=2))
    other = proxy.add(Rule("^GET", Status(501, "Other"), skip=2, times=None))
    assert [_ask(proxy, "GET", "/a")[0] for _ in range(6)] == [404, 503, 503, 404, 501, 501]
    assert (second.hits, other.hits) == (2, 2)


def test_probability_is_seeded(server: _Server) -> None:
    def draws(seed: int) -> list[int]:
        with FaultProxy(("127.0.0.1", server.server_port), seed=seed) as proxy:
            proxy.add(Rule("", lambda rng: Status(500 + rng.randrange(3)), times=None, probability=0.5))
            return [_ask(proxy, "GET", "/a")[0] for _ in range(24)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert {404, 500, 501, 502} == set(draws(1))


@pytest.mark.parametrize(("method", "body", "answer"), [("PUT", BODY, b""), ("GET", None, BODY)])
def test_no_more_bytes_pass_than_the_link_carries(
    server: _Server, method: str, body: bytes | None, answer: bytes
) -> None:
    server.objects = {"/a": BODY, "/b": BODY}
    with (
        FaultProxy(("127.0.0.1", server.server_port), rate=1e6) as slow,
        ThreadPoolExecutor(2) as pool,  # over two connections together
    ):
        began = time.monotonic()
        answers = list(pool.map(lambda path: _ask(slow, method, path, body), ("/a", "/b")))
        assert answers == [(200, answer)] * 2
        assert time.monotonic() - began >= 2 * len(BODY) / 1e6
