"""Which strategy chooses a scheme's settings."""

from collections.abc import Callable, Mapping

from shrinkpoint.config import SaverConfig
from shrinkpoint.quality.fixed_strategy import FixedStrategy
from shrinkpoint.quality.inshrinkerator_search.strategy import ConfigurationStrategy
from shrinkpoint.quality.scale_strategy import ScaleStrategy
from shrinkpoint.quality.strategy import Strategy
from shrinkpoint.schemes.catalogue import Choice, entry_of

__all__ = ["strategy_of"]


def strategy_of(config: SaverConfig, spent_s: Callable[[], float]) -> Strategy | None:
    """The scheme's strategy; None for a lossless scheme, which has nothing to choose."""
    options = config.scheme_options
    make: Mapping[Choice, Callable[[], Strategy | None]] = {
        "nothing": lambda: None,
        "scale": lambda: ScaleStrategy(
            options,
            whole=config.adopt,
            threads=config.waiting_threads if config.adopt else 1,  # else it is the training that has them
        ),
        "configurations": lambda: ConfigurationStrategy(
            options, config.max_degradation, config.search_overhead, spent_s
        ),
        "settings": lambda: FixedStrategy(config.scheme, options),
    }
    return make[entry_of(config.scheme).choice]()
