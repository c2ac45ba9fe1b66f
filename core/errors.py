"""Every exception that shrinkpoint raises on purpose.

A message says what was wrong with which file, tensor or field, and what to do about it. ``except ShrinkpointError``
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
    "ShrinkpointError",
    "ShrinkpointWarning",
    "StateMismatchError",
    "StoreError",
    "UnsupportedFormatError",
]


class ShrinkpointError(Exception):
    """Base of every error that shrinkpoint raises on purpose."""


class ShrinkpointWarning(UserWarning):
    """Something was skipped or weakened but the work goes on; the message says what, why and what to do."""


class ConfigError(ShrinkpointError, ValueError):
    """An option has a value that cannot work; the message names the field, the value and the fix."""


class MissingDependencyError(ShrinkpointError, ImportError):
    """An optional package is needed; the message holds the install command."""


class CannotRepresentError(ShrinkpointError):
    """A codec cannot represent this tensor (non-finite values, unknown dtype); it is then stored exactly."""


class FormatError(ShrinkpointError):
    """Bytes are not a well-formed shrinkpoint container, section or manifest."""


class UnsupportedFormatError(FormatError):
    """A well-formed file that needs a newer shrinkpoint, or a feature that this one lacks."""


class CorruptionError(FormatError):
    """A checksum or digest does not match: the bytes are not those that were written."""


class ChainError(ShrinkpointError):
    """A checkpoint's chain back to its base is incomplete or does not fit together."""


class StoreError(ShrinkpointError):
    """The store could not be read or written: wrong URL, no credentials, full disk, no permission, network."""


class NoCheckpointError(StoreError):
    """No checkpoint was found where one was required."""


class FencedError(StoreError):
    """Another writer has taken over this run; this one must stop and leaves the stored data alone."""


class RunMismatchError(StoreError):
    """The prefix holds something else: another run, another model, or a foreign file."""


class StateMismatchError(ShrinkpointError):
    """A checkpoint does not fit the model or optimizer; the message names the tensors that differ."""


class SaveFailedError(ShrinkpointError):
    """Saving failed as many times in a row as ``max_failures`` allows."""
