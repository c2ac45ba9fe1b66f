"""What a process that is going to be killed did, on disk before it does the next thing."""

import json
import os
import time
from typing import Any

__all__ = ["Journal", "read_journal"]


class Journal:
    """Synced JSON lines that survive a kill of this process.

    Written with writev and O_DSYNC, so that faults injected into the store's write and fsync do not hit the journal.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC, 0o600)

    def write(self, event: str, **fields: object) -> None:
        """Append one line and wait until it is on disk."""
        os.writev(self._file, [json.dumps({"event": event, "at": time.time(), **fields}).encode(), b"\n"])


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The complete lines of a journal; the last one may have been torn by the kill."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        return [json.loads(line) for line in file.read().split(b"\n")[:-1]]
