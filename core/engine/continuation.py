"""What the next save continues: a restored checkpoint, the state that a training starts with, or nothing."""

from shrinkpoint.coding.selective import Decoded
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.chain import Chain
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.manifest import Manifest

__all__ = ["Continuation"]


class Continuation:
    """The next save continues a restored checkpoint, a training's first state, or nothing; a save under way is not affected.

    Args:
        background: makes the saves.
        chain: of the run.
    """

    def __init__(self, background: Background, chain: Chain) -> None:
        self._background = background
        self._chain = chain
        self._restored: tuple[Manifest, Decoded] | None = None
        self._forgets = False
        self._follows: Manifest | None = None
        self._begun: tuple[TrainingState, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether a checkpoint was restored, or saved last, that training continues from."""
        return self._restored is not None or (self._background.movement.knows and not self._forgets)

    def begin(self, state: TrainingState, step: int) -> None:
        """A training starts with these weights, unless it goes on from the save that is under way."""
        self._begun = state, step

    def restore(self, manifest: Manifest, decoded: Decoded) -> None:
        """Note that the next save continues this checkpoint's chain."""
        self._restored = manifest, decoded

    def forget(self, follows: Manifest | None) -> None:
        """Note that the next save continues no chain.

        Args:
            follows: as of `Saver.forget`.
        """
        self._restored = None
        self._forgets, self._follows = True, follows

    def settle(self) -> None:
        """Let the next save continue what was noted; to be called only when no save is under way."""
        if self._forgets:
            self._background.start_over()
            if self._follows is not None:
                self._chain.follow(self._follows)
            self._forgets, self._follows = False, None
        if self._begun is not None:
            # the save that was under way meanwhile is what training continues from
            if not self._background.movement.knows:
                self._background.begin(*self._begun)
            self._begun = None
        if self._restored is not None:
            (manifest, decoded), self._restored = self._restored, None
            self._background.adopt(manifest, decoded.reference, decoded.state)
