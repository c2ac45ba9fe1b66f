"""What the baselines' schemes have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.schemes.recipe import described, weight_codecs
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON


def check_choice(options: object, name: str, *known: object) -> None:
    """Refuse a value of an option that is none of the known ones."""
    value = getattr(options, name)
    if type(value) is not type(known[0]) or value not in known:
        raise ConfigError(f"{name} must be {' or '.join(map(repr, known))}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """A scheme of one codec for weights. Other tensors are stored exactly, unless the options say otherwise."""

    name: ClassVar[str]
    codec: ClassVar[Any]

    options: Any

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        return weight_codecs(state, self.options, lambda _: self.codec(options=self.options))

    def describe(self) -> JSON:
        return described(self.name, self.options)
