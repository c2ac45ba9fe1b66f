"""What all ranks decide together when a save is due: one collective of a few bytes, after which all do the same."""

from dataclasses import asdict, dataclass

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError, ShrinkpointError
from shrinkpoint.group.group import Distributed

__all__ = ["Agreed", "Status", "agree", "refuse_options", "require_same"]


def require_same(group: Distributed, url: str, config: SaverConfig) -> None:
    """Make sure that all ranks were given the same; a collective.

    Args:
        group: all ranks.
        url: of the run.
        config: how to save.

    Raises:
        ConfigError: they were not, on every rank.
    """
    given = group.gather({"url": url} | asdict(config))
    for rank, other in enumerate(given):
        differ = [name for name, value in other.items() if value != given[0][name]]
        if differ:
            name = differ[0]
            raise ConfigError(
                f"rank 0 was given {name}={given[0][name]!r}, and rank {rank} {name}={other[name]!r}: every rank must give"
                " the same"
            )


@dataclass(frozen=True, kw_only=True)
class Status:
    """What one rank knows."""

    step: int
    busy: bool = False
    link: int = -1
    """Number of the save that its next delta would build on; -1 for none."""
    base: bool = False
    """Whether it wants a base."""
    new_layout: bool = False
    """Whether it holds other shards than at the save before."""
    exact: bool = False
    measures: bool = False
    """Whether it can evaluate candidates."""
    steps: bool = False
    """Whether it can take training steps from a restored state."""
    failed: bool = False
    """Whether the save before was not committed, as far as it knows."""
    fatal: ShrinkpointError | None = None
    """Why training must not go on."""
    error: Exception | None = None
    """Why it cannot save."""
    clock_s: float = 0.0
    """Seconds since the saver was made; on the first rank alone."""


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks do."""

    busy: bool
    base: bool
    new_layout: bool
    exact: bool
    measures: bool
    steps: bool
    failed: bool
    clock_s: float


def agree(group: Distributed, status: Status) -> Agreed:
    """Return a collective: each rank says what it knows, and all learn the same.

    Args:
        group: all ranks.
        status: of this rank.

    Raises:
        ShrinkpointError: one rank has a reason not to go on, or they are at different steps; on every rank.
    """
    trouble = status.fatal or status.error
    flags = (
        status.busy,
        status.base,
        status.new_layout,
        status.exact,
        not status.measures,
        not status.steps,
        status.failed,
    )
    numbers = [
        status.step,
        -status.step,
        status.link,
        -status.link,
        *map(int, flags),
        round(1e6 * status.clock_s),
    ]
    most = group.most([int(trouble is not None), *numbers])
    if most[0]:
        group.raise_together(trouble)
    if most[1] != -most[2]:
        raise ConfigError(
            f"the ranks are at different steps, {-most[2]} to {most[1]}: every rank must save in the same batch"
        )
    busy, base, new_layout, exact, blind, still, failed = map(bool, most[5:-1])
    lost = most[3] < 0 or most[3] != -most[4]
    return Agreed(
        busy=busy,
        base=base or lost,
        new_layout=new_layout,
        exact=exact,
        measures=not blind and not exact,
        steps=not blind and not exact and not still,
        failed=failed,
        clock_s=1e-6 * most[-1],
    )


def refuse_options(config: SaverConfig, *, copied: bool = False) -> None:
    """Refuse the options that are not for sharded models.

    Args:
        config: how to save.
        copied: whether every rank has the whole model, to whose frozen tensors checkpoints may refer.

    Raises:
        ConfigError: one of them is given.
    """
    if config.frozen == "reference" and not copied:
        raise ConfigError(
            "frozen='reference' is not supported for sharded models yet: give Advanced(frozen='store')"
        )
