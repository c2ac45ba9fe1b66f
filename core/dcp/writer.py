"""`StorageWriter`: saves of `torch.distributed.checkpoint` into a run, each rank's items coded by itself.

Torch gives the outcome of a save to the coordinator's storage alone, and its planners' caches leave no channel to the
others. So each rank looks at its next save whether its part is one of the run's newest checkpoint.
"""

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import PartOf
from shrinkpoint.dcp.contents import table_to_store, take_items, whole_state
from shrinkpoint.engine.chain import Chain, Link, StoredPart, commit_parts, store_part
from shrinkpoint.engine.reporting import provenance, report_of
from shrinkpoint.engine.retention import lineage_of
from shrinkpoint.engine.warmup import Warmup
from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.group.group import world
from shrinkpoint.quality.plan import exactly
from shrinkpoint.reports import SaveReport
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import tensor_names
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.keys import new_nonce
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl

_NUMBER = re.compile(r"(\d{1,12})/*$")
_ANSWER = MetadataIndex("shrinkpoint")
"""Of the one result of each rank that is of no item of the state: what it has stored."""


@dataclass
class _Run:
    """What one process knows of a run from save to save.

    Torch hands a copy of its writer to its process for saves at every save, and callers may make one for every save: what
    the next delta builds on outlives them.
    """

    store: RunStore
    config: SaverConfig
    chain: Chain
    session: str = field(default_factory=new_nonce)
    warmup: Warmup = field(default_factory=lambda: Warmup("lossless"))
    writing: threading.Lock = field(default_factory=threading.Lock)
    reports: list[SaveReport] = field(default_factory=list)
    """Of what this process has committed."""
    part: StoredPart | None = None
    """The last one; whether it was committed is seen at the next save."""
    link: Link | None = None
    step: int = 0
    began: float = 0.0

    def store_part(self, state: TrainingState, place: PartOf, link: Link | None) -> StoredPart:
        """Code and store one part of the save under way."""
        started = time.perf_counter()
        plan = exactly("scheme='lossless' stores everything exactly", is_explained=True)
        encoded = encode_state(
            state,
            plan.scheme,
            step=self.step,
            reference=link.reference if link else None,
            parent=link.digest if link else None,
            release=link.reference.pop if link else None,
            provenance=provenance(),
            threads=self.config.encoder_threads,
            lasting=True,
        )
        report = replace(report_of(plan, encoded, state), encode_s=time.perf_counter() - started)
        return store_part(self.store, encoded, report, place, session=self.session, tree=state.tree)


_runs: dict[tuple[int, str], _Run] = {}
_loaded: dict[str, str] = {}


def note_loaded(store: RunStore, manifest: Manifest) -> None:
    """Note that this process goes on from a checkpoint, if it saves to the same run."""
    lineage = lineage_of(manifest.meta)
    if lineage is not None:
        _loaded[store.display] = lineage


class StorageWriter(TorchStorageWriter):
    """Where ``torch.distributed.checkpoint.save`` and ``async_save`` put checkpoints: a run of this library.

    Each rank codes what torch's planner gives it, bit-exactly, and stores it as its part; the coordinator commits them
    together. Where a rank had the same items at the save before, it stores differences. All ranks make one with the same
    arguments.

    Args:
        url: the run's folder or URL, the same for all ranks and all saves; ``checkpoint_id`` is the step.
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
        key_every: int = 8,
        keep_last: int | None = None,
        keep_every: int | None = None,
        grace_s: float = 24 * 3600.0,
        threads: int | None = None,
        storage_options: StorageOptions = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
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
        self._step: int | None = None
        run = self._run  # now, so that what cannot work is said before training
        if os.environ.get("LOCAL_RANK", "0") == "0":
            run.warmup.start()

    @property
    def _run(self) -> _Run:
        """One for all writers of this process with the same arguments."""
        key = (os.getpid(), repr(self._given))
        if key not in _runs:
            url, config, storage_options = self._given
            store = RunStore(url, storage_options=storage_options)
            _runs[key] = _Run(store, config, Chain(store, config))
        return _runs[key]

    @property
    def reports(self) -> list[SaveReport]:
        """Of the saves that this process has committed, as coordinator."""
        return list(self._run.reports)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; called by torch.

        Args:
            checkpoint_id: the step, or text that ends with it, such as ``"step-100"``; None takes the one after the run's newest.

        Raises:
            ConfigError: it is something else.
        """
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse plans that nobody sees all of; called by torch."""
        if kwargs.get("use_collectives", True) is False:
            raise ConfigError(
                "use_collectives=False plans each rank's save alone, so that nobody knows what makes up the checkpoint: leave it out"
            )

    def storage_meta(self) -> StorageMeta | None:
        """Nothing that a planner needs; called by torch."""
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Find out what became of the save before; called by torch on every rank.

        Raises:
            StoreError: the store cannot be read. ConfigError: the save before has not ended.
        """
        run = self._run
        if run.writing.locked():
            raise ConfigError(
                f"step {run.step} is still being saved to {run.store.display}: wait for the future of async_save before the next one"
            )
        found = run.store.manifests()
        newest = run.chain.parent = found[0] if found else None
        run.step = self._step if self._step is not None else newest.step + 1 if newest else 0
        before, run.part, run.link = run.part, None, None
        if before is None or newest is None or run.chain.base_is_due or not newest.chain[-1].parts:
            return plan
        if before.part in run.store.head(newest.chain[-1]).parts:
            run.link = Link(newest.state_digest, dict(before.reference))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Become the run's writer; called by torch on the coordinator, before any rank stores something.

        Raises:
            StoreError: the store cannot be written.
        """
        run = self._run
        run.began = run.chain.open().now()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Code and store this rank's part; called by torch on every rank.

        Raises:
            ConfigError: the planner is not based on torch's own.
            ShrinkpointError: the state cannot be stored without pickle, or the store failed.
        """
        if not isinstance(planner, DefaultSavePlanner):
            raise ConfigError(f"the planner is a {type(planner).__qualname__}: base it on DefaultSavePlanner")
        run, group = self._run, world(self._group)
        with run.writing:
            own, plain = take_items(plan.items, planner, plan.planner_data)
            run.warmup.wait()
            link, run.link = run.link, None
            parent = link.digest if link else None
            # part 0 is the coordinator's, with the tree
            run.part = run.store_part(own, PartOf(group.rank + 1, group.size + 1), link)
        answer = run.part.message() | {"plain": plain, "parent": parent, "place": (group.rank, group.size)}
        results = [WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items]
        size = run.part.part.ref.size
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(index=_ANSWER, size_in_bytes=size, storage_data=answer)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint; called by torch on the coordinator.

        Raises:
            ShrinkpointError: the parts do not belong together, or the store failed; older checkpoints are unharmed.
        """
        run = self._run
        stored = [[result.index for result in own[:-1]] for own in results]
        answers = [own[-1].storage_data for own in results]
        link = _common_link(answers)
        plain = {fqn: node for answer in answers for fqn, node in answer["plain"].items()}
        more = {
            name: number
            for number, answer in enumerate(answers, 1)
            for node in answer["plain"].values()
            for name in tensor_names(node)
        }
        table = table_to_store(metadata, stored, more)
        first = run.store_part(whole_state(metadata, plain), PartOf(0, len(answers) + 1, table), link)
        run.chain.lineage = run.chain.lineage or _loaded.get(run.store.display)
        run.reports.append(commit_parts(run.chain, [first.message(), *answers], link, began=run.began))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint's name can be one of this storage."""
        return _NUMBER.search(str(checkpoint_id)) is not None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_group": None}  # torch's own process for saves has one group of its own


def _common_link(answers: Sequence[Mapping[str, Any]]) -> Link | None:
    """Return what all ranks have built on; for part 0, which holds no tensor that could be a delta.

    Raises:
        ConfigError: they are not all ranks of one group. StoreError: they have not built on the same.
    """
    places = [answer["place"] for answer in answers]
    if places != [(rank, len(answers)) for rank in range(len(answers))]:
        raise ConfigError(
            f"{len(answers)} ranks save together, and they are (rank, of) {places[:8]}: give the same process_group to"
            " StorageWriter and to save, and let all ranks of it save"
        )
    parents = [answer["parent"] for answer in answers]
    if len(set(parents)) > 1:
        alone = [rank for rank, parent in enumerate(parents) if parent is None]
        raise StoreError(
            f"the ranks do not build on the same checkpoint, as after a rank was restarted alone (ranks {alone[:8]}): this"
            " save has failed, and the next one is a base"
        )
    return None if parents[0] is None else Link(parents[0], {})


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the step in a checkpoint's name.

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
