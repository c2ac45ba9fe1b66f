"""An exponential moving average of gradients, for optimizers that do not keep one themselves."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.inshrinkerator.sensitivity import GradientEMA
from shrinkpoint.state.stateful import named_parameters, unwrapped


def require_fresh_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that a framework calls with the gradients of the batch before, which no checkpoint has.

    Raises:
        ConfigError: such an optimizer, as of sharpness-aware minimization, steps before it calls the closure.
    """
    for optimizer in map(unwrapped, optimizers):
        computes_first = getattr(optimizer, "_step_supports_amp_closure", False)  # Composer's own
        if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step") and not computes_first:
            raise ConfigError(
                f"{type(optimizer).__qualname__}.step(closure) begins with the gradients that are there, and as the framework calls it these are of the"
                " batch before: a resume would not have them. Call first_step() and second_step() yourself (Lightning: automatic_optimization ="
                " False), or use the framework's own algorithm (Composer: SAM)"
            )


class GradientCollector:
    """Averages the gradients of the last steps before a save, unless Adam's first moments do so already."""

    def __init__(self) -> None:
        self._average = GradientEMA()

    def update(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        remaining: int | None,
        *,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Take a step's gradients into the average, if they count; they are complete, and not set to zero yet.

        Gradients with NaN or infinity, as before a step that a loss scaler skips, are left out; so are all of a
        module with shards (``DTensor``), since no process has them whole. `remaining` counts the steps after this one
        until the next save; None where that is unknown, and every step counts. `names` gives those in a checkpoint by
        the module's own, where they differ.
        """
        if (remaining is not None and not self._average.should_collect(remaining)) or _average_themselves(
            optimizers
        ):
            return
        found = {name: p.grad for name, p in named_parameters(module) if p.grad is not None}
        # The mark of a DTensor, whose class is missing where torch was built without distributed.
        if not any(hasattr(gradient, "device_mesh") for gradient in found.values()):
            self._average.update(
                {(names or {}).get(name, name): gradient for name, gradient in found.items()}
            )

    def take(self, optimizers: Sequence[torch.optim.Optimizer]) -> Mapping[str, torch.Tensor] | None:
        """Return the average by parameter name, and start a new one; None where the optimizer's own is used."""
        average = self._average.result()
        self._average.reset()
        return average if average and not _average_themselves(optimizers) else None


def _average_themselves(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    # Adam has no state before its first step.
    return any("exp_avg" in state for optimizer in optimizers for state in optimizer.state.values())
