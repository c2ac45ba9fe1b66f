"""What is known of a training's data: the generators that its order depends on, and how a resume's differs from the run's."""

import itertools
import logging
import pickle
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.group.group import world
from shrinkpoint.session.attributes import attributes_of
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.rng import Counters, capture_rng, is_generator, restore_rng
from shrinkpoint.state.stateful import plain_names
from shrinkpoint.warn import warn

_log = logging.getLogger(__name__)

_WORKERS = "num_workers"
_OWN_REFERENCES = 3  # of a loader to its iterator, and those of the count itself
_DEPTH = 3
_FIRST = 100  # of a list, as one of transforms, and not of samples
_MODULE = vars(nn.Module()).keys()
_MOST = 10_000  # objects that are looked at


def sizes_of(loader: Any, name: str = "") -> dict[str, int]:
    """Return the lengths and sizes of a loader or a sampler, as far as it has them; empty for anything else.

    The own length of a torch loader of a stream is not asked for: it would count the batches from then on.
    """
    dataset = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    found = {
        "len(dataset)": _length(dataset),
        "len(loader)": None if isinstance(dataset, IterableDataset) else _length(loader),
        "batch_size": getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None),
        _WORKERS: getattr(loader, _WORKERS, None),
        "checksum of dataset.indices": _checksum(dataset.indices) if isinstance(dataset, Subset) else None,
    }
    return {f"{name}{key}": value for key, value in found.items() if type(value) is int}


def _checksum(indices: Iterable[int]) -> int:
    """Return what other samples, as of another random_split(), would not have; of the first ones alone."""
    return zlib.crc32(np.array([*map(int, itertools.islice(indices, _MOST))]).tobytes())


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # noqa: BLE001 - a stream, or a length that is known later only
        return None


def warn_of_other_data(there: Mapping[str, int], here: Mapping[str, int]) -> None:
    """Warn, on the first rank, where the `sizes_of` this training's data, ``here``, are not the checkpoint's."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    differ = [
        f"{name} is {here.get(name, 'unknown')} here and was {there.get(name, 'unknown')}" for name in names
    ]
    if there and differ and world().is_first:
        warn(
            f"resume: the training data is not the run's: {', '.join(differ)}. The batches that follow are others, too"
        )


def other_processes(stored: int, *, own: bool = True) -> str | None:
    """One line where the processes that saved a position are not these, or the first one's alone is known; else None."""
    here = world().size
    if stored == here and own:
        return None
    by, now = f"{stored} processes", f"is continued by {here}"
    if stored == here:
        by, now = f"{by} with shards of the model", "is continued without, or was compacted"
    return f"the checkpoint was saved by {by} and {now}: random numbers and the order of samples will differ"


def require_same_workers(loader: Any, state: Any, name: str) -> None:
    """Refuse to give the position of torchdata's loader to one with another number of workers, which cannot take it.

    Raises:
        StateMismatchError: with both numbers.
    """
    if not is_torchdata(loader, "StatefulDataLoader") or not isinstance(state, Mapping) or not state:
        return
    there = state.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers", 0)
    if there != loader.num_workers:
        raise StateMismatchError(
            f"{name} has num_workers={loader.num_workers} here and had {there} in the checkpoint: the position of a StatefulDataLoader"
            f" is divided among its workers. Give it num_workers={there} again"
        )


def unknown_order(loader: Any, state: Any) -> str | None:
    """Return a line where a resume within an epoch cannot restore the order of torchdata's loader, or what its
    workers draw; else None."""
    if not is_torchdata(loader, "StatefulDataLoader"):
        return None
    within = isinstance(state, Mapping) and not state.get("_iterator_finished", True)
    if within and type(loader.dataset).__module__ == "datasets.iterable_dataset":
        return (
            "resume: a stream of the library datasets restores its position roughly: it fills shuffle buffers anew, may leave out or repeat samples, and"
            " may begin every later epoch at this position. Make a new stream and loader after this epoch"
        )
    known = isinstance(loader.dataset, IterableDataset) or hasattr(loader.dataset, "state_dict")
    if within and loader.num_workers and not known and not reads_alike(loader):
        return (
            "resume: the loader's workers draw random numbers, which torchdata's loader does not restore: samples may be augmented otherwise up to the end"
            " of this epoch. Give the data set state_dict() and load_state_dict(), or num_workers=0"
        )
    for sampler in samplers(loader):
        if _is_own(sampler) and not hasattr(sampler, "state_dict") and generators_in(sampler):
            return (
                f"resume: {type(sampler).__qualname__} draws from a generator of its own, which torchdata's loader does not restore: the order of samples may"
                " differ up to the end of this epoch. Give the sampler state_dict() and load_state_dict()"
            )
    return None


def is_torchdata(loader: Any, name: str | None = None) -> bool:
    """Return whether a loader is torchdata's, or of its class of this name."""
    kinds = (kind for kind in type(loader).__mro__ if kind.__module__.startswith("torchdata."))
    return any(name in (None, kind.__name__) for kind in kinds)


def in_use(loader: Any) -> bool:
    """Return whether a loop is already in the batches of torchdata's loader: a position that is restored takes effect in the
    next one only.

    One whose iterator nothing but the loader itself holds is in no loop, as after ``next(iter(loader))``.
    """
    inner = getattr(loader, "base_dataloader", loader)
    iterator = getattr(inner, "_iterator", None)
    finished = getattr(iterator, "_finished", True)
    return not finished and sys.getrefcount(iterator) > _OWN_REFERENCES


# ---- what its order depends on


def samplers(loader: Any) -> Iterator[Any]:
    """Yield the objects that determine a loader's order: its sampler, its batch sampler and that one's own sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if sampler is not None:
            yield sampler


def parts_of(loader: Any) -> dict[str, Any]:
    """Return a loader's data set and collator, its generator, its samplers, and those within them, each once, by name."""
    order = ("generator", "sampler", "batch_sampler")
    found: dict[str, Any] = {}
    waiting = [(name, getattr(loader, name, None)) for name in ("dataset", "collate_fn", *order)]
    while waiting:
        name, part = waiting.pop(0)
        if part is None or any(part is other for other in found.values()) or name.count(".") > _DEPTH:
            continue
        found[name] = part
        if (name in order or "." in name) and not _seeds_itself(part):
            waiting += [(f"{name}.{inner}", getattr(part, inner, None)) for inner in order]
    return found


def _seeds_itself(part: object) -> bool:
    """Return whether it is accelerate's sampler, which seeds its generator for each epoch."""
    return type(part).__module__ == "accelerate.data_loader" and hasattr(part, "initial_seed")


def generators(loaders: Iterable[Any] = (), owners: Iterable[object] = ()) -> dict[str, Any]:
    """Return the generators of any kind that some objects and loaders have, each once, and samplers' `Counters`, by
    where they are.

    The owners are a model, callbacks and the like: generators are attributes of theirs, or of a model's modules.
    """
    found: dict[str, Any] = {}
    for number, loader in enumerate(loaders):
        for name, part in parts_of(loader).items():
            found |= {f"loader {number}.{name}{path}": one for path, one in generators_in(part).items()}
            if "sampler" in name and _is_own(part) and not hasattr(part, "state_dict"):
                found[f"loader {number}.{name}: counters"] = Counters(part)
    kinds: Counter[str] = Counter()  # of owners, some of which may not be there at the next start
    for owner in owners:
        with plain_names(owner) if isinstance(owner, nn.Module) else nullcontext(owner) as inner:
            kind = type(inner).__qualname__
            number = kinds[kind]
            kinds[kind] += 1
            parts = inner.named_modules() if isinstance(inner, nn.Module) else [("", inner)]
            for name, part in parts:
                own = [item for item in getattr(part, "__dict__", {}).items() if item[0] not in _MODULE]
                near = (
                    (key + path, one)
                    for key, value in own
                    for path, one in itertools.islice(_near(value), _MOST)
                )
                found |= {f"{kind} {number}.{name}.{path}": one for path, one in near if is_generator(one)}
    first: dict[int, str] = {}
    for name, one in found.items():
        first.setdefault(id(one), name)
    return {name: found[name] for name in first.values()}


def _is_own(sampler: object) -> bool:
    """Return whether a sampler is of a class of the user's."""
    kind = type(sampler)
    known = kind.__module__.startswith(("torch.", "torchdata.", "accelerate."))
    return not known and hasattr(sampler, "__dict__") and hasattr(sampler, "__weakref__")


def generators_in(value: Any) -> dict[str, Any]:
    """Return the random generators of any kind that an object, such as a data set, and its parts have, by where they are."""
    found: dict[str, Any] = {}
    level, left = [("", value)], _MOST
    for _ in range(_DEPTH + 1):
        found |= {name: part for name, part in level if is_generator(part)}
        parts = ((f"{name}.{key}", one) for name, part in level for key, one in _inside(part))
        level = list(itertools.islice(parts, left))
        left -= len(level)
    return found


def _near(value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield a value, and what lists, dicts and objects of the user's have in them, by their places."""
    yield "", value
    items = enumerate(value) if type(value) in (list, tuple) else None
    named = value.items() if type(value) is dict else attributes_of(value).items()
    for key, one in itertools.islice(items or named, _FIRST if depth else 0):
        yield from ((f".{key}{path}", part) for path, part in _near(one, depth - 1))


def _inside(value: Any) -> Iterable[tuple[object, Any]]:
    if (
        isinstance(value, (str, bytes, torch.Tensor, np.ndarray))
        or is_generator(value)
        or _seeds_itself(value)
    ):
        return ()
    if isinstance(value, (list, tuple)):
        return enumerate(value[:_FIRST])
    own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return list(itertools.islice(own.items(), _FIRST))


# ---- Whether a loader's workers use random numbers: only without them can batches be skipped unread.

_SAMPLES = 4  # read twice to see whether reading is random


class _Witness:
    """Collates samples by the loader's own function to two digests: of the result, and of the worker's generators afterwards."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[str, str]:
        batch = self._collate(samples)
        rng = capture_rng()
        others = rng["numpy"]  # a dict of few numbers where it is no Mersenne Twister
        words = repr(others).encode() if isinstance(others, Mapping) else others[1].numpy().tobytes()
        state = [rng["torch"].numpy().tobytes(), rng["python"][1].numpy().tobytes(), words]
        drawn = xxhash.xxh3_128(b"".join(state)).hexdigest()
        return "".join(_digests(batch)), drawn


def _digests(samples: Any) -> Iterator[str]:
    """Yield digests of all that some samples consist of."""
    if isinstance(samples, torch.Tensor):
        yield tensor_digest(samples.contiguous())
    elif isinstance(samples, Mapping):
        for key, value in samples.items():
            yield from _digests(key)
            yield from _digests(value)
    elif isinstance(samples, (list, tuple)):
        for value in samples:
            yield from _digests(value)
    else:  # never loaded again: pickling is how workers pass on samples of any type
        yield xxhash.xxh3_128(pickle.dumps(samples)).hexdigest()


def reads_alike(loader: DataLoader[Any]) -> bool:
    """Return whether a worker reads the same samples twice with equal results and draws no random number.

    A worker's generators start from the epoch's seed and run on with every sample, so they cannot be put to a
    position. The reading is done in a worker of its own: some datasets must not be read in the main process before it
    forks. The loader is map-style, has workers, and as yet no iterator.
    """
    batch_sampler: Any = loader.batch_sampler
    few: Any = getattr(batch_sampler.sampler, "indices", None)  # a list, an array or a tensor
    if few is None:
        few = range(len(loader.dataset))  # type: ignore[arg-type]
    batch = [few[index] for index in range(min(_SAMPLES, len(few)))]
    rng = capture_rng()
    try:
        trial = DataLoader(
            loader.dataset,
            batch_sampler=[batch, batch],
            num_workers=1,
            collate_fn=_Witness(loader.collate_fn),
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
            generator=torch.Generator(),
        )
        first, second = list(trial)
    except Exception as error:  # noqa: BLE001 - reading every batch is always right
        _log.info("reading a few samples in a worker failed, so the batches before are read: %s", error)
        return False
    finally:
        restore_rng(rng)
    return bool(first == second)


class IteratorStart:
    """The generators' states with which a loader's iterator was made: it, or a sampler, draws from them then.

    torchdata's loaders make theirs while a position is loaded; a further loader of torch's makes it later, in the loop.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.states: Any = None
        self._owner, self._method = self.of(loader)
        self._make = getattr(self._owner, self._method)
        self._made: Callable[[], Any] | None = None
        self._waits = self._once = False
        setattr(self._owner, self._method, self)

    @staticmethod
    def of(loader: Any) -> Any:
        """Return the object and its method that make an iterator; None where the loader has none."""
        if hasattr(loader, "_get_iterator"):
            return loader, "_get_iterator"
        return (loader.root, "reset") if is_torchdata(loader) and hasattr(loader, "root") else None

    def __call__(self, *given: Any) -> Any:
        """Make the iterator, and note the generators' states."""
        own = generators([self._loader])
        now = capture_rng(own)
        if self._waits:
            restore_rng(self.states, own)
        self.states = capture_rng(own)
        made = self._make(*given)
        if self._waits:
            restore_rng(now, own)
            self._waits = False
        if self._once:
            self.stop()
        self._made = None if is_torchdata(self._loader) else weakref.ref(made)
        return made

    def is_in_use(self) -> bool:
        """Return whether the iterator may be asked for more."""
        return self._made is None or self._made() is not None

    @classmethod
    def now(cls, loader: Any) -> None:
        """Let the iterator that one of torch's loaders makes next, in the loop, draw from the generators' present states, and no others."""
        if hasattr(loader, "_get_iterator") and not is_torchdata(loader):
            start = cls(loader)
            start._once = True
            start.begin(capture_rng(generators([loader])))

    def begin(self, states: Any) -> None:
        """Let the next iterator be made with the states of one that was in use, if there was one."""
        self.states = states
        if states is not None:
            restore_rng(states, generators([self._loader]))
            self._waits = not is_torchdata(self._loader)

    def stop(self) -> None:
        """Leave the loader as it was."""
        vars(self._owner).pop(self._method, None)
