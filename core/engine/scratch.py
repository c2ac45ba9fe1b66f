"""What a save does not need in memory at the moment, in a folder on a local disk."""

from collections.abc import Callable

from shrinkpoint.config import SaverConfig
from shrinkpoint.quantize.movement import is_followed
from shrinkpoint.runtime.scratch import Scratch
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.state.scratch import put_arrays, put_tensor
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.training import Role, TrainingState

__all__ = ["SaveScratch"]

_MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES, Role.STATE)


class SaveScratch:
    """Puts parts of one save after another into a folder, each into a file of its own, which is gone when the part is.

    What cannot be written stays in memory, after a warning.

    Args:
        scratch: makes the files.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    @staticmethod
    def of(config: SaverConfig) -> "SaveScratch | None":
        """As it is configured; None where all stays in memory."""
        return None if config.scratch_folder is None else SaveScratch(Scratch(config.scratch_folder))

    def look(self) -> None:
        """Warn where the folder is in memory itself; before training starts."""
        self._scratch.look()

    def weights(self, state: TrainingState, *, lasting: bool) -> TrainingState:
        """The weights of a snapshot whose movement is followed, to be compared with the next one's.

        Args:
            state: the snapshot, or its weights, on the host; it stays as it is.
            lasting: whether nobody will write to it any more, so that what stays in memory is not copied.
        """
        file = self._scratch.file()
        specs = {name: spec for name, spec in state.specs.items() if is_followed(spec)}
        tensors = {}
        for name in specs:
            tensor = state.tensors[name].detach()
            kept = put_tensor(file, tensor)
            tensors[name] = kept if kept is not tensor or lasting else tensor.to("cpu", copy=True)
        return TrainingState(None, tensors, specs)

    def moments(self, snapshot: Snapshot, state: TrainingState) -> TrainingState:
        """A snapshot without its moments in memory: whoever wants one reads it.

        Args:
            snapshot: lets go of them.
            state: of the snapshot, with the roles that are known by now.
        """
        file = self._scratch.file()
        tensors = dict(state.tensors)
        for name, spec in state.specs.items():
            if spec.tag.role in _MOMENTS:
                tensors[name] = put_tensor(file, tensors[name])
                snapshot.hold(name, tensors[name])
        return TrainingState(state.tree, tensors, state.specs)

    def keeper(self) -> Callable[[ReferenceState], ReferenceState]:
        """What puts the planes of one checkpoint away, tensor by tensor, from any thread."""
        file = self._scratch.file()
        return lambda reference: reference.moved(lambda arrays: put_arrays(file, arrays))
