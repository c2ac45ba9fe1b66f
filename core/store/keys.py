"""The names of a run's objects: relative keys, and nothing that could lead out of the run's own prefix."""

import re
import secrets

from shrinkpoint.errors import ConfigError, FormatError

FORMAT_KEY = "format.json"
COMMITTED_KEY = "committed.json"
MEMBER_KEY = "member.json"
"""What one of several stores says that it is."""
MAX_SEQ = 10**10 - 1
MAX_STEP = 10**12 - 1
STEPS_PREFIX = "steps/"
"""Of the keys of a step log in the run's own store (docs/format_steps.md)."""

_NONCE = "[0-9a-f]{16}"
_NONCE_RE = re.compile(_NONCE)
_DATA_RE = re.compile(rf"data/[0-9]{{12}}-{_NONCE}-({_NONCE})\.shrink")
_COMMIT_RE = re.compile(rf"commits/([0-9]{{10}})(?:-{_NONCE}-{_NONCE})?\.json")
_TRASH_RE = re.compile(rf"trash/[0-9]{{10}}-{_NONCE}\.json")
_PROBE_RE = re.compile(rf"probe/{_NONCE}")
_STEPS_RE = re.compile(rf"{STEPS_PREFIX}[0-9]{{8}}-{_NONCE}-[0-9]{{10}}\.steps")
_PIN_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_PIN_NAME_RE = re.compile(_PIN_NAME)
_PIN_RE = re.compile(rf"pins/({_PIN_NAME})\.json")


def new_nonce() -> str:
    """64 random bits in hexadecimal; from the operating system, so that the user's random state does not change."""
    return secrets.token_hex(8)


def is_session(text: str) -> bool:
    """Return whether ``text`` has the form of a session nonce."""
    return _NONCE_RE.fullmatch(text) is not None


def data_key(step: int, session: str) -> str:
    """Return a new key for a container; it is never handed out twice."""
    return f"data/{step:012d}-{session}-{new_nonce()}.shrink"


def is_data_key(key: str) -> bool:
    """Return whether ``key`` is exactly of the form of a container's key: no ``..``, no scheme, no root."""
    return _DATA_RE.fullmatch(key) is not None


def check_data_key(key: str) -> None:
    """Raise FormatError unless ``key`` is a container's."""
    if not is_data_key(key):
        raise FormatError(f"{key!r} is not the key of a container (data/<step>-<session>-<random>.shrink)")


def commit_key(seq: int, container_key: str | None = None) -> str:
    """Return the key of manifest number ``seq``; with ``container_key``, made unique by that container's two nonces."""
    if container_key is None:
        return f"commits/{seq:010d}.json"
    check_data_key(container_key)
    return f"commits/{seq:010d}-{container_key[len('data/') + 13 : -len('.shrink')]}.json"


def seq_of_commit(key: str) -> int | None:
    """Return the sequence number in a manifest's key, or None where ``key`` is not one."""
    match = _COMMIT_RE.fullmatch(key)
    return int(match[1]) if match else None


def trash_key(seq: int) -> str:
    """Return a new key for the copy that is kept of manifest ``seq`` while its blobs wait for their deletion."""
    return f"trash/{seq:010d}-{new_nonce()}.json"


def is_trash_key(key: str) -> bool:
    """Return whether ``key`` was made by :func:`trash_key`."""
    return _TRASH_RE.fullmatch(key) is not None


def probe_key() -> str:
    """Return a new key to try the store's put-if-absent on."""
    return f"probe/{new_nonce()}"


def is_probe_key(key: str) -> bool:
    """Return whether ``key`` was made by :func:`probe_key`."""
    return _PROBE_RE.fullmatch(key) is not None


def pin_key(name: str) -> str:
    """Return the key of pin ``name``; raises ConfigError unless that can be part of a key."""
    if _PIN_NAME_RE.fullmatch(name) is None:
        raise ConfigError(
            f"pin name {name!r}: use 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return f"pins/{name}.json"


def pin_name(key: str) -> str | None:
    """Return the name in a pin's key, or None where ``key`` is not one."""
    match = _PIN_RE.fullmatch(key)
    return match[1] if match else None


def is_own_key(key: str) -> bool:
    """Return whether a run may contain ``key``; anything else means that the prefix belongs to something else."""
    return key in (FORMAT_KEY, COMMITTED_KEY) or any(
        pattern.fullmatch(key) for pattern in (_DATA_RE, _COMMIT_RE, _TRASH_RE, _PROBE_RE, _PIN_RE, _STEPS_RE)
    )
