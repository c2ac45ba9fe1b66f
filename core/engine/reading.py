"""Reads the checkpoints of one run for a training that goes on from them, reports what is wrong with them, and lets the next save continue one."""

from collections.abc import Callable

from shrinkpoint.coding.selective import Decoded
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.retention import is_finite, not_finite_text
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

__all__ = ["CheckpointReader", "Continuation"]


class CheckpointReader:
    """Reads and verifies checkpoints.

    Args:
        store: the run.
        url: its URL, without credentials.
        decode: reads and decodes one.
    """

    def __init__(self, store: RunStore, url: str, decode: Callable[[Manifest], Decoded]) -> None:
        self._store = store
        self._url = url
        self._decode = decode

    def newest(self) -> tuple[Manifest, Decoded] | None:
        """Return the newest checkpoint whose whole chain is sound; None in an empty run.

        Raises:
            ChainError: there are checkpoints, and none of them is sound.
            StoreError: the store cannot be read.
        """
        with waiting_for(f"reading the newest checkpoint of {self._store.display}"):
            return self._store.newest_readable(self._decode)

    def chosen(self, which: Manifest | int) -> tuple[Manifest, Decoded]:
        """Return one checkpoint.

        Args:
            which: a manifest, or a step.

        Raises:
            NoCheckpointError: there is none of that step.
            FormatError, ChainError: it is damaged.
            StoreError: the store cannot be read.
        """
        manifest = (
            which
            if isinstance(which, Manifest)
            else Address(url=self._url, step=which).find(self._store.manifests())
        )
        with waiting_for(f"reading the checkpoint of step {manifest.step} of {self._store.display}"):
            return manifest, self._decode(manifest)

    def warn_if_diverged(self, manifest: Manifest) -> None:
        """Warn if a checkpoint is not finite, with the way to the last one that is."""
        found = not_finite_text(manifest)
        if found is None:
            return
        sound = next(
            (m for m in self._store.manifests() if m.position < manifest.position and is_finite(m)), None
        )
        way_out = (
            "The run holds no finite checkpoint of before"
            if sound is None
            else f"The last finite one is of step {sound.step}. To go on from there: Checkpointer.resume(step={sound.step}),"
            f" Lightning's fit(ckpt_path='{Address(url=self._url, step=sound.step)}'), Transformers' train(resume_from_checkpoint=...)"
            " with the same address, or `shrinkpoint export` and whatever loads that"
        )
        warn(
            f"the checkpoint of step {manifest.step} in {self._store.display} is not finite: {found}. {way_out}"
        )


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
