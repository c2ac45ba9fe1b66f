"""What one process knows of a run that it saves to by `torch.distributed.checkpoint`, from save to save.

Torch gives the outcome of a save to the coordinator's storage alone, and its planners' caches leave no channel to the
others. So each rank looks at its next save whether the run's newest checkpoint is the one that it has stored a part of; the
coordinator makes sure that all have come to the same answer.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import PartOf
from shrinkpoint.dcp.contents import whole_state
from shrinkpoint.dcp.items import take_items
from shrinkpoint.dcp.table import table_to_store
from shrinkpoint.engine.chain import Chain, Link, StoredPart, commit_parts, store_part
from shrinkpoint.engine.reporting import not_finite, provenance, report_of
from shrinkpoint.engine.retention import lineage_of
from shrinkpoint.engine.warmup import Warmup
from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.quality.plan import exactly
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON, tensor_names
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.keys import new_nonce
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl
from shrinkpoint.warn import warn

__all__ = ["Place", "Run", "note_read", "run_of"]


@dataclass(frozen=True)
class Place:
    """A rank among those that save together."""

    rank: int
    world: int


@dataclass(frozen=True)
class _Pending:
    """A part that is stored; whether it was committed is not known yet."""

    step: int
    after: int
    """Number of the newest commit before."""
    reference: Mapping[str, ReferenceState]

    def is_in(self, newest: Manifest) -> bool:
        """Whether it was committed, if the run's newest checkpoint is this one; the coordinator compares digests."""
        return newest.step == self.step and newest.seq > self.after


class Run:
    """One process's part in the saves to a run.

    Args:
        store: the run.
        config: how to save.
    """

    def __init__(self, store: RunStore, config: SaverConfig) -> None:
        self.reports: list[SaveReport] = []
        """Of what this process has committed."""
        self._store, self._config = store, config
        self._chain = Chain(store, config)
        self._session = new_nonce()
        self._pending: _Pending | None = None
        self._link: Link | None = None
        self._newest: Manifest | None = None
        self._step = 0
        self._began = 0.0
        self._warmup = Warmup(config.scheme)
        self._writing = threading.Lock()

    def warm_up(self) -> None:
        """Have the coders compiled before the first save, if they are not yet, by one rank of each machine."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self._warmup.start()

    def begin(self, step: int | None, *, coordinates: bool) -> None:
        """Begin a save.

        Args:
            step: of the state; None takes the one after the newest checkpoint's.
            coordinates: whether this process commits it.

        Raises:
            StoreError: the store cannot be read, or not be written to.
            ConfigError: the save before has not ended.
        """
        if self._writing.locked():
            raise ConfigError(
                f"step {self._step} is still being saved to {self._store.display}: wait for the future of async_save before the"
                " next one"
            )
        found = self._store.manifests()
        newest = self._newest = found[0] if found else None
        self._step = step if step is not None else 0 if newest is None else newest.step + 1
        pending, self._pending, self._link = self._pending, None, None
        chain = self._chain
        chain.parent = newest
        if pending is not None and newest is not None and pending.is_in(newest) and not chain.base_is_due:
            self._link = Link(newest.state_digest, dict(pending.reference))
        if coordinates:
            writer = chain.open()
            self._began = writer.now()
            if newest is not None and newest.session != writer.session:
                chain.parent = None

    def write(self, plan: SavePlan, planner: SavePlanner, place: Place) -> dict[str, Any]:
        """Code and store this rank's part.

        Args:
            plan: what is to be written.
            planner: that made the plan.
            place: of this rank.

        Returns:
            What the coordinator is to know of it, as JSON.

        Raises:
            ShrinkpointError: see `take_items`; or the store failed.
        """
        with self._writing:
            return self._write(plan, planner, place)

    def _write(self, plan: SavePlan, planner: SavePlanner, place: Place) -> dict[str, Any]:
        own = take_items(plan.items, planner, plan.planner_data)
        self._warmup.wait()
        link, self._link = self._link, None
        parent = link.digest if link else None
        after = -1 if self._newest is None else self._newest.seq
        # part 0 is the coordinator's, with the tree
        stored = self._store_part(own.state, link, Place(place.rank + 1, place.world + 1))
        self._pending = _Pending(self._step, after, stored.reference)
        return stored.message() | {
            "plain": own.plain,
            "parent": parent,
            "place": [place.rank, place.world],
        }

    def finish(
        self,
        metadata: Metadata,
        stored: Sequence[Sequence[MetadataIndex]],
        answers: Sequence[Mapping[str, Any]],
    ) -> None:
        """Commit what all ranks have stored.

        Args:
            metadata: of the whole checkpoint.
            stored: the items of each rank.
            answers: of `write`, of all ranks.

        Raises:
            ShrinkpointError: they do not belong together, or the store failed.
        """
        self._check(answers)
        plain = {fqn: node for answer in answers for fqn, node in answer["plain"].items()}
        parent = answers[0]["parent"]
        link = None if parent is None else Link(parent, {})
        more = {
            name: number
            for number, answer in enumerate(answers, 1)
            for node in answer["plain"].values()
            for name in tensor_names(node)
        }
        table = table_to_store(metadata, stored, more)
        first = self._store_part(whole_state(metadata, plain), link, Place(0, len(answers) + 1), table)
        self._keep_lineage()
        report = commit_parts(self._chain, [first.message(), *answers], link, began=self._began)
        self.reports.append(report)

    def _check(self, answers: Sequence[Mapping[str, Any]]) -> None:
        places = [tuple(answer["place"]) for answer in answers]
        if places != [(rank, len(answers)) for rank in range(len(answers))]:
            raise ConfigError(
                f"{len(answers)} ranks save together, and they are (rank, of) {places[:8]}: give the same process_group to"
                " StorageWriter and to save, and let all ranks of it save"
            )
        parents = [answer["parent"] for answer in answers]
        own = self._chain.parent.state_digest if self._chain.parent is not None else None
        if len(set(parents)) > 1 or (parents[0] is not None and parents[0] != own):
            whole = [rank for rank, parent in enumerate(parents) if parent is None or parent != own]
            raise StoreError(
                f"the ranks do not build on the same checkpoint, as after a rank was restarted alone (ranks {whole[:8]}): this"
                " save has failed, and the next one is a base"
            )

    def _store_part(
        self, state: TrainingState, link: Link | None, place: Place, table: JSON = None
    ) -> StoredPart:
        started = time.perf_counter()
        plan = exactly("scheme='lossless' stores everything exactly", is_explained=True)
        encoded = encode_state(
            state,
            plan.scheme,
            step=self._step,
            reference=link.reference if link else None,
            parent=link.digest if link else None,
            release=link.reference.pop if link else None,
            provenance=provenance(),
            threads=self._config.encoder_threads,
            lasting=True,
        )
        report = replace(
            report_of(plan, encoded, step=self._step),
            not_finite=not_finite(state),
            encode_s=time.perf_counter() - started,
        )
        return store_part(
            self._store,
            encoded,
            report,
            PartOf(place.rank, place.world, table),
            session=self._session,
            tree=state.tree if place.rank == 0 else None,
        )

    def _keep_lineage(self) -> None:
        """Which training the checkpoint is of: that of the run's checkpoint which this process has loaded."""
        chain = self._chain
        if chain.lineage is not None:
            return
        chain.lineage = _read.get(self._store.display)
        if chain.lineage is None:
            chain.lineage = new_nonce()
            if self._newest is not None:
                warn(
                    f"{self._store.display} has checkpoints, the newest of step {self._newest.step}, that this training has not"
                    " loaded. They stay, and are not counted by keep_last and keep_every. To go on from them, load with"
                    " StorageReader first; to keep the two apart, give another url"
                )


_read: dict[str, str] = {}
_runs: dict[tuple[int, str], Run] = {}


def note_read(store: RunStore, manifest: Manifest) -> None:
    """Note that this process goes on from a checkpoint, if it saves to the same run."""
    lineage = lineage_of(manifest.meta)
    if lineage is not None:
        _read[store.display] = lineage


def run_of(url: RunUrl, config: SaverConfig, storage_options: StorageOptions) -> Run:
    """This process's part in the saves to a run; one for all writers with the same arguments.

    Torch hands a copy of its writer to its process for saves at every save, and callers may make one for every save: what
    the next delta builds on outlives them.

    Raises:
        ConfigError: the URL or the options cannot work.
    """
    key = (os.getpid(), repr((url, config, storage_options)))
    if key not in _runs:
        _runs[key] = Run(RunStore(url, storage_options=storage_options), config)
    return _runs[key]
