"""What restores may cost a whole run, and what is left of it.

One restore says little about ten: each adds what training does not make good again (in the papers' failure experiments, ten
failures spread evenly over a run). The bound is therefore one for the run, of which each checkpoint gets an equal share.
"""

import math
from collections.abc import Mapping
from typing import Any

from shrinkpoint.errors import ConfigError

__all__ = ["RestoreBudget"]


class RestoreBudget:
    """Shares `max_degradation` among the restores that a run may need.

    Args:
        max_degradation: how much all of them together may raise the held-out loss, relative.
        restores: how many there may be.
    """

    def __init__(self, max_degradation: float, restores: int) -> None:
        self._bound = max_degradation
        self._restores = restores
        self.spent = 0.0
        """What the restores so far have cost, by what was measured when their checkpoints were stored."""
        self.made = 0
        """How many there were."""

    @property
    def left(self) -> float:
        """What all further restores together may cost."""
        return max(0.0, self._bound - self.spent)

    @property
    def share(self) -> float:
        """What the next restore may cost. A run that fails more often than was planned for divides what is left as finely."""
        planned = self._restores - self.made
        return self.left / (planned if planned > 0 else self._restores)

    def restored(self, cost: float) -> None:
        """Count a restore; one that improved the loss pays for no other."""
        self.made += 1
        self.spent += max(0.0, cost) if math.isfinite(cost) else 0.0

    def state_dict(self) -> dict[str, object]:
        """What a resumed training needs, in JSON primitives."""
        return {"spent": self.spent, "restores": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """
        spent, made = state.get("spent"), state.get("restores")
        right = (
            type(made) is int and made >= 0 and isinstance(spent, int | float) and not isinstance(spent, bool)
        )
        if not right or not 0 <= float(spent) < math.inf:  # type: ignore[arg-type]
            raise ConfigError(f"the restore budget {dict(state)!r} is malformed: it starts over")
        self.spent, self.made = float(spent), made  # type: ignore[assignment, arg-type]
