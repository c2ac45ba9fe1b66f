"""Whether a loader's workers use random numbers: only without them can batches be skipped unread."""

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader

from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.rng import capture_rng, restore_rng

_log = logging.getLogger(__name__)

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
