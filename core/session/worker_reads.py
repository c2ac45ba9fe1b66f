"""A loader's generators, and whether its workers use random numbers: only without them can batches be skipped unread."""

import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader

from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.rng import Counters, capture_rng, is_generator, restore_rng
from shrinkpoint.state.stateful import plain_names

__all__ = [
    "generators",
    "generators_in",
    "parts_of",
    "reads_alike",
    "samplers",
    "unknown_order",
]

_log = logging.getLogger(__name__)

_DEPTH = 3
_FIRST = 100  # of a list, as one of transforms, and not of samples
_MOST = 10_000  # objects that are looked at
_SAMPLES = 4  # read twice to see whether reading is random


class _Witness:
    """Collates samples to two digests: of the result, and of the worker's generators afterwards.

    Args:
        collate: the loader's own function, which may draw random numbers too.
    """

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
    """Digests of all that some samples consist of."""
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

    A worker's generators start from the epoch's seed and run on with every sample, so they cannot be put to a position.
    The reading is done in a worker of its own: some datasets must not be read in the main process before it forks.

    Args:
        loader: map-style, with workers, and as yet without an iterator.
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


def samplers(loader: Any) -> Iterator[Any]:
    """The objects that determine a loader's order: its sampler, its batch sampler and that one's own sampler.

    Args:
        loader: a ``DataLoader``, or any object with some of its attributes.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if sampler is not None:
            yield sampler


def parts_of(loader: Any) -> dict[str, Any]:
    """Return a loader's data set and collator, its generator, its samplers, and those within them, each once, by name.

    Args:
        loader: a ``DataLoader``, or any object with some of its attributes.
    """
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
    """Return the generators of any kind that some objects and loaders have, each once, and samplers' `Counters`, by where they are.

    Args:
        loaders: whose `parts_of` are looked through.
        owners: a model, callbacks and the like: generators are attributes of theirs, or of a model's modules.
    """
    found: dict[str, Any] = {}
    kinds: Counter[str] = Counter()  # of owners, some of which may not be there at the next start
    for owner in owners:
        with plain_names(owner) if isinstance(owner, nn.Module) else nullcontext(owner) as inner:
            kind = type(inner).__qualname__
            number = kinds[kind]
            kinds[kind] += 1
            parts = inner.named_modules() if isinstance(inner, nn.Module) else [("", inner)]
            for name, part in parts:
                own = getattr(part, "__dict__", {}).items()
                found |= {f"{kind} {number}.{name}.{key}": one for key, one in own if is_generator(one)}
    for number, loader in enumerate(loaders):
        for name, part in parts_of(loader).items():
            found |= {f"loader {number}.{name}{path}": one for path, one in generators_in(part).items()}
            if "sampler" in name and _is_own(part) and not hasattr(part, "state_dict"):
                found[f"loader {number}.{name}: counters"] = Counters(part)
    first: dict[int, str] = {}
    for name, one in found.items():
        first.setdefault(id(one), name)
    return {name: found[name] for name in first.values()}


def unknown_order(loader: Any) -> str | None:
    """Return a line where a resume within an epoch cannot restore the order of torchdata's loader; else None.

    Args:
        loader: that has taken its state; other loaders are let pass.
    """
    if not any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__):
        return None
    for sampler in samplers(loader):
        if _is_own(sampler) and not hasattr(sampler, "state_dict") and generators_in(sampler):
            return (
                f"resume: {type(sampler).__qualname__} draws from a generator of its own, which torchdata's loader does not restore: the order of samples may"
                " differ up to the end of this epoch. Give the sampler state_dict() and load_state_dict()"
            )
    return None


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
