"""Does this store honour put-if-absent? Some servers accept the condition and ignore it, or check it without a lock."""

from concurrent.futures import ThreadPoolExecutor

from shrinkpoint.errors import StoreError
from shrinkpoint.store.keys import new_nonce, probe_key
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.warn import warn

__all__ = ["honours_put_if_absent"]

_RACERS = 8


def honours_put_if_absent(objects: ObjectStore) -> bool:
    """Whether exactly one of several writers of one new key wins, first one after the other, then at once.

    A race that is lost only sometimes may pass; an ignored condition never does. Costs 13 small requests; where the answer
    is known it costs one, because that the store can be written to must be known before training starts.

    Raises:
        StoreError: The store could not be written to at all.
    """
    sequential, race = probe_key(), probe_key()
    if objects.create_is_atomic is not None:
        objects.put(sequential, b"")
        _remove(objects, [sequential])
        return objects.create_is_atomic
    try:
        if not _wins(objects, sequential) or _wins(objects, sequential):
            return False
        with ThreadPoolExecutor(_RACERS) as pool:
            return sum(pool.map(lambda _: _wins(objects, race), range(_RACERS))) == 1
    finally:
        _remove(objects, [sequential, race])


def _wins(objects: ObjectStore, key: str) -> bool:
    """Whether this attempt created ``key``; a refusal counts as a win when a lost response hid that it was one."""
    mine = new_nonce().encode()
    return objects.put_if_absent(key, mine) or objects.get(key, max_size=len(mine)) == mine


def _remove(objects: ObjectStore, keys: list[str]) -> None:
    try:
        objects.delete(keys)
    except StoreError as error:
        warn(f"{error}: saving works, but old checkpoints cannot be removed from {objects.display}")
