"""What a hostile author, or a broken disk, makes of bytes and of JSON."""

import random
from typing import Any

__all__ = ["mutate", "mutate_json"]

PIECES = [b"", b"\0", b"\xff" * 8, b"[", b"]", b"{}", b"null", b"-1", b"1e999", b"9" * 30, b'"$":', b'"tensor"', b'"',
          b'"set"', b'"items":', b"\\ud800", b",", b"281474976710656", b"true", b'"float32"', b"complex128"]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: bits flipped, bytes cut, moved, doubled or replaced by telling ones."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(mutated) + 1)
        end = min(len(mutated), start + rng.choice([1, 1, 2, 8, 50, 1000]))
        kind = rng.randrange(6)
        if kind == 0 and start < len(mutated):
            mutated[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del mutated[start:end]
        elif kind == 2:
            mutated[start:start] = mutated[start:end]
        elif kind == 3:
            mutated[start:end] = rng.randbytes(end - start)
        elif kind == 4:
            mutated[start:end] = rng.choice(PIECES)
        else:
            at = rng.randrange(len(mutated) + 1)
            mutated[at:at] = mutated[start:end]
    return bytes(mutated)


def mutate_json(node: Any, rng: random.Random) -> Any:
    """The JSON with one value, somewhere in it, replaced, removed or moved."""
    if not isinstance(node, (dict, list)) or not node or rng.random() < 0.15:
        others = [None, True, -1, 0, 2**48, 2**63, 0.5, "", "float32", "$", [], {}, [node], {"$": node}]
        return rng.choice(others)
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    changed = node.copy()
    if rng.random() < 0.1:
        del changed[key]
    else:
        changed[key] = mutate_json(node[key], rng)
    return changed
