"""The options that all callbacks share, checked, kept for copies of a callback, and divided by the component that they are for."""

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from shrinkpoint.config import SaverConfig, whereabouts
from shrinkpoint.engine.resume import ResumePolicy, check_policy
from shrinkpoint.errors import ConfigError
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.urls import RunUrl, Stores, split_urls, url_text
from shrinkpoint.warn import brief

if TYPE_CHECKING:
    from shrinkpoint.steps.options import StepLog

P = ParamSpec("P")
T = TypeVar("T")

_NEVER_OVERWRITTEN = (
    "a run is never overwritten: give a fresh url, or resume='never' to start a new training in this one"
)
_URL = "give url, the run's folder or URL"
_NO_NAMES = "not needed, because a checkpoint is addressed by its step: '<url>#step=1000', '<url>#newest'"
_KEEP_LAST = "give keep_last, how many of the newest to keep"
_WEIGHTS = (
    "give advanced=Advanced(keep_optimizer=0) where no run is to be continued exactly; `shrinkpoint export` takes the weights out"
    " of any checkpoint"
)
_RESUMES = (
    "give resume: 'auto' (the default) continues by itself, 'must' requires a checkpoint, 'never' starts anew"
)
_NO_STEPS = "this callback logs no steps: the callbacks of Lightning and Composer, and Checkpointer, do (docs/resuming.md)"
_BY_INTERVAL = "give save_interval, for example save_interval="

# Options that users know from the frameworks. A callback that has such an option does not look it up here.
_HABITS = {
    **dict.fromkeys(("autoresume", "resume_from_checkpoint"), _RESUMES),
    **dict.fromkeys(("dirpath", "folder", "save_folder", "remote_file_name", "save_remote_file_name"), _URL),
    "run_name": "not needed: give every run a url of its own",
    **dict.fromkeys(("filename", "save_filename", "latest_filename", "save_latest_filename"), _NO_NAMES),
    **dict.fromkeys(("latest_remote_file_name", "save_latest_remote_file_name"), _NO_NAMES),
    "auto_insert_metric_name": _NO_NAMES,
    **dict.fromkeys(("overwrite", "save_overwrite", "enable_version_counter"), _NEVER_OVERWRITTEN),
    **dict.fromkeys(("num_checkpoints_to_keep", "save_num_checkpoints_to_keep"), _KEEP_LAST),
    **dict.fromkeys(("save_weights_only", "ignore_keys", "save_ignore_keys"), _WEIGHTS),
    "save_on_exception": "not offered, because an interrupted step cannot be continued; on a SIGTERM the run is saved by itself",
    "num_concurrent_uploads": "not needed: training does not wait for uploads",
    "upload_timeout_in_seconds": "give the timeouts of your storage in storage_options",
    "every_n_train_steps": f"{_BY_INTERVAL}'1000ba'",
    "every_n_epochs": f"{_BY_INTERVAL}'1ep'",
    "train_time_interval": f"{_BY_INTERVAL}'600sec'",
    "save_interval": "give every_n_train_steps, every_n_epochs or train_time_interval",
    "save_strategy": "give it to TrainingArguments, or every_n_train_steps or every_n_epochs here",
    "save_steps": "give it to TrainingArguments, or every_n_train_steps here",
    "metric_for_best_model": "give it to TrainingArguments, or monitor here",
    "greater_is_better": "give it to TrainingArguments, or mode here",
    "step_log": _NO_STEPS,
    "every_n_batches": "give every_n_train_steps (Lightning) or save_interval='1000ba' (Composer)",
}


def refusing_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Make a callback's constructor refuse unknown arguments with a message that names the right option.

    Its signature does not change, for editors and for command lines that are generated from it (jsonargparse). What
    it was given is kept, for `given` and `reduced`.
    """
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        unknown = sorted(kwargs.keys() - known.keys())
        if unknown:
            raise ConfigError("; ".join(_refusal(name, known) for name in unknown))
        setattr(args[0], _GIVEN, (args[1:], dict(kwargs)))
        init(*args, **kwargs)

    return checked


def handled(*hooks: str) -> Callable[[type[T]], type[T]]:
    """Give a callback's class these hooks of its framework, for each of which its session has a method of the same name."""

    def of(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(_session_of(self), name)(*args, **kwargs)

        hook.__name__ = name
        return hook

    def with_hooks(kind: type[T]) -> type[T]:
        for name in hooks:
            setattr(kind, name, of(name))
        return kind

    return with_hooks


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The options of a callback that concern its run; see there."""

    stores: Stores
    saver: SaverConfig
    resume: ResumePolicy = "auto"
    storage_options: StorageOptions = None
    step_log: "StepLog | None" = None

    def __post_init__(self) -> None:
        text = url_text(self.stores)
        if not text.rstrip("/"):
            raise ConfigError(f"url={text!r} must name a folder or a URL, for example 's3://bucket/run-7'")
        if "#" in text:
            raise ConfigError(
                f"url={text!r} must name a run without '#', which separates a checkpoint's step"
            )
        several = len(split_urls(self.stores)) > 1
        options = self.storage_options
        one = options is None or isinstance(options, Mapping) or callable(options)
        if not (one or (several and isinstance(options, list))):
            raise ConfigError(
                f"storage_options={brief(options)} must be a dict, a function that returns one, or None{', or a list with one for each URL' if several else ''}"
            )
        check_policy(self.resume)

    @property
    def url(self) -> str:
        """The run's URL as text, by which it is addressed."""
        return url_text(self.stores).rstrip("/")

    @classmethod
    def build(
        cls,
        *,
        url: RunUrl | Mapping[str, Any],
        resume: ResumePolicy = "auto",
        storage_options: StorageOptions = None,
        step_log: Any = None,
        **saver: Any,
    ) -> "RunSettings":
        """Check a callback's arguments, and divide them among this and the components' own options."""
        if not isinstance(url, str | os.PathLike | list | tuple | Stores | Mapping):
            raise ConfigError(
                f"url={brief(url)} must be a string: the folder or URL of a run, for example 's3://bucket/run-7'; or a"
                " list of several, or shrinkpoint.Stores(...)"
            )
        log = None
        if step_log is not None:  # most trainings have no log
            from shrinkpoint.steps.options import chosen_log

            log = chosen_log(step_log)
        return cls(
            stores=Stores.of(url),
            saver=SaverConfig.of(**saver),
            resume=resume,
            storage_options=storage_options,
            step_log=log,
        )


def _refusal(name: str, names: Iterable[str]) -> str:
    refusal = f"{name}: CompressedCheckpoint has no such option"
    answer = _HABITS.get(name) or whereabouts(name)
    if answer is not None:
        return f"{refusal}; {answer}"
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"{refusal}; did you mean {near[0]}?" if near else refusal


_GIVEN = "_shrinkpoint_given"
_SESSIONS = ("_session", "_shrinkpoint_session")
_OF_PROCESS = (_GIVEN, *_SESSIONS)


def given(callback: Any, kind: Any) -> dict[str, Any]:
    """Return the arguments of a callback's constructor by name, with the defaults of those that it was not given."""
    args, kwargs = getattr(callback, _GIVEN)
    bound = inspect.signature(kind.__init__).bind(callback, *args, **kwargs)
    bound.apply_defaults()
    return dict([*bound.arguments.items()][1:])


def reduced(callback: Any, kind: type) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return what a callback's ``__reduce__`` returns: a fresh callback with the same options, and the same best and last
    checkpoints.

    What belongs to the process (threads, connections to the store, what was seen of a training) does not go with it:
    where the fresh one is used, a training begins, or is continued from the store. So a callback whose training is
    under way can be copied as well. Subclasses of `kind` may have another constructor, which is not called again.
    """
    args, kwargs = getattr(callback, _GIVEN)
    more = {name: value for name, value in _state_of(callback).items() if name not in _OF_PROCESS}
    return _made, (type(callback), kind, args, kwargs, _session_of(callback).run.best), more


def _state_of(callback: Any) -> Mapping[str, Any]:
    """Return its attributes, or what a subclass gives in their place."""
    given = getattr(type(callback), "__getstate__", None)
    if given is None or given is getattr(object, "__getstate__", None):
        found: Mapping[str, Any] = vars(callback)
        return found
    state: Any = callback.__getstate__()
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{type(callback).__name__}.__getstate__ must return a dict, not {type(state).__name__}"
        )
    return dict(state)


def _made(cls: Any, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], best: Any) -> Any:
    callback = cls.__new__(cls)
    kind.__init__(callback, *args, **kwargs)
    _session_of(callback).run.best = best
    return callback


def _session_of(callback: Any) -> Any:
    return next(vars(callback)[name] for name in _SESSIONS if name in vars(callback))
