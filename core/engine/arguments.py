"""The arguments of saves and restores, checked and made plain."""

import math
import operator
import threading
from collections.abc import Mapping
from typing import Any

import torch

from shrinkpoint.errors import ConfigError
from shrinkpoint.store.keys import MAX_STEP
from shrinkpoint.warn import brief

__all__ = ["check_metrics", "plain_metrics", "plain_step", "plain_timeout"]


def plain_step(step: Any) -> int:
    """A plain int: numpy's and torch's have no place in a container's header, and a tensor may be counted up in place.

    Raises:
        ConfigError: it is no step.
    """
    try:
        plain = -1 if _is_truth(step) else operator.index(step)
    except (TypeError, RuntimeError):  # RuntimeError: of a tensor on the meta device
        plain = -1
    if not 0 <= plain <= MAX_STEP:
        rest = f", and at most {MAX_STEP}" if plain > MAX_STEP else ""
        fix = "; int() makes one of a text or a float" if isinstance(step, str | float) else ""
        raise ConfigError(
            f"step={brief(step)} must be a whole number: of the training steps done so far, 0 or more{rest}{fix}"
        )
    return plain


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def check_metrics(metrics: Any) -> None:
    """Check metrics that may be stored later, as far as that takes no time: tensors are not read, which would wait for a GPU.

    Raises:
        ConfigError: they can not be stored.
    """
    for name, value in _named(metrics).items():
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ConfigError(
                    f"metrics[{name!r}]={brief(value)} must be one number (it has {value.numel()})"
                )
        else:
            _number(name, value)


def plain_metrics(metrics: Any) -> dict[str, float]:
    """Plain floats, also of tensors of one element; none of None.

    Raises:
        ConfigError: one is no number, or they have no names.
    """
    return {str(name): _number(name, value) for name, value in _named(metrics).items()}


def _named(metrics: Any) -> Mapping[Any, Any]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={brief(metrics)} must be a dict of numbers by name, as in {{'val_loss': 0.5}}, or None"
        )
    return metrics or {}


def _number(name: Any, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"metrics[{name!r}]={brief(value)} must be one number ({str(error)[:200]})"
        ) from None


def plain_timeout(timeout_s: Any) -> float | None:
    """Seconds to wait at most; None is without limit.

    Raises:
        ConfigError: it is no number.
    """
    if timeout_s is None:
        return None
    try:
        seconds = float(operator.pos(timeout_s))  # of a text there is no such thing
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError, RuntimeError):
        seconds = math.nan
    if math.isnan(seconds):
        raise ConfigError(f"timeout_s={brief(timeout_s)} must be a number of seconds, or None for no limit")
    return min(seconds, threading.TIMEOUT_MAX)
