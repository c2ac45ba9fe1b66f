"""One run whose model is sharded: every rank saves and restores its part, where of other runs the first one does for all."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.nn import Module

from shrinkpoint.engine.request import SaveRequest
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.common.run_session import RunSession
from shrinkpoint.integrations.common.settings import RunSettings
from shrinkpoint.reports import SaveReport
from shrinkpoint.sharded.agreement import refuse_options
from shrinkpoint.sharded.saver import ShardedSaver, Targets
from shrinkpoint.store.manifest import Manifest

__all__ = ["ShardedRun"]

T = TypeVar("T")


class ShardedRun(RunSession):
    """As `RunSession`; each method is called on every rank, `hand_over` too.

    Args:
        settings: the callback's options.
        targets: as of `ShardedSaver`.
        own: as of `ShardedSaver`.

    Raises:
        ConfigError: an option is not for sharded models.
    """

    def __init__(
        self, settings: RunSettings, *, targets: Targets, own: Callable[[], Mapping[str, Mapping[str, Any]]]
    ) -> None:
        super().__init__(settings)
        if settings.step_log is not None:
            raise ConfigError(
                "step_log= is not supported for sharded models: leave it out, and save more often instead"
            )
        refuse_options(settings.stores, settings.saver)
        self._targets, self._own = targets, own
        self._shards: ShardedSaver | None = None
        self._settled = 0

    @property
    def saver(self) -> ShardedSaver:  # type: ignore[override]  # all that the methods here and of the base class call
        """The run's saver."""
        if self._shards is None:
            settings = self.settings
            self._shards = ShardedSaver(
                settings.stores,
                settings.saver,
                targets=self._targets,
                own=self._own,
                storage_options=settings.storage_options,
            )
            self._saver = self._shards  # type: ignore[assignment]
        return self._shards

    @property
    def probe_steps(self) -> int:
        """See `RunSession.probe_steps`; all ranks make them together, where they measure."""
        return super().probe_steps if self.measures else 0

    fills_in_place = True

    def refer_to(self, model: Module) -> None:
        """See `RunSession.refer_to`; shards are stored, frozen ones too."""

    def decide(self, action: Callable[[], T]) -> T:
        """See `RunSession.decide`; here every rank takes part."""
        return action()

    def open(self) -> None:
        """See `RunSession.open`.

        Raises:
            ConfigError, StoreError: as `ShardedSaver.check`; on every rank.
        """
        self.saver.check()

    @property
    def measures(self) -> bool:
        """Whether checkpoints are measured, by evaluations on all ranks; the batches kept for that are others after a resume."""
        config = self.settings.saver
        return config.scheme != "lossless" and not config.adopt

    def restore(self, manifest: Manifest) -> Any:
        """See `RunSession.restore`; the model's and the optimizers' tensors are those of `targets`, filled.

        Raises:
            ShrinkpointError: as `ShardedSaver.restore`; on every rank.
        """
        restored = self.saver.restore(manifest)
        assert restored is not None
        return restored.state.to_object()

    def attend(self, *, serve: bool = True) -> list[SaveReport]:
        """See `RunSession.attend`; every rank takes part in an evaluation.

        Raises:
            ShrinkpointError: as `ShardedSaver.poll`.
        """
        if serve and self._shards is not None:
            self._shards.poll()
        return super().attend(serve=False)

    def settled(self) -> list[SaveReport]:
        """The reports since the last call, on every rank; later on some than on others."""
        new = [] if self._shards is None else self._shards.reports()[self._settled :]
        self._settled += len(new)
        return new

    def wants(self, *, last: bool) -> bool:
        """True: the ranks agree in `hand_over`, before a tensor is moved."""
        return True

    def hand_over(self, request: SaveRequest) -> bool:
        """See `RunSession.hand_over`; a last save is committed, or has failed, when this returns.

        Raises:
            ShrinkpointError: as `StateSaver.accept`; on every rank.
        """
        return self._accepted(request)

    def warn_unsaved(self, step: int) -> None:
        """Say on the first rank, if training ends at a step that could not be saved, which checkpoint is the newest.

        Args:
            step: the training's, whose reports have been taken by `attend`.
        """
        if step == self.saved_step or not world().is_first:
            return
        newest = self.best.last_path
        self.warn_once(
            f"training ends at step {step}, which could not be saved:"
            f" {f'the newest checkpoint is {newest}' if newest else 'there is no checkpoint'}"
        )

    def release(self) -> None:
        """See `RunSession.release`."""
        super().release()
        self._shards, self._settled = None, 0
