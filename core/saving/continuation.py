"""What the next save continues: noted while a save is under way, and handed to the committer when none is."""

from shrinkpoint.coding.encode import Decoded
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.saving.committer import Committer
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.warn import warn

__all__ = ["Continuation"]


class Continuation:
    """The next save continues a restored checkpoint, a training's first state, or nothing; a save under way is not affected.

    Args:
        committer: makes the saves.
        config: how to save.
    """

    def __init__(self, committer: Committer, config: SaverConfig) -> None:
        self._committer = committer
        self._config = config
        self._restored: tuple[Manifest, Decoded] | None = None
        self._forgets = False
        self._follows: Manifest | None = None
        self._begun: tuple[TrainingState, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether a checkpoint was restored, or saved last, that training continues from."""
        return self._restored is not None or (self._committer.follows and not self._forgets)

    def begin(self, state: TrainingState, step: int) -> None:
        """A training starts with these weights, unless it goes on from the save that is under way."""
        self._begun = state, step

    def restore(self, manifest: Manifest, decoded: Decoded) -> None:
        """The next save continues this checkpoint's chain."""
        self._restored = manifest, decoded

    def forget(self, follows: Manifest | None) -> None:
        """The next save continues no chain.

        Args:
            follows: as of `Saver.forget`.
        """
        self._restored = None
        self._forgets, self._follows = True, follows

    def settle(self) -> None:
        """Let the next save continue what was noted; to be called only when no save is under way."""
        if self._forgets:
            self._committer.start_over()
            if self._follows is not None:
                self._committer.follow(self._follows)
            self._forgets, self._follows = False, None
        if self._begun is not None:
            if (
                not self._committer.follows
            ):  # the save that was under way meanwhile is what training continues from
                self._committer.begin(*self._begun)
            self._begun = None
        if self._restored is not None:
            (manifest, decoded), self._restored = self._restored, None
            self._committer.adopt(manifest, decoded.reference, decoded.state)
            self._resume_search(manifest)

    def _resume_search(self, manifest: Manifest) -> None:
        if self._config.adopt:
            return  # the committer has done it
        search = manifest.meta.get("search")
        try:
            self._committer.planner.load_state_dict(search if isinstance(search, dict) else {})
        except ConfigError as error:
            warn(f"the search starts over: {error}")
