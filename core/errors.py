"""Every exception that shrinkpoint raises on purpose.

A message names the file, tensor or field, what is wrong with it, and what to do. ``except ShrinkpointError``
catches all of them and nothing else.
"""

__all__ = [
    "CannotRepresentError",
    "ChainError",
    "ConfigError",
    "CorruptionError",
    "FencedError",
    "FormatError",
    "MissingDependencyError",
    "NoCheckpointError",
    "RunMismatchError",
    "SaveFailedError",
    "ScratchError",
    "ShrinkpointError",
    "ShrinkpointWarning",
    "StateMismatchError",
    "StoreError",
    "UnsupportedFormatError",
]


class ShrinkpointError(Exception):
    """Base of every error that shrinkpoint raises on purpose.

    Examples:
        >>> try:
        ...     state = shrinkpoint.load("runs/7#step=1234")
        ... except shrinkpoint.ShrinkpointError as error:
        ...     print(error)
        runs/7 has no checkpoint of step 1234; there are 1000, 2000, 3000
    """


class ShrinkpointWarning(UserWarning):
    """Something was skipped or weakened, but work continues; the message gives the reason and what to do.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():  # in tests, say: what is weakened is an error
        ...     warnings.simplefilter("error", shrinkpoint.ShrinkpointWarning)
        ...     state = shrinkpoint.load("runs/7#newest")
    """


class ConfigError(ShrinkpointError, ValueError):
    """An option has a value that cannot work; the message names the field, the value and the fix.

    Examples:
        >>> shrinkpoint.SaverConfig(key_every=0)
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.ConfigError: key_every must be a positive integer, not 0
    """


class MissingDependencyError(ShrinkpointError, ImportError):
    """An optional package is needed; the message contains the install command.

    Examples:
        >>> from shrinkpoint.errors import MissingDependencyError
        >>> try:
        ...     from shrinkpoint.callbacks.lightning import CompressedCheckpoint
        ... except MissingDependencyError:
        ...     callbacks = []  # this machine only evaluates
        ... else:
        ...     callbacks = [CompressedCheckpoint("runs/8")]
    """


class CannotRepresentError(ShrinkpointError):
    """A codec cannot represent this tensor (non-finite values, unknown dtype); it is then stored exactly.

    Examples:
        >>> shrinkpoint.save({"loss": print}, "model.shrink")
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.CannotRepresentError: loss is a builtins.builtin_function_or_method: it cannot be stored without pickle. ...
    """


class FormatError(ShrinkpointError):
    """Bytes are not a well-formed shrinkpoint container, section or manifest.

    Examples:
        >>> torch.save(model.state_dict(), "model.pt")
        >>> shrinkpoint.load("model.pt")
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.FormatError: model.pt: not a shrinkpoint container: ...
    """


class UnsupportedFormatError(FormatError):
    """A well-formed file that needs a newer shrinkpoint, or a feature that this one lacks.

    Examples:
        >>> from shrinkpoint.errors import UnsupportedFormatError
        >>> try:
        ...     state = shrinkpoint.load("model.shrink")
        ... except UnsupportedFormatError as error:
        ...     raise SystemExit(f"{error}: pip install --upgrade shrinkpoint") from error
    """


class CorruptionError(FormatError):
    """A checksum or digest does not match: the bytes are not those that were written.

    Examples:
        >>> from pathlib import Path
        >>> data = bytearray(Path("model.shrink").read_bytes())
        >>> data[-1] ^= 1  # one flipped bit
        >>> size = Path("damaged.shrink").write_bytes(data)
        >>> shrinkpoint.load("damaged.shrink")
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.CorruptionError: damaged.shrink: tensor ...: the checksum of section ... does not match
    """


class ChainError(ShrinkpointError):
    """A checkpoint's chain back to its base is incomplete or does not fit together.

    Examples:
        >>> from pathlib import Path
        >>> delta = max(Path("runs/7/data").iterdir())  # one file of a run, without its predecessors
        >>> shrinkpoint.load(delta)
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.ChainError: ... the chain starts with the delta of step 3000: its base is missing
    """


class StoreError(ShrinkpointError):
    """The store could not be read or written: wrong URL, no credentials, full disk, no permission, network.

    Examples:
        >>> from shrinkpoint.errors import StoreError
        >>> try:
        ...     weights = shrinkpoint.load_weights("/mnt/not-mounted/runs/7")
        ... except StoreError as error:
        ...     print(error)
        cannot read /mnt/not-mounted/runs/7: No such file or directory
    """


class NoCheckpointError(StoreError):
    """No checkpoint was found where one was required.

    Examples:
        >>> shrinkpoint.Checkpointer("runs/8", model, optimizer, resume="must").resume()
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.NoCheckpointError: ...
    """


class FencedError(StoreError):
    """Another writer has taken over this run; this one must stop and leaves the stored data alone.

    Examples:
        >>> from shrinkpoint.errors import FencedError
        >>> first = shrinkpoint.Checkpointer("runs/8", model, optimizer, scheme="lossless")
        >>> saved = first.save(500, wait=True)
        >>> second = shrinkpoint.Checkpointer("runs/8", model, optimizer, scheme="lossless")
        >>> second.resume(), second.save(1000, wait=True).step  # another process takes the run over
        (500, 1000)
        >>> try:
        ...     saved = first.save(1500, wait=True)
        ... except FencedError:
        ...     print("this process has to stop")
        this process has to stop
    """


class RunMismatchError(StoreError):
    """The prefix contains something else: another run, another model, or a foreign file.

    Examples:
        >>> from pathlib import Path
        >>> Path("photos").mkdir()
        >>> size = Path("photos/cat.jpg").write_bytes(b"...")
        >>> shrinkpoint.Checkpointer("photos", model, optimizer)
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.RunMismatchError: ... holds something else ('cat.jpg' for one): choose an empty folder or prefix for the run
    """


class StateMismatchError(ShrinkpointError):
    """A checkpoint does not fit the model or optimizer; the message names the tensors that differ.

    Examples:
        >>> other = torch.nn.Linear(2, 2)
        >>> shrinkpoint.Checkpointer("runs/7", other, torch.optim.AdamW(other.parameters())).resume()
        Traceback (most recent call last):
        ...
        shrinkpoint.errors.StateMismatchError: runs/7 holds another model's run. Tensors missing in the checkpoint: weight, bias; ...
    """


class SaveFailedError(ShrinkpointError):
    """Saving failed three times in a row, or at the end of a training.

    Examples:
        >>> from shrinkpoint.errors import SaveFailedError
        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, every=50)
        >>> try:
        ...     for step in range(10):
        ...         train_one_step()
        ...         saved = checkpointer.step(step + 1)
        ... except SaveFailedError as error:
        ...     print(f"training has ended, and can be resumed from {checkpointer.saver.url}: {error}")
    """


class LostRankError(ShrinkpointError):
    """Another process of the training has ended or cannot be reached, so that nothing can be agreed on any more: this one must end too.

    Examples:
        >>> from shrinkpoint.errors import LostRankError
        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, every=50)
        >>> try:
        ...     saved = checkpointer.save(500)
        ... except LostRankError as error:
        ...     raise SystemExit(f"start all processes again: {error}")
    """


class ScratchError(ShrinkpointError):
    """What a save had put into `scratch_folder` cannot be read back, or is not what was written: that save fails, and training goes on.

    Examples:
        >>> from shrinkpoint.errors import SaveFailedError, ScratchError
        >>> advanced = shrinkpoint.Advanced(scratch_folder=".")
        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, every=50, advanced=advanced)
        >>> try:
        ...     saved = checkpointer.save(500)
        ... except SaveFailedError as error:  # the third in a row
        ...     if isinstance(error.__cause__, ScratchError):
        ...         print(f"give another scratch_folder: {error}")
    """
