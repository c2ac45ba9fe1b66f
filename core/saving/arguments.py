"""The step and the metrics that a save is given, made plain numbers."""

import operator
from collections.abc import Mapping

from shrinkpoint.errors import ConfigError
from shrinkpoint.warn import brief

__all__ = ["plain_metrics", "plain_step"]


def plain_step(step: int) -> int:
    """A plain int: numpy's and torch's have no place in a container's header.

    Raises:
        ConfigError: it is no step.
    """
    try:
        plain = operator.index(step)
    except TypeError:
        plain = -1
    if plain < 0:
        raise ConfigError(f"step={brief(step)} must be the number of training steps done so far, 0 or more")
    return plain


def plain_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Plain floats, also of tensors of one element.

    Raises:
        ConfigError: one is no number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"metrics[{name!r}]={brief(value)} must be one number ({str(error)[:200]})"
            ) from None
    return numbers
