"""Saves and restores a Hugging Face run's position in its training data.

The trainer skips the batches before the position and sets the random generators afterwards. But accelerate's loaders
read one batch ahead, so that a collator that draws random numbers (masked language modelling) would draw different ones
for that batch; workers would start with other seeds; and samplers that draw from torch's own generator would shuffle
again. So a checkpoint contains the generators' states at these moments too, and the loader, which the trainer gets
wrapped, sets them at the same moments.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shrinkpoint.session.data import generators, parts_of, reads_alike, sizes_of, warn_of_other_data
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.warn import warn

_AHEAD = 2
"""Number of last batches whose generator states are kept; accelerate reads one ahead."""


class DataPlace:
    """Follows the training data of one trainer on this rank, and restores a stored position.

    `seen` is called with every batch that is trained on, and its number in the epoch.
    """

    def __init__(self, seen: Callable[[Any, int], None]) -> None:
        self._seen = seen
        self._loader: Any = None
        self._epoch = _Epoch()
        self._generators = Generators(None)
        self._pending: Mapping[str, Any] | None = None

    def follow(self, loader: Any, owners: Sequence[object] = ()) -> "FollowedLoader":
        """Wrap the loader that the trainer is about to use."""
        self._loader = loader
        self._generators = Generators(loader, owners)
        self._compare()
        return FollowedLoader(loader, self._iterate)

    def _compare(self) -> None:
        if self._pending is None or self._loader is None:
            return
        set_seeds(self._loader, self._pending["seeds"])
        warn_of_other_data(self._pending["sizes"], sizes_of(self._loader))

    def state(self, *, inside_epoch: bool) -> dict[str, Any]:
        """Return this rank's position, in plain data and tensors."""
        self._generators.find()
        epoch = self._epoch
        return {
            "now": self._generators.states(),
            "batches": epoch.consumed if inside_epoch else 0,
            "epoch": epoch.state() if inside_epoch else None,
            "seeds": seeds(self._loader),
            "sizes": sizes_of(self._loader),
        }

    def load(self, place: Mapping[str, Any]) -> None:
        """Set the position from a checkpoint; it is restored when the trainer iterates over the loader."""
        self._pending = place
        self._compare()

    def between_epochs(self) -> None:
        """The trainer would set the random generators now: it begins an epoch, and skips nothing."""
        if self._pending is not None:
            self._set(self._pending["now"])
            self._pending = None

    def in_epoch(self) -> None:
        """Note that the trainer has the first batch after the position."""
        if self._pending is not None:
            warn(
                "the order of the samples could not be restored: the trainer has not used the loader of its"
                " get_train_dataloader()"
            )
            self.between_epochs()

    def _set(self, states: Mapping[str, Any]) -> None:
        self._generators.find()
        self._generators.set(states)

    # ---- one epoch

    def _iterate(self, inner: Any, skip: int) -> Iterator[Any]:
        stored = self._pending if skip and self._pending is not None else None
        self._pending = None if skip else self._pending
        if stored is not None and stored["batches"] != skip:
            warn(
                f"the checkpoint was saved after {stored['batches']} batches of the epoch, and the trainer skips {skip}: the"
                " order of the samples will differ, as another batch size or number of accumulated gradients makes it"
            )
            self._set(stored["now"])
            stored = None
        base = _base(inner)
        generators = self._generators
        generators.find()
        epoch = _Epoch(generators, stored, skip)
        self._epoch = epoch
        hook = None if base is None else _IndexHook.on(base)
        drop = skip
        if (
            base is not None
            and hook is not None
            and skip
            and can_skip(base, count=skip, exact=stored is not None)
        ):
            epoch.skips, drop = skip, 0
        epoch.starts(workers=bool(getattr(base, "num_workers", 0)), hooked=hook is not None)
        if hook is not None:
            hook.epoch = epoch
        iterator = iter(inner)
        for _ in range(drop):
            next(iterator, None)
        for batch in iterator:
            epoch.reached()
            self._seen(batch, epoch.consumed)
            epoch.consumed += 1
            yield batch
        epoch.reached()  # where the position is the end of an epoch whose length nobody knows


class _Epoch:
    """The moments of one epoch at which the generators' states are recorded, or restored from a stored position.

    `consumed` counts the batches that have been trained on before.
    """

    def __init__(
        self,
        generators: "Generators | None" = None,
        stored: Mapping[str, Any] | None = None,
        consumed: int = 0,
    ) -> None:
        self._generators = generators
        self._stored = stored
        self.consumed = consumed
        self.skips = 0
        """Number of the sampler's first batches that are not fetched."""
        self._asked = 0
        self._workers = False
        self._looks = 2  # of a collator that makes its generator with the first batch
        self._start: Any = None
        self._sampler: Any = None
        self._ahead: deque[tuple[int, Any]] = deque(maxlen=_AHEAD)

    def state(self) -> dict[str, Any]:
        """Return the states recorded so far."""
        ahead = {str(number): states for number, states in self._ahead if number >= self.consumed}
        return {"start": self._start, "sampler": self._sampler, "ahead": ahead, "asked": self._asked}

    def starts(self, *, workers: bool, hooked: bool) -> None:
        """Note that the iterator is about to be built: workers get their seed from torch's generator."""
        self._workers = workers
        # Where all is read in this process, the moment at which the sampler starts is the first that counts.
        self._start = self._moment("start") if workers or not hooked else None

    def sampler_starts(self) -> None:
        """Note that the sampler is about to shuffle."""
        self._sampler = self._moment("sampler")

    def asks(self, number: int) -> None:
        """Note that the loader asks its sampler for a batch."""
        if self._stored is not None and number >= self._stored["epoch"]["asked"]:
            self._continue()
        self._asked = number

    def fetches(self, number: int) -> None:
        """The sampler has answered, and the loader is about to read the batch, in this process or in a worker."""
        self._asked = number + 1
        if self._workers or self._generators is None:
            return
        if self._looks:
            self._looks -= 1
            self._generators.find()
        stored = None if self._stored is None else self._stored["epoch"]["ahead"].get(str(number))
        if stored is not None:
            self._generators.set(stored)
        self._ahead.append((number, self._generators.states()))

    def reached(self) -> None:
        """Note that the trainer gets a batch that it trains on, or finds that there are no more."""
        self._continue()

    def _moment(self, name: str) -> Any:
        if self._generators is None:
            return None
        stored = None if self._stored is None else self._stored["epoch"][name]
        if stored is not None:
            self._generators.set(stored)
        return self._generators.states()

    def _continue(self) -> None:
        if self._stored is not None and self._generators is not None:
            self._generators.set(self._stored["now"])
            self._stored = None


class FollowedLoader:
    """A loader that tracks the position of training; everything else is the inner one's."""

    def __init__(self, inner: Any, iterate: Callable[[Any, int], Iterator[Any]]) -> None:
        self._inner = inner
        self._iterate = iterate
        self._skip = 0

    def skipping(self, count: int) -> "FollowedLoader":
        """Leave out `count` batches in the next iteration only."""
        self._skip = count
        return self

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return self._iterate(self._inner, skip)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_iterate", "_skip"):  # while a copy is made
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property  # type: ignore[misc]  # which can be set elsewhere
    def __class__(self) -> Any:
        """The inner one's, as accelerate's own wrappers have it, so that ``isinstance(loader, DataLoader)`` holds."""
        return self._inner.__class__


class _IndexHook:
    """Replaces a torch loader's index sampler, and reports the requests to an epoch."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.epoch = _Epoch()

    @classmethod
    def on(cls, base: DataLoader[Any]) -> "_IndexHook":
        """Return the loader's hook, which is created once."""
        found = vars(base).get("_shrinkpoint_hook")
        if found is None:
            kind = type(base)
            found = cls(base._index_sampler)  # used by a loader's iterators
            base.__dict__["_shrinkpoint_hook"] = found
            members = {"_index_sampler": property(lambda self: self.__dict__["_shrinkpoint_hook"])}
            base.__class__ = type(kind.__name__, (kind,), members)
        hook: _IndexHook = found
        return hook

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        epoch.sampler_starts()
        indices = iter(self._inner)
        for _ in range(epoch.skips):
            next(indices, None)
        number = epoch.skips
        while True:
            epoch.asks(number)
            try:
                batch = next(indices)
            except StopIteration:
                return
            epoch.fetches(number)
            yield batch
            number += 1


def _base(loader: Any) -> DataLoader[Any] | None:
    """Return the torch loader inside accelerate's wrappers; None where there is no plain one."""
    base = vars(loader).get("base_dataloader", loader) if hasattr(loader, "__dict__") else loader
    if type(base) is DataLoader or "_shrinkpoint_hook" in getattr(base, "__dict__", {}):
        found: DataLoader[Any] = base
        return found
    return None


def can_skip(loader: DataLoader[Any], *, count: int, exact: bool) -> bool:
    """Return whether skipping is equivalent to reading and dropping, if the generators are set afterwards.

    If this process reads, reading only changes generators whose states are known (`exact`). Workers have their own
    generators: only if they draw no random numbers can batches be skipped. The loader has no iterator as yet.
    """
    if isinstance(loader.dataset, IterableDataset):
        return False
    if not loader.num_workers or not exact:
        return True
    return not loader.persistent_workers and count > 2 and reads_alike(loader)


class Generators:
    """The global generators, and those of a loader, its samplers, its data set and its collator, and of a trainer,
    its model and callbacks."""

    def __init__(self, loader: Any, owners: Sequence[object] = ()) -> None:
        self._loader, self._owners = loader, owners
        self._own: Mapping[str, Any] = {}

    def find(self) -> None:
        """Look for generators; some parts make theirs on first use."""
        self._own = generators([self._loader], self._owners)

    def states(self) -> dict[str, Any]:
        """Their states, in tensors and plain data."""
        return capture_rng(self._own)

    def set(self, states: Mapping[str, Any]) -> None:
        """Restore their states."""
        if any(name.startswith("loader") for name in states.get("own", {}).keys() - self._own.keys()):
            self._use_once()
            self.find()
        restore_rng(states, self._own)

    def _use_once(self) -> None:
        """Let a collator make the generator that it makes on first use."""
        dataset, collate = (getattr(self._loader, name, None) for name in ("dataset", "collate_fn"))
        with suppress(Exception):  # an attempt only: the batch is discarded
            if callable(collate) and dataset is not None and not getattr(self._loader, "num_workers", 0):
                collate([dataset[0]])


def seeds(loader: Any) -> list[int]:
    """Return the seeds of samplers that shuffle by seed and epoch, as accelerate's own does."""
    return [part.initial_seed for part in _seeded(loader)]


def set_seeds(loader: Any, values: Sequence[int]) -> None:
    """Restore the samplers' seeds; a new process would use its own."""
    for part, value in zip(_seeded(loader), values, strict=False):
        part.initial_seed = value


def _seeded(loader: Any) -> list[Any]:
    return [part for part in parts_of(loader).values() if type(getattr(part, "initial_seed", None)) is int]
