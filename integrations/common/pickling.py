"""Callbacks that are given to processes which are spawned: pickled, they are their arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["given", "note_arguments", "reduced"]

_GIVEN = "_shrinkpoint_given"
_SESSIONS = ("_session", "_shrinkpoint_session")
_OF_PROCESS = (_GIVEN, "_settings", *_SESSIONS)


def note_arguments(callback: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Keep what a callback's constructor was given, for `given` and `reduced`."""
    setattr(callback, _GIVEN, (args, dict(kwargs)))


def given(callback: Any, kind: Any) -> dict[str, Any]:
    """The arguments of a callback's constructor by name, with the defaults of those that it was not given.

    Args:
        callback, kind: as of `reduced`.
    """
    args, kwargs = getattr(callback, _GIVEN)
    bound = inspect.signature(kind.__init__).bind(callback, *args, **kwargs)
    bound.apply_defaults()
    return dict([*bound.arguments.items()][1:])


def reduced(callback: Any, kind: type) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What a callback's ``__reduce__`` returns: a fresh callback with the same options, and the same best and last checkpoints.

    What belongs to the process (threads, connections to the store, what was seen of a training) does not go with it: where the fresh one is
    used, a training begins, or is continued from the store. So a callback whose training is under way can be copied as well.

    Args:
        callback: whose constructor is decorated with `refusing_unknown`.
        kind: the class that has this constructor; subclasses may have another one, which is not called again.
    """
    args, kwargs = getattr(callback, _GIVEN)
    more = {name: value for name, value in _state_of(callback).items() if name not in _OF_PROCESS}
    return _made, (type(callback), kind, args, kwargs, _session_of(callback).run.best), more


def _state_of(callback: Any) -> Mapping[str, Any]:
    """Its attributes, or what a subclass gives in their place."""
    given = getattr(type(callback), "__getstate__", None)
    if given is None or given is getattr(object, "__getstate__", None):
        return vars(callback)
    state = callback.__getstate__()
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{type(callback).__name__}.__getstate__ must return a dict, not {type(state).__name__}"
        )
    return state


def _made(cls: Any, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], best: Any) -> Any:
    callback = cls.__new__(cls)
    kind.__init__(callback, *args, **kwargs)
    _session_of(callback).run.best = best
    return callback


def _session_of(callback: Any) -> Any:
    return next(vars(callback)[name] for name in _SESSIONS if name in vars(callback))
