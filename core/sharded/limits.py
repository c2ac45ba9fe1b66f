"""What sharded trainings cannot do yet, in words."""

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError

__all__ = ["obstacle_of", "refuse_options", "unmeasured"]


def refuse_options(config: SaverConfig) -> None:
    """Refuse the options that are not for sharded models.

    Raises:
        ConfigError: one of them is given.
    """
    for name, default in (
        ("near", None),
        ("keep_optimizer", None),
        ("weights_only", False),
        ("scratch_folder", None),
    ):
        value = getattr(config, name)
        if value != default:
            raise ConfigError(f"{name}={value!r} is not supported for sharded models yet: leave it out")
    if config.frozen == "reference":
        raise ConfigError("frozen='reference' is not supported for sharded models yet: give frozen='store'")


def obstacle_of(config: SaverConfig) -> str:
    """Why nothing is measured with these options, as the beginning of a sentence."""
    if config.adopt:
        return "the loss of sharded models is not measured with adopt=True"
    return f"the search of {config.scheme} is not made for sharded models"


def unmeasured(scheme: str, why: str) -> str:
    """That the loss is not measured, and what that means.

    Args:
        scheme: the one that was chosen.
        why: the reason, as the beginning of a sentence.
    """
    return (
        f"{why}, so max_degradation cannot be checked: weights are stored with {scheme}'s mildest settings, or those given,"
        " unmeasured (docs/sharded.md). scheme='lossless' stores them exactly"
    )
