"""`StorageWriter`: saves of `torch.distributed.checkpoint` into a run, each rank's items coded by itself."""

import os
import re
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shrinkpoint.config import SaverConfig
from shrinkpoint.dcp.run import Place, Run, run_of
from shrinkpoint.errors import ConfigError
from shrinkpoint.reports import SaveReport
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.urls import RunUrl

__all__ = ["StorageWriter", "step_of"]

_NUMBER = re.compile(r"(\d{1,12})/*$")
_ANSWER = MetadataIndex("shrinkpoint")
"""Of the one result of each rank that is of no item of the state: what it has stored."""


class StorageWriter(TorchStorageWriter):
    """Where ``torch.distributed.checkpoint.save`` and ``async_save`` put checkpoints: a run of this library.

    Each rank codes what torch's planner gives it, bit-exactly, and stores it as its part; the coordinator commits them
    together. Where a rank had the same items at the save before, it stores differences. All ranks make one with the same
    arguments.

    Args:
        url: the run's folder or URL, the same for all ranks and all saves; ``checkpoint_id`` is the step.
        scheme: ``"lossless"``: a storage does not learn how good a model is, which the others need.
        key_every: every twice as many checkpoints one is readable alone; the others build on the one before.
        keep_last: as of `SaverConfig`, like the following one.
        keep_every: see there.
        grace_s: see there.
        threads: see there.
        storage_options: passed to fsspec.
        process_group: the one that is given to ``save``, if one is.

    Raises:
        ConfigError: an argument has a value that cannot work.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from shrinkpoint.dcp import StorageWriter
        >>> writer = StorageWriter("runs/dcp")
        >>> state = {"model": model.state_dict(), "step": 100}
        >>> metadata = dcp.save(state, storage_writer=writer, checkpoint_id="step-100")
        >>> [(report.step, report.kind) for report in writer.reports]
        [(100, 'base')]
    """

    def __init__(
        self,
        url: RunUrl,
        *,
        scheme: str = "lossless",
        key_every: int = 8,
        keep_last: int | None = None,
        keep_every: int | None = None,
        grace_s: float = 24 * 3600.0,
        threads: int | None = None,
        storage_options: StorageOptions = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if scheme != "lossless":
            raise ConfigError(
                f"scheme={scheme!r} is not for torch.distributed.checkpoint's storage, which cannot measure what it costs: use"
                " scheme='lossless', or shrinkpoint.Checkpointer on every rank"
            )
        config = SaverConfig(
            scheme="lossless",
            key_every=key_every,
            keep_last=keep_last,
            keep_every=keep_every,
            grace_s=grace_s,
            threads=threads,
        )
        self._given = (url, config, storage_options)
        self._group = process_group
        self._coordinates = False
        self._step: int | None = None
        self._run: Run | None = run_of(*self._given)  # now, so that what cannot work is said before training
        self._run.warm_up()

    @property
    def reports(self) -> list[SaveReport]:
        """Of the saves that this process has committed, as coordinator."""
        return list(self._opened.reports)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; called by torch.

        Args:
            checkpoint_id: the step, or text that ends with it, such as ``"step-100"``; None takes the one after the run's newest.

        Raises:
            ConfigError: it is something else.
        """
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note which rank this is; called by torch."""
        if kwargs.get("use_collectives", True) is False:
            raise ConfigError(
                "use_collectives=False plans each rank's save alone, so that nobody knows what makes up the checkpoint: leave it out"
            )
        self._coordinates = is_coordinator

    def storage_meta(self) -> StorageMeta | None:
        """Nothing that a planner needs; called by torch."""
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Find out what became of the save before; called by torch on every rank.

        Raises:
            StoreError: the store cannot be read, or, on the coordinator, written.
        """
        self._opened.begin(self._step, coordinates=self._coordinates)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The same plans; called by torch."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Code and store this rank's part; called by torch on every rank.

        Raises:
            ShrinkpointError: the state cannot be stored without pickle, or the store failed.
        """
        answer = self._opened.write(plan, planner, self._place())
        results = [WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items]
        size = int(answer["ref"]["size"])
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(index=_ANSWER, size_in_bytes=size, storage_data=answer)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint; called by torch on the coordinator.

        Raises:
            ShrinkpointError: the parts do not belong together, or the store failed; older checkpoints are unharmed.
        """
        stored = [[result.index for result in own[:-1]] for own in results]
        self._opened.finish(metadata, stored, [own[-1].storage_data for own in results])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint's name can be one of this storage."""
        return _NUMBER.search(str(checkpoint_id)) is not None

    @property
    def _opened(self) -> Run:
        if self._run is None:
            self._run = run_of(*self._given)
        return self._run

    def _place(self) -> Place:
        if not (dist.is_available() and dist.is_initialized()):
            return Place(0, 1)
        return Place(dist.get_rank(self._group), dist.get_world_size(self._group))

    def __getstate__(self) -> dict[str, Any]:
        # to torch's own process for saves: that holds what deltas build on, and has one group of its own
        return self.__dict__ | {"_run": None, "_group": None}


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step in a checkpoint's name.

    Raises:
        ConfigError: it does not end with one.
    """
    found = _NUMBER.search(str(checkpoint_id))
    if found is None:
        raise ConfigError(
            f"checkpoint_id={checkpoint_id!r} must be the step or end with it, as in checkpoint_id='step-100'; the place is the"
            " storage's url"
        )
    return int(found[1])
