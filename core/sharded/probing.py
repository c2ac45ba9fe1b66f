"""Evaluations, and steps from a state, that all ranks make together, of candidates that their background threads have made.

The training threads look, in a collective of a few bytes at every batch while a save is being planned, whether all background
threads wait for an evaluation. If so, the candidate's tensors travel from their owners into tensors with the model's shards, and
every rank evaluates these in the model's place, or trains from them for some steps that are undone. What the ranks' evaluations come to is said over the store, since a rank whose
evaluation has failed must enter no further collective: others may still be in one of the evaluation's own.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from shrinkpoint.engine.ranks import OwnedWeights
from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.group.group import Distributed
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.quality.evaluation import EvaluationDesk, EvaluationUnavailableError, losses_of
from shrinkpoint.quality.measurement import Losses
from shrinkpoint.quality.preserve import TraceError
from shrinkpoint.sharded.boxes import Pieces, pieces_of
from shrinkpoint.sharded.gathering import Shards, spread
from shrinkpoint.sharded.layout import block_box
from shrinkpoint.state.training import TrainingState
from shrinkpoint.warn import warn

_LONGEST_S = 1800.0
"""Seconds that a rank waits for the others' losses, as long as none is known to have failed: torch's own limit of collectives."""
_FIRST_LOOK_S = 0.002
_LONGEST_PAUSE_S = 0.2
_RANKS_PER_S = 500
"""That the first rank's store is asked by at most."""
_IDLE, _PLANNING, _WAITING = 0, 1, 2


class SharedDesk(EvaluationDesk):
    """One rank's part in the evaluations; its losses are those of all ranks, the same on every one.

    Args:
        group: all ranks.
        patience_s: seconds that a rank whose evaluation has failed waits for the others to leave theirs.
    """

    def __init__(self, group: Distributed, *, patience_s: float) -> None:
        super().__init__()
        self._group, self._patience_s = group, patience_s
        self._look_every_s = max(self._look_every_s, group.size / _RANKS_PER_S)
        self.mailbox: Mailbox | None = None
        """To the others, for the training thread alone."""
        self.background: Mailbox | None = None
        """To the others, for the background thread alone."""
        self._is_active = False
        self._shards: Shards | None = None
        self._live: TrainingState | None = None
        self._number = self._count = 0
        self._names: dict[str, str] = {}
        """The stored tensors of all ranks that an evaluation gets, and how it names them; known at the first one of a save."""
        self._speakers: tuple[int, ...] = ()
        """On the first rank: the ranks whose losses count. Others have the same batches as these, as with tensor parallelism."""
        self._fatal: Exception | None = None
        self._warned = False
        self._made: dict[int, int] = {}
        self._began = self._first_s = 0.0

    @property
    def seconds(self) -> float:
        """Time that evaluations have taken from the first rank's training so far; the same on every rank."""
        return self._first_s

    @property
    def is_active(self) -> bool:
        """Whether a save is being planned; the same on every rank."""
        return self._is_active

    def probe(self, number: int, shards: Shards, live: TrainingState) -> None:
        """Let the save that has begun be measured by all ranks; on every rank, before its background thread starts.

        Args:
            number: of the save.
            shards: of the state that is saved.
            live: the state, with DTensors: of its tensors only the layout is used.
        """
        self._is_active, self._shards, self._live = True, shards, live
        self._number, self._count, self._names, self._speakers = number, 0, {}, ()

    def targets(self, names: Collection[str]) -> tuple[dict[str, torch.Tensor], Pieces]:
        """Return memory for stored tensors: tensors with the layout of the training's own, and this rank's pieces of them."""
        assert self._live is not None
        tensors, pieces = {}, {}
        for name in dict.fromkeys(block_box(self._saved.owners[stored][0])[0] for stored in names):
            own = self._live.tensors.get(name)
            if own is None or tuple(own.shape) != self._saved.layout.specs[name].shape:
                continue  # this rank has no such tensor
            mesh = getattr(own, "device_mesh", None)
            if mesh is not None and mesh.get_coordinate() is None:
                continue  # nor a shard of it
            tensors[name] = torch.empty_like(own.detach())
            pieces[name] = pieces_of(name, tensors[name])
        return tensors, pieces

    @property
    def _saved(self) -> Shards:
        assert self._shards is not None
        return self._shards

    def close(self, why: str = "training has ended") -> None:
        """Refuse requests from now on, here and on the other ranks, whose training may wait for this one; no collective."""
        super().close(why)
        if self._is_active and self.mailbox is not None:
            with suppress(StoreError):  # the first rank is gone, and with it the save
                self.mailbox.post(_left_key(self._number), {})
        self._is_active = False

    def _is_left(self) -> bool:
        if super()._is_left():
            return True
        assert self.background is not None
        if self.background.has(_left_key(self._number)):
            self._closed = "training has ended on another rank"
            return True
        return False

    def poll(self, *, late: bool = False) -> tuple[float, bool]:
        """See `EvaluationDesk.poll`.

        Raises:
            ConfigError: an evaluation has failed on some ranks, and others are still in theirs.
            StoreError: the first rank is gone.
        """
        if not self._is_active:
            return 0.0, False
        state = _WAITING if self.waiting else _PLANNING if self._planning else _IDLE
        most = self._group.most([state, -state, late])
        highest, lowest = most[0], -most[1]
        if lowest == _WAITING:
            return self._served(), False
        if highest == _WAITING and lowest == _IDLE:
            return self.serve(_refuse), False
        if highest == _IDLE:
            self._is_active, self._shards, self._live = False, None, None
        return 0.0, bool(most[2])

    def _served(self) -> float:
        self._began = time.perf_counter()
        seconds = self.serve(self._losses, self._steps)
        if self._fatal is not None:
            fatal, self._fatal = self._fatal, None
            raise fatal
        return seconds

    def _losses(self, weights: Mapping[str, torch.Tensor]) -> Losses:
        assert isinstance(weights, OwnedWeights)
        assert self._evaluate is not None
        if not self._names:
            for names in self._group.gather(dict(weights.evaluated_as)):
                self._names |= names
        tensors = self._spread(self._names, weights)
        values = {}
        for name, key in self._names.items():
            of, _ = block_box(self._saved.owners[name][0])
            if of in tensors:
                values[key] = tensors[of]
        own: dict[str, Any]
        try:
            own = {"losses": [losses_of(self._evaluate(values))]}
        except Exception as error:  # noqa: BLE001 - all ranks learn of it
            own = {"error": f"{type(error).__name__}: {error}", "trace": isinstance(error, TraceError)}
        del values, tensors
        return self._of_all(own)[0]

    def _steps(self, tensors: Any, marks: Sequence[int]) -> Sequence[Losses]:
        assert self._resumed is not None
        try:
            found = self._spread(self._saved.owners, tensors)
        except Exception as error:
            self.takes_steps = False
            if self._group.rank == 0:
                warn(
                    f"the quality of checkpoints is measured at the restore alone: no steps can be taken from one ({error})"
                )
            raise
        live = self._live
        assert live is not None
        state = TrainingState(live.tree, {**live.tensors, **found}, live.specs).to_object()
        own: dict[str, Any]
        try:
            own = {"losses": [losses_of(loss) for loss in self._resumed(state, marks)]}
        except Exception as error:  # noqa: BLE001 - all ranks learn of it
            own = {"error": f"{type(error).__name__}: {error}"}
        del found, state
        return self._of_all(own)

    def _spread(self, names: Collection[str], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return stored tensors from their owners in this rank's shards; a collective.

        Args:
            names: of the stored tensors, the same on every rank.
            values: those of them that this rank owns.
        """
        tensors, pieces = self._group.on_every(lambda: self.targets(names))
        shards = replace(self._saved, pieces=pieces)
        spread(shards, [name for name in shards.owners if name in names], values)
        return tensors

    def _of_all(self, own: dict[str, Any]) -> list[Losses]:
        """Return the losses of all ranks at each mark, from this rank's."""
        self._count += 1
        self._made = {self._number: self._count}
        try:
            together = self._together(own)
        except Exception as error:
            self._fatal = error
            raise
        self._first_s = together.get("seconds", self._first_s)
        if "error" in together:
            self.leaves_trace |= bool(together.get("trace"))
            self._warn_failed(together["error"], own)
            raise EvaluationUnavailableError(together["error"])
        return [tuple(map(float, losses)) for losses in together["losses"]]

    def _warn_failed(self, error: str, own: Mapping[str, Any]) -> None:
        is_reported = "error" in own and not own.get("trace")
        if self._group.rank == 0 and not is_reported and not self._warned:
            self._warned = True
            warn(f"the quality of checkpoints cannot be measured, so they are stored exactly: {error}")

    # ---- what the ranks' evaluations come to

    def _together(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the losses of all ranks, or why there are none.

        Raises:
            ConfigError: an evaluation has failed, and a rank does not leave its own.
            StoreError: the first rank is gone.
        """
        key, rank, mailbox = _loss_key(self._number, self._count), self._group.rank, self.mailbox
        assert mailbox is not None
        if rank:
            mailbox.post(f"{key}/{rank}", own)
            return self._when_there(mailbox, key, own)
        found = [own]
        for other in range(1, self._group.size):
            failed = next((one for one in found if "error" in one), {})
            try:
                found.append(self._when_there(mailbox, f"{key}/{other}", failed))
            except ConfigError as error:
                mailbox.post(key, {"error": str(error)})
                raise
        seconds = self._served_s + time.perf_counter() - self._began
        together = self._combined(found) | {"seconds": seconds}
        mailbox.post(key, together)
        return together

    def _when_there(self, mailbox: Mailbox, key: str, failed: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message, for which less time is left where an evaluation is known to have failed."""
        limit_s = self._patience_s if "error" in failed else _LONGEST_S
        deadline, pause_s = time.monotonic() + limit_s, _FIRST_LOOK_S
        while not mailbox.has(key):
            if time.monotonic() >= deadline:
                what = f"it has failed on a rank ({failed['error']})" if failed else "it is over on this one"
                raise ConfigError(
                    f"an evaluation is still under way on another rank {limit_s:.0f} s after {what}: the ranks cannot go on"
                    " together. An evaluation must make the same steps, and fail, on all ranks or on none"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return mailbox.wait(key, self._patience_s)

    def _combined(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        for rank, one in enumerate(found):
            if "error" in one:
                return {**one, "error": f"on rank {rank}: {one['error']}"}
        losses = [[tuple(at_mark) for at_mark in one["losses"]] for one in found]
        if not self._speakers:
            first = {tuple(own): rank for rank, own in reversed(list(enumerate(losses)))}
            self._speakers = tuple(sorted(first.values()))
        spoken = zip(*(losses[rank] for rank in self._speakers), strict=True)
        return {"losses": [[loss for own in at_mark for loss in own] for at_mark in spoken]}

    def messages(self, number: int) -> list[str]:
        """Return the messages of a save's evaluations, which all ranks have read when the next save begins."""
        keys = [_loss_key(number, count) for count in range(1, self._made.get(number, 0) + 1)]
        keys += [f"{key}/{rank}" for key in keys for rank in range(1, self._group.size)]
        return [*keys, _left_key(number)]


def _left_key(number: int) -> str:
    return f"{number}/left"


def _loss_key(number: int, count: int) -> str:
    return f"{number}/loss/{count}"


def _refuse(weights: Mapping[str, torch.Tensor]) -> Losses:
    raise EvaluationUnavailableError("another rank does not plan this save any more")
