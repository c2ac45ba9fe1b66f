"""Gives the callback access to its trainer: callbacks get events but no trainer, and cannot make it resume.

`Trainer.train` is wrapped once per process, and looks for shrinkpoint's callback among the trainer's. During a training
a few methods of that one trainer are replaced: those that load, get data, log, evaluate and save.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import transformers
from transformers import Trainer
from transformers import trainer as trainer_module

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.transformers.data import FollowedLoader
from shrinkpoint.warn import warn

TESTED = "4.57 and 5.23"
_MARK = "_shrinkpoint"
_SKIP = "skip_first_batches"
_NEWER = {"_load_scaler"}  # which some supported versions lack
_ABSENT = object()

Override = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a trainer's own method and returns its replacement."""


class _Session(Protocol):
    def renewed(self) -> "_Session": ...
    def training(self, trainer: Any, given: Any) -> AbstractContextManager[Any]: ...


def install() -> None:
    """Make `Trainer.train` look for shrinkpoint's callbacks; a trainer without one trains as before.

    Raises:
        ConfigError: this version of transformers has another trainer.
    """
    if getattr(Trainer.train, _MARK, False):
        return
    skip = getattr(trainer_module, _SKIP, None)
    if skip is None:
        raise ConfigError(
            f"transformers {transformers.__version__} skips batches in a way that CompressedCheckpoint does not know; it was"
            f" tested with {TESTED}"
        )
    setattr(trainer_module, _SKIP, _skipping(skip))
    Trainer.train = _asking(Trainer.train)


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        owners = [each for each in self.callback_handler.callbacks if hasattr(each, "_shrinkpoint_session")]
        given = None if resume_from_checkpoint is False else resume_from_checkpoint
        given = kwargs.pop("model_path", given)  # its name in earlier versions
        trial = args[0] if args else kwargs.get("trial")
        if not owners:
            return original(self, given, *args, **kwargs)
        if trial is not None:
            warn("the trials of a hyper-parameter search are not saved: CompressedCheckpoint ignores them")
            return original(self, given, *args, **kwargs)
        if len(owners) > 1:
            raise ConfigError(
                f"{len(owners)} CompressedCheckpoint callbacks are in this Trainer: give it one of them"
            )
        # a callback may serve one train after another
        session: _Session = owners[0]._shrinkpoint_session.renewed()
        owners[0]._shrinkpoint_session = session
        with session.training(self, given) as found:
            return original(self, found, *args, **kwargs)

    setattr(train, _MARK, True)
    return train


def _skipping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if type(dataloader) is FollowedLoader:
            return dataloader.skipping(num_batches)
        return original(dataloader, num_batches)

    return skip_first_batches


@contextmanager
def overridden(trainer: Any, overrides: Mapping[str, Override]) -> Iterator[None]:
    """Replace methods of one trainer, by name, and not of its class, for a while; a missing one is a ConfigError."""
    wanted = {name: make for name, make in overrides.items() if callable(getattr(trainer, name, None))}
    if missing := overrides.keys() - wanted.keys() - _NEWER:
        raise ConfigError(
            f"the {type(trainer).__name__} of transformers {transformers.__version__} has no {', '.join(sorted(missing))}, which"
            f" CompressedCheckpoint needs; it was tested with {TESTED}"
        )
    before = {name: vars(trainer).get(name, _ABSENT) for name in wanted}
    try:
        for name, make in wanted.items():
            setattr(trainer, name, make(getattr(trainer, name)))
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                vars(trainer).pop(name, None)
            else:
                setattr(trainer, name, value)
