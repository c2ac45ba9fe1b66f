"""A checkpoint, or some of its tensors, with as little read and decoded of its chain as they need.

The plan is made from the containers' headers, newest first: what the wanted tensors need of the last checkpoint, what those
need of the one before, until nothing uses a reference any more. Then only these sections are fetched, those of one checkpoint while
the one before is decoded. Everything is compared: checksums of what is read, the parents' digests with each other, the last
checkpoint's with its manifest, and tensors with their digests.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import torch

from shrinkpoint.coding.decode import Row, check_sizes, decode_planes, decode_values, required
from shrinkpoint.coding.grouping import groups_of
from shrinkpoint.coding.parts import merged_headers
from shrinkpoint.container.layout import Entry
from shrinkpoint.container.reader import ContainerReader, Header
from shrinkpoint.errors import ChainError, CorruptionError, FormatError
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.state.specs import joined
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.manifest import BlobRef, Head, Manifest
from shrinkpoint.store.run import RunStore

Item = TypeVar("Item")
T = TypeVar("T")

_WHOLE_BYTES = 2**20
"""Containers up to this size are fetched whole: one request costs more than their bytes."""
_WHOLE_SHARE = 0.75
"""Where more of a container than this is needed at once, it is fetched whole: one request, and a checksum over all of it."""
_GAP = 64 * 2**10
"""Bytes between two needed ranges that are read with them, unless the second one is shorter: never more than as much again."""
_SMALL_GAP = 4 * 2**10
"""Bytes between two ranges that are always read with them: a request costs more."""
_SPAN = 16 * 2**20
"""A longer range is read by several requests side by side."""
_BATCHES = 8
_BATCH_BYTES = 2**25, 2**27
"""Bytes of tensors that are decoded together, about: an eighth of all, between these. What is read of them is forgotten before the
next ones, which take requests of their own."""
_READERS = 8


@dataclass(frozen=True)
class Decoded:
    """A restored state, and what its reader holds for the next delta."""

    header: Header
    state: TrainingState
    reference: Mapping[str, ReferenceState]


class Source:
    """One container of a chain.

    Args:
        size: its bytes.
        fetch: gives all of them, checked.
        fetch_range: gives those from one offset (included) to another one (excluded); None where only `fetch` can.
    """

    def __init__(
        self, size: int, fetch: Callable[[], bytes], fetch_range: Callable[[int, int], bytes] | None = None
    ) -> None:
        self.size = size
        """Its bytes."""
        self._fetch, self._fetch_range = fetch, fetch_range
        self._whole: bytes | None = None
        self._spans: list[tuple[int, bytes]] = []
        if fetch_range is None or size <= _WHOLE_BYTES:
            self._whole = fetch()
        try:
            self._reader = ContainerReader(self._read, size)
        except (FormatError, ChainError):
            if self._whole is not None:
                raise
            self._whole = fetch()  # what was damaged on its way is right the next time
            self._reader = ContainerReader(self._read, size)
        self.header = self._reader.header
        """Everything but the sections."""

    def entries(self, names: Collection[str]) -> list[Entry]:
        """These tensors as they are stored, in decoding order; nothing of what was read for them is kept.

        Raises:
            CorruptionError: a section is damaged.
        """
        ordered = [name for name in self.header.tensors if name in names]
        if self._whole is not None:
            return [self._reader.entry(name) for name in ordered]
        needed = sum(self.header.tensors[name].nbytes for name in ordered)
        if needed <= _WHOLE_SHARE * self.size:
            try:
                self._spans = self._read_spans(ordered)
                return [self._reader.entry(name) for name in ordered]
            except CorruptionError:
                pass  # what was damaged on its way is right the next time
            finally:
                self._spans = []
        self._whole = self._fetch()
        try:
            return [self._reader.entry(name) for name in ordered]
        finally:
            self._whole = None

    def _read_spans(self, names: Iterable[str]) -> list[tuple[int, bytes]]:
        """Return the ranges of some tensors, neighbours together: where each begins, and its bytes."""
        spans: list[list[int]] = []
        for start, end in sorted(self._reader.span(name) for name in names):
            gap = start - spans[-1][1] if spans else 0
            if spans and gap <= max(_SMALL_GAP, min(_GAP, end - start)) and end - spans[-1][0] <= _SPAN:
                spans[-1][1] = max(end, spans[-1][1])
            elif end > start:
                spans.append([start, end])
        fetch = self._fetch_range
        assert fetch is not None
        return _side_by_side(lambda span: (span[0], fetch(*span)), spans)

    def _read(self, offset: int, length: int) -> bytes:
        if self._whole is not None:
            return self._whole[offset : offset + length]
        if self._spans:
            start, data = self._spans[bisect_right(self._spans, offset, key=lambda span: span[0]) - 1]
            return data[offset - start : offset - start + length]
        assert self._fetch_range is not None
        return self._fetch_range(offset, offset + length)


class PartsSource:
    """The containers of one checkpoint that several ranks wrote, or some of them.

    Args:
        head: of the checkpoint.
        parts: the containers by their numbers.

    Raises:
        FormatError: they do not belong together.
    """

    def __init__(self, head: Head, parts: Mapping[int, Source]) -> None:
        self._parts = parts
        self.header = merged_headers(head, {number: part.header for number, part in parts.items()})
        """Everything but the sections, of these containers."""

    def entries(self, names: Collection[str]) -> list[Entry]:
        """As `Source.entries`."""
        wanted = set(names)
        return [
            entry
            for part in self._parts.values()
            if not wanted.isdisjoint(part.header.tensors)
            for entry in part.entries(wanted)
        ]


AnySource: TypeAlias = Source | PartsSource


def in_memory(container: bytes) -> Callable[[], Source]:
    """Return what opens a container that is in memory."""
    return lambda: Source(len(container), lambda: container)


def sources_of_run(
    store: RunStore,
    manifest: Manifest,
    parts: Callable[[int], Collection[int]] | None = None,
    *,
    whole: bool = False,
) -> list[Callable[[], AnySource]]:
    """Return what opens each checkpoint of a checkpoint's chain, base first; it refuses another state than the manifest's.

    Args:
        store: the run.
        manifest: of the checkpoint.
        parts: gives the numbers of the parts that are needed of the checkpoint at an index of the chain; None: all.
        whole: whether containers are read at once, and every byte is checked.
    """

    def open_blob(ref: BlobRef) -> Source:
        fetch_range = None if whole else partial(store.fetch_range, ref)
        return Source(ref.size, lambda: store.fetch_blob(ref, manifest), fetch_range)

    def open_parts(at: int, ref: BlobRef) -> PartsSource:
        head = store.head(ref)
        numbers = range(len(head.parts)) if parts is None else sorted(parts(at)) or range(len(head.parts))
        opened = _side_by_side(lambda number: open_blob(head.parts[number].ref), numbers)
        return PartsSource(head, dict(zip(numbers, opened, strict=True)))

    def open_at(at: int) -> AnySource:
        ref = manifest.chain[at]
        source = open_parts(at, ref) if ref.parts else open_blob(ref)
        found = source.header.state_digest, source.header.step
        if at == len(manifest.chain) - 1 and found != (manifest.state_digest, manifest.step):
            raise CorruptionError(
                f"{ref.key} holds another state than its manifest (commit {manifest.seq}) says"
            )
        return source

    return [partial(open_at, at) for at in range(len(manifest.chain))]


def header_of(store: RunStore, ref: BlobRef, parts: Collection[int] | None = None) -> Header:
    """Return what the header of one checkpoint of a chain says, or the headers of all its parts; nothing else is read.

    Args:
        store: the run.
        ref: of the checkpoint.
        parts: the numbers of the parts whose headers are enough; None: all.

    Raises:
        FormatError, ChainError, StoreError: it is damaged, missing, or cannot be read.
    """
    if not ref.parts:
        return _header_alone(store, ref)
    head = store.head(ref)
    numbers = range(len(head.parts)) if parts is None else sorted(parts)
    headers = _side_by_side(lambda number: _header_alone(store, head.parts[number].ref), numbers)
    return merged_headers(head, dict(zip(numbers, headers, strict=True)))


def _side_by_side(function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="shrinkpoint-read") as pool:
        return list(pool.map(function, items))


def _header_alone(store: RunStore, ref: BlobRef) -> Header:
    def read(offset: int, length: int, *, near: bool = store.copies_near) -> bytes:
        return store.fetch_range(ref, offset, offset + length, near=near)

    try:
        return ContainerReader(read, ref.size).header
    except FormatError:
        if not store.copies_near:
            raise
        return ContainerReader(partial(read, near=False), ref.size).header  # this node's copy is damaged


def decode_checkpoint(store: RunStore, manifest: Manifest, *, threads: int = 1) -> Decoded:
    """Restore a run's checkpoint.

    Args:
        store: the run.
        manifest: of the checkpoint.
        threads: parameters decoded side by side.

    Raises:
        ShrinkpointError: as `decode_selected`, or the store cannot be read.
    """
    return decode_chain(sources_of_run(store, manifest), threads=threads)


def decode_chain(chain: Sequence[Callable[[], AnySource]], *, threads: int = 1) -> Decoded:
    """Restore the last checkpoint of a chain; blocks of tensors stay what they are.

    Args:
        chain: as of `decode_selected`.
        threads: parameters decoded side by side.

    Raises:
        ShrinkpointError: as `decode_selected`.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="shrinkpoint-read") as pool:
        opened = [pool.submit(open_source) for open_source in reversed(chain)][::-1]
        header, _, batches = decode_batches(
            [source.result for source in opened],
            lambda header: header.tensors.keys(),
            threads=threads,
            batch=sys.maxsize,
        )
    tensors: dict[str, torch.Tensor] = {}
    reference: dict[str, ReferenceState] = {}
    for rows in batches:
        for entry, now, value in rows:
            reference[entry.spec.name], tensors[entry.spec.name] = now, value
    specs = {name: header.tensors[name].spec for name in tensors}
    return Decoded(header, TrainingState(header.tree, tensors, specs), reference)


def decode_selected(
    chain: Sequence[Callable[[], AnySource]], choose: Callable[[Header], Collection[str]], *, threads: int = 1
) -> tuple[Header, dict[str, torch.Tensor]]:
    """Restore some tensors of a chain's last checkpoint.

    Args:
        chain: what opens each container, base first; those that nothing is needed of are not opened.
        choose: gives the names of the wanted tensors, from the last checkpoint's header; where it has blocks of a longer
            tensor, that one's name or theirs.
        threads: parameters decoded side by side.

    Returns:
        The last checkpoint's header, and the wanted tensors by name, on the host; blocks are joined.

    Raises:
        ChainError: the chain does not start with a base, or its members do not belong together.
        CorruptionError: a checksum or digest does not match.
        FormatError: a container is malformed.
    """
    header, wanted, batches = decode_batches(chain, choose, threads=threads)
    tensors = {
        entry.spec.name: value for rows in batches for entry, _, value in rows if entry.spec.name in wanted
    }
    return header, dict(joined(tensors, {name: header.tensors[name].spec for name in wanted})[0])


def decode_batches(
    chain: Sequence[Callable[[], AnySource]],
    choose: Callable[[Header], Collection[str]],
    *,
    threads: int = 1,
    batch: int | None = None,
    lasting: bool = False,
) -> tuple[Header, set[str], Iterator[Iterator[Row]]]:
    """As `decode_selected`, some tensors at a time, each also with what a reader holds for the next delta. Tensors that the wanted ones need are among them.

    Memory is bounded by a batch, or by the largest parameter.

    Args:
        chain: as of `decode_selected`.
        choose: as of `decode_selected`.
        threads: parameters of a batch decoded side by side.
        batch: bytes of the tensors that are decoded together, about; None chooses it by the size of all.
        lasting: as of `decode_values`.

    Returns:
        The header; the names of the wanted tensors or blocks; the rows of one batch after the other, each read when it is
        asked for, and decoded parameter by parameter.

    Raises:
        ShrinkpointError: as `decode_selected`; damage of a section where its batch is asked for.
    """
    if not chain:
        raise ChainError("the chain is empty")
    newest = chain[-1]()
    header = newest.header
    wanted = _stored(set(choose(header)), header)
    steps = _plan(chain, newest, wanted)
    if batch is None:
        least, most = _BATCH_BYTES
        batch = min(max(sum(header.tensors[name].spec.nbytes for name in wanted) // _BATCHES, least), most)

    def rows(names: set[str]) -> Iterator[Row]:
        reference: Mapping[str, ReferenceState] = {}
        read = _ahead([partial(source.entries, needed & names) for source, needed in steps])
        for _ in steps[:-1]:
            reference = decode_planes(next(read), reference, threads)
        return decode_values(next(read), header.step, reference, threads, lasting=lasting)

    return header, wanted, map(rows, _batches(header, steps[-1][1], batch))


def _ahead(reads: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results in order; while one is used, the next one is read."""
    with ThreadPoolExecutor(1, thread_name_prefix="shrinkpoint-ahead") as pool:
        coming: Future[T] | None = None
        for read in reads:
            coming, before = pool.submit(read), coming
            if before is not None:
                yield before.result()
            del before
        if coming is not None:
            yield coming.result()


def _batches(header: Header, names: Collection[str], limit: int) -> Iterator[set[str]]:
    """Yield names that are decoded together, in the checkpoint's order; a parameter's tensors in one batch."""
    batch: set[str] = set()
    size_now = 0
    for group in groups_of(record.spec for name, record in header.tensors.items() if name in names):
        size = sum(spec.nbytes for spec in group)
        if batch and size_now + size > limit:
            yield batch
            batch, size_now = set(), 0
        batch.update(spec.name for spec in group)
        size_now += size
    if batch:
        yield batch


def _stored(wanted: set[str], header: Header) -> set[str]:
    """Return names as they are stored: of the blocks, in the place of the tensors that these make up."""
    if wanted <= header.tensors.keys():
        return wanted
    return {name for name, record in header.tensors.items() if name in wanted or record.spec.whole in wanted}


def _plan(
    chain: Sequence[Callable[[], AnySource]], newest: AnySource, wanted: Collection[str]
) -> list[tuple[AnySource, set[str]]]:
    """Return what is needed of each container, oldest first."""
    steps = [(newest, required(wanted, newest.header.tensors.values()))]
    check_sizes(newest.header, steps[0][1])
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
        steps.append((earlier, before & earlier.header.tensors.keys()))
        check_sizes(earlier.header, steps[-1][1])
    oldest, needed = steps[-1]
    if any(oldest.header.tensors[name].uses_reference for name in needed) or oldest.header.kind != "base":
        raise ChainError(f"the chain starts with the delta of step {oldest.header.step}: its base is missing")
    return steps[::-1]
