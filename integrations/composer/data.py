"""Saves and restores a Composer run's position in its training data.

Composer builds an epoch's iterator with the generators' present states, which differ after a restart, and then fetches
and drops the batches before the position. Here the generators' states at the time when the iterator was built are part
of every checkpoint, and it is built with these again.

No event fires right before an iterator is built. So for that moment the loader gets a subclass of its own class, and
gets its class back when the epoch's first batch starts.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from composer.core import State
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shrinkpoint.session.data import generators, generators_in, reads_alike, sizes_of, warn_of_other_data
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.warn import warn

_TRAIN = "train"
_BUILD = "_get_iterator"  # of torch's DataLoader; StreamingDataLoader calls it within the first fetch


class DataPlace:
    """Follows the training data of one trainer on this rank, and restores a stored position."""

    def __init__(self) -> None:
        self._epoch: Mapping[str, Any] | None = None
        self._pending: Mapping[str, Any] | None = None
        self._sizes: Mapping[str, int] = {}
        self._watch: _Watch | None = None
        self._fetches = 0
        self._skipped = False

    def state(self, state: State) -> dict[str, Any]:
        """Return this rank's position, in plain data and tensors."""
        inside = _inside_epoch(state)
        return {"now": _generators(state), "epoch": self._epoch if inside else None, "sizes": _sizes(state)}

    def load(self, place: Mapping[str, Any]) -> None:
        """Set the position from a checkpoint; it is restored when training starts."""
        self._pending, self._epoch, self._sizes = place["now"], place["epoch"], place["sizes"]

    def fit_starts(self, state: State) -> None:
        """Composer is about to draw one batch of each past epoch, and then to build the epoch's iterator."""
        self._fetches = 0
        sizes, self._sizes = self._sizes, {}
        warn_of_other_data(sizes, _sizes(state))
        if not _inside_epoch(state):
            return
        if self._pending is None or self._epoch is None:
            self._watch_iterator(state, self._note_epoch)
        else:
            skip = self._can_skip(state)
            if skip:
                # As with a dataset that restores its position itself: Composer neither draws past epochs nor drops
                # batches. Data sets may draw what they hold when they are first read: in the order of the first start.
                for loader in (*(each.dataloader.dataloader for each in state.evaluators), state.dataloader):
                    if isinstance(loader, DataLoader) and not loader.num_workers:
                        next(iter(loader), None)
                state.dataset_resumption[_TRAIN] = self._skipped = True
            epoch = self._epoch
            self._watch_iterator(state, lambda state: _set_generators(state, epoch), skip=skip)

    def epoch_starts(self, state: State) -> None:
        """Note that an epoch begins, and its iterator is about to be built."""
        pending = self._pending
        self._continue(state)
        self._fetches = 0
        self._note_epoch(state)
        # Persistent workers that an earlier epoch had started: starting them again draws a number that was not drawn then.
        loader = state.dataloader
        starts = getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is None
        draws = pending is not None and int(state.timestamp.epoch) > 0 and starts
        self._watch_iterator(state, self._note_epoch, instead=pending if draws else None)

    def fetches(self, state: State) -> None:
        """Note that a batch is about to be fetched."""
        dropped = int(state.timestamp.batch_in_epoch)
        if _TRAIN not in state.dataset_resumption and self._fetches == dropped:
            self._continue(state)
        self._fetches += 1

    def batch_starts(self, state: State) -> None:
        """Note that a batch that is trained on has been fetched."""
        self._unwatch()
        self._continue(state)  # the user has disabled Composer's search for the position

    def epoch_ends(self, state: State) -> None:
        """No more batches of this epoch are fetched; also called when training ends."""
        self._unwatch()
        if self._skipped:  # from now on Composer behaves as usual
            state.dataset_resumption.pop(_TRAIN, None)
            self._skipped = False

    def close(self) -> None:
        """Training is over, with or without an error."""
        self._unwatch()

    def _note_epoch(self, state: State) -> None:
        self._epoch = _generators(state)

    def _continue(self, state: State) -> None:
        """Set the generators to the moment at which the checkpoint was taken."""
        if self._pending is not None:
            _set_generators(state, self._pending)
            self._pending = None

    def _can_skip(self, state: State) -> bool:
        if _TRAIN in state.dataset_resumption:
            return False
        length = state.dataloader_len
        return can_skip(
            state.dataloader,
            count=int(state.timestamp.batch_in_epoch),
            length=None if length is None else int(length),
        )

    def _watch_iterator(
        self,
        state: State,
        before: Callable[[State], None],
        *,
        skip: bool = False,
        instead: Mapping[str, Any] | None = None,
    ) -> None:
        def built() -> None:
            if instead is not None:
                _set_generators(state, instead)
            if _TRAIN in state.dataset_resumption and not skip:  # the dataset itself starts at the position
                self._continue(state)

        def skipping(inner: Any) -> SkippingSampler:
            done = int(state.timestamp.batch_in_epoch)
            left = None if state.dataloader.num_workers else int(state.dataloader_len) - done
            return SkippingSampler(inner, count=done, stop=left, on_ready=lambda: self._continue(state))

        self._unwatch()
        try:
            self._watch = _Watch(state.dataloader, lambda: before(state), built, skipping if skip else None)
        except TypeError as error:
            if self._pending is not None:
                warn(
                    f"the order of the samples cannot be restored for a {type(state.dataloader).__name__}: {error}"
                )

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class _Watch:
    """Calls functions before and after each building of a loader's iterator, once or several times for each, until
    `stop`.

    The second is called when torch's own has been built. `skipping` wraps the index sampler. A loader's class that
    cannot be subclassed is a TypeError.
    """

    def __init__(
        self,
        loader: Any,
        before: Callable[[], None],
        built: Callable[[], None],
        skipping: "Callable[[Any], SkippingSampler] | None",
    ) -> None:
        kind = type(loader)
        self._loader, self._kind = loader, kind

        def iterate(self: Any) -> Iterator[Any]:
            before()
            iterator: Iterator[Any] = kind.__iter__(self)
            return iterator

        def build(self: Any) -> Any:
            before()
            iterator = getattr(kind, _BUILD)(self)
            built()
            return iterator

        members: dict[str, Any] = {"__slots__": ()}
        if hasattr(kind, "__iter__"):
            members["__iter__"] = iterate
        if hasattr(kind, _BUILD):
            members[_BUILD] = build
        if skipping is not None:
            members["_index_sampler"] = property(lambda self: skipping(kind._index_sampler.fget(self)))
        loader.__class__ = type(kind.__name__, (kind,), members)

    def stop(self) -> None:
        """Give the loader its class back."""
        self._loader.__class__ = self._kind


def _inside_epoch(state: State) -> bool:
    return int(state.timestamp.batch_in_epoch) > 0


def _sizes(state: State) -> dict[str, int]:
    batches = state.dataloader_len
    return sizes_of(state.dataloader) | ({} if batches is None else {"batches of an epoch": int(batches)})


def _generators(state: State) -> dict[str, Any]:
    """Return the states of all generators that loading and training draw from."""
    return capture_rng(_own(state))


def _set_generators(state: State, states: Mapping[str, Any]) -> None:
    restore_rng(states, _own(state))


def _own(state: State) -> dict[str, Any]:
    return generators([state.dataloader], [state.model, *state.callbacks, *state.algorithms])


# Samplers whose order is fixed by the generators' states at their start.
_KNOWN = {DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler}


# ---- Skips the batches before a position without reading them, where that gives the same result.
#
# Composer fetches and drops every batch before the position at which it resumes. Where the data depends only on the
# sampler's indices, advancing the sampler is equivalent and takes no time.


class SkippingSampler:
    """A loader's index sampler from its n-th item on, up to `stop` items; those before are drawn and dropped at the
    first request."""

    def __init__(
        self, inner: Iterable[Any], *, count: int, stop: int | None, on_ready: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._count = count
        self._stop = stop
        self._on_ready = on_ready

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # A generator: samplers draw their seed when the first index is asked for, after the loader has drawn its own.
        indices = iter(self._inner)
        for _ in range(self._count):
            next(indices, None)
        self._on_ready()
        # Composer leaves a sampler before its end, where some draw from their generator once more.
        yield from indices if self._stop is None else itertools.islice(indices, self._stop)


def can_skip(loader: Any, *, count: int, length: int | None) -> bool:
    """Return whether skipping gives the same batches, and leaves the same generators, as reading and dropping.

    The loader has no iterator as yet; `length` counts the batches of an epoch.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or length is None:
        return False
    if count > length:  # the data has become shorter: Composer finds the epoch's end
        return False
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.batch_sampler.sampler  # with the user's own batch sampler, not loader.sampler
    if type(sampler) not in _KNOWN:
        return False
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples > len(sampler.data_source)
    ):
        return False  # draws piece by piece
    if generators_in(loader.dataset):  # whose position is not stored
        return False
    if not loader.num_workers:
        return True
    # Workers read ahead, so their sampler is beyond the position; the draws since the epoch's start from the user's own
    # generator cannot be separated.
    if generators([loader]) or loader.persistent_workers or length != len(loader):
        return False
    return count > 2 and reads_alike(loader)
