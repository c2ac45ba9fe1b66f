"""Some tensors of a checkpoint, with as little read and decoded of its chain as they need.

The plan is made from the containers' headers, newest first: what the wanted tensors need of the last checkpoint, what those
need of the one before, until nothing uses a reference any more. Then only these sections are fetched and decoded. Everything
is compared as in a whole restore: checksums of sections, the parents' digests with each other, tensors with their digests.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from shrinkpoint.coding.decode import check_sizes, decode_planes, decode_values, required, stands_alone
from shrinkpoint.container.layout import Entry
from shrinkpoint.container.reader import ContainerReader, Header
from shrinkpoint.errors import ChainError, CorruptionError
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore

__all__ = ["Source", "decode_selected", "sources_of_run"]

_WHOLE_BYTES = 2**20
"""Containers up to this size are fetched whole: one request costs more than their bytes."""
_WHOLE_SHARE = 0.3
"""Where more of a container than this is needed, it is fetched whole: one large request instead of many small ones."""
_READERS = 8


class Source:
    """One container of a chain.

    Args:
        size: its bytes.
        fetch: gives all of them, checked.
        fetch_range: gives those from one offset (included) to another one (excluded); None where only `fetch` can.
    """

    def __init__(
        self,
        size: int,
        fetch: Callable[[], bytes],
        fetch_range: Callable[[int, int], bytes] | None = None,
    ) -> None:
        self._size, self._fetch, self._fetch_range = size, fetch, fetch_range
        self._whole: bytes | None = None
        if fetch_range is None or size <= _WHOLE_BYTES:
            self._whole = fetch()
        try:
            self._reader = ContainerReader(self._read, size)
        except CorruptionError:
            if self._whole is not None:
                raise
            self._whole = fetch()  # what was damaged on its way is right the next time
            self._reader = ContainerReader(self._read, size)

    @property
    def header(self) -> Header:
        """Everything but the sections."""
        return self._reader.header

    def entries(self, names: Collection[str]) -> list[Entry]:
        """These tensors as they are stored, in decoding order.

        Raises:
            CorruptionError: a section is damaged.
        """
        ordered = [name for name in self.header.tensors if name in names]
        if self._whole is None:
            needed = sum(self.header.tensors[name].nbytes for name in ordered)
            if needed > _WHOLE_SHARE * self._size:
                self._whole = self._fetch()
        if self._whole is not None:
            return [self._reader.entry(name) for name in ordered]
        try:
            with ThreadPoolExecutor(_READERS, thread_name_prefix="shrinkpoint-read") as pool:
                return list(pool.map(self._reader.entry, ordered))
        except CorruptionError:
            self._whole = self._fetch()
            return [self._reader.entry(name) for name in ordered]

    def _read(self, offset: int, length: int) -> bytes:
        if self._whole is not None:
            return self._whole[offset : offset + length]
        assert self._fetch_range is not None
        return self._fetch_range(offset, offset + length)


def sources_of_run(store: RunStore, manifest: Manifest) -> list[Callable[[], Source]]:
    """What opens each container of a checkpoint's chain, base first."""

    def opening(at: int) -> Callable[[], Source]:
        ref = manifest.chain[at]
        return lambda: Source(
            ref.size,
            lambda: store.fetch_blob(ref, manifest),
            lambda start, end: store.fetch_range(ref, start, end),
        )

    return [opening(at) for at in range(len(manifest.chain))]


def decode_selected(
    chain: Sequence[Callable[[], Source]],
    choose: Callable[[Header], Collection[str]],
    *,
    threads: int = 1,
) -> tuple[Header, dict[str, torch.Tensor]]:
    """Restore some tensors of a chain's last checkpoint.

    Args:
        chain: what opens each container, base first; those that nothing is needed of are not opened.
        choose: gives the names of the wanted tensors, from the last checkpoint's header.
        threads: parameters decoded side by side.

    Returns:
        The last checkpoint's header, and the wanted tensors by name, on the host.

    Raises:
        ChainError: the chain does not start with a base, or its members do not belong together.
        CorruptionError: a checksum or digest does not match.
        FormatError: a container is malformed.
    """
    newest = chain[-1]()
    header, wanted = newest.header, set(choose(newest.header))
    steps = _plan(chain, newest, wanted)
    reference: Mapping[str, ReferenceState] = {}
    for source, names in steps[:-1]:
        reference = decode_planes(source.entries(names), reference, threads)
    source, names = steps[-1]
    rows = decode_values(source.entries(names), header.step, reference, threads)
    return header, {entry.spec.name: value for entry, _, value in rows if entry.spec.name in wanted}


def _plan(
    chain: Sequence[Callable[[], Source]], newest: Source, wanted: Collection[str]
) -> list[tuple[Source, set[str]]]:
    """What is needed of each container, oldest first."""
    steps = [(newest, required(wanted, newest.header.tensors.values(), values=True))]
    _check_sizes(newest.header, steps[0][1])
    for open_source in reversed(chain[:-1]):
        later, needed = steps[-1]
        before = {name for name in needed if later.header.tensors[name].uses_reference}
        if not before:
            return steps[::-1]
        earlier = open_source()
        if later.header.parent != earlier.header.state_digest:
            raise ChainError(
                f"the checkpoint of step {later.header.step} is a delta against state {later.header.parent}, but the one"
                f" before it in the chain (step {earlier.header.step}) is {earlier.header.state_digest}"
            )
        steps.append((earlier, required(before, earlier.header.tensors.values(), values=False)))
        _check_sizes(earlier.header, steps[-1][1])
    oldest, needed = steps[-1]
    if any(oldest.header.tensors[name].uses_reference for name in needed) or oldest.header.kind != "base":
        raise ChainError(f"the chain starts with the delta of step {oldest.header.step}: its base is missing")
    return steps[::-1]


def _check_sizes(header: Header, names: Iterable[str]) -> None:
    records = [header.tensors[name] for name in names]
    check_sizes(header.step, [(record.spec, record.nbytes) for record in records if stands_alone(record)])
