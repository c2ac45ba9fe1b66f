"""A real S3 server for tests: Ceph's RADOS gateway over one monitor and one OSD that stores in memory.

Debian packages: ``radosgw ceph-mon ceph-osd ceph-common``. Start-up takes one to three seconds, given the short
Paxos intervals below (13 s without them). cephx keys are needed: with authentication off, radosgw hangs on EACCES.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from pathlib import Path
from types import TracebackType

from support.s3 import S3Server, free_port

__all__ = ["PROGRAMS", "CephGateway", "missing_programs"]

PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool")

_CONF = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
public addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
run dir = {home}/run
admin socket = {home}/run/$name.asok
pid file = {home}/run/$name.pid
log file = {home}/$name.log
keyring = {home}/keyring
ms bind msgr1 = false
mon data avail crit = 1
paxos propose interval = 0.02
paxos min wait = 0.01
[mon.a]
mon data = {home}/mon
mon initial members = a
[osd.0]
keyring = {home}/osd/keyring
osd data = {home}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
memstore page set = false
[client.admin]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {home}/rgw
rgw dns name = localhost
rgw enable apis = s3, admin
rgw realm reload = 0
"""


def missing_programs() -> list[str]:
    """The programs that are not on PATH."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class CephGateway:
    """A cluster in ``home`` that lives as long as the ``with`` block."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._conf = home / "ceph.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._mon_port = free_port()
        self.server = S3Server(
            host="127.0.0.1", port=free_port(), access_key="shrinkpoint-test", secret_key=uuid.uuid4().hex
        )

    def __enter__(self) -> S3Server:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self.server

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        for folder in ("mon", "osd", "run", "rgw"):
            (self._home / folder).mkdir(parents=True)
        fsid = str(uuid.uuid4())
        self._conf.write_text(
            _CONF.format(fsid=fsid, home=self._home, mon_port=self._mon_port, port=self.server.port)
        )
        self._start_monitor(fsid)
        self._start_osd()
        self._daemon("radosgw", "-n", "client.admin")
        self._wait_for_port(self.server.port)
        self._call(
            *("radosgw-admin", "user", "create", "--uid=test", "--display-name=test"),
            f"--access-key={self.server.access_key}",
            f"--secret-key={self.server.secret_key}",
        )

    def _start_monitor(self, fsid: str) -> None:
        keyring, monmap = str(self._home / "keyring"), str(self._home / "monmap")
        caps = [part for service in ("mon", "osd", "mgr") for part in ("--cap", service, "allow *")]
        self._call(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
        )
        self._call("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *caps)
        address = f"[v2:127.0.0.1:{self._mon_port}]"
        self._call("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", address, monmap)
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a")
        self._wait_for_port(self._mon_port)

    def _start_osd(self) -> None:
        osd = str(uuid.uuid4())
        key = self._call("ceph-authtool", "--gen-print-key").strip()
        secret = self._home / "osd-key.json"
        secret.write_text(json.dumps({"cephx_secret": key}))
        self._call("ceph", "osd", "new", osd, "-i", str(secret))
        (self._home / "osd" / "keyring").write_text(f"[osd.0]\n\tkey = {key}\n")
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd, "--key", key)  # the uuid of `osd new`
        self._daemon("ceph-osd", "-i", "0")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self._conf)}

    def _call(self, *command: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(
            command,
            check=False,
            env=self._environment(),
            cwd=self._home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def _daemon(self, *command: str) -> None:
        """Start a daemon in the foreground, as our child: it can be stopped by what we hold, whatever happens."""
        with (self._home / f"{command[0]}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [*command, "-f"],
                    env=self._environment(),
                    cwd=self._home,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,  # a Ctrl-C meant for pytest reaches us first
                )
            )

    def _wait_for_port(self, port: int, seconds: float = 60.0) -> None:
        daemon = self._daemons[-1]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if daemon.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.02)
        output = (self._home / f"{Path(str(daemon.args[0])).name}.out").read_text(errors="replace")  # type: ignore[index]
        raise RuntimeError(f"{daemon.args!r} does not listen on port {port}: {output[-2000:]}")

    def _stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()  # nothing of this cluster is to be kept
        for daemon in self._daemons:
            daemon.wait()
        self._daemons.clear()
