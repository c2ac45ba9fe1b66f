"""What a session asks of the framework whose training it saves."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shrinkpoint.engine.fitting import fitted
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.quality.evaluation import Loss
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.continuing import load_model, load_optimizers, require_same_training
from shrinkpoint.sharded.targets import Targets
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.stateful import state_of
from shrinkpoint.state.training import Describe, Role, TensorSpec

if TYPE_CHECKING:
    from shrinkpoint.steps.training import Captured

SESSION = "shrinkpoint_session"
"""The entry that a session adds to a framework's state."""


class TrainingAdapter(ABC):
    """One training of a framework, between two steps, as a `TrainingSession` sees it.

    Every method is called on every rank, unless its text says otherwise. What is not abstract suits a framework of one model, whose
    state has its weights under ``model`` and a list of its optimizers' states under ``optimizers``.
    """

    is_loop = False
    """Whether a loop of one's own drives the session, and gives losses that are the same after a resume."""
    measures = True
    """Whether the training's loss can be measured."""

    # ---- what is trained

    @property
    @abstractmethod
    def step(self) -> int:
        """Training steps done."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The user's model, without a wrapper for data parallelism."""

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[Any]:
        """All that train it, without a framework's wrappers."""

    @property
    def wrapped(self) -> Any:
        """The model as it is trained."""
        return self.model

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the further modules whose parameters may be frozen, by name."""
        return {}

    def objects(self) -> Mapping[str, Any]:
        """Return what a `state` has under ``stateful``, by name, without loaders and samplers."""
        return {}

    def names(self) -> Mapping[str, str]:
        """Return the name in a checkpoint of each of the model's own names, where the two differ."""
        return {}

    def schedulers(self) -> Mapping[str, Any]:
        """Return all that set learning rates, by name."""
        return {}

    # ---- its state

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state from which the training is continued, with live tensors; on ranks that store nothing it may be empty.

        The session adds what optimizers train outside the model, what is frozen, and the order and hooks of gradients' sums.
        """

    def joined(self, state: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
        """Return a `state` with what the session adds to it."""
        return {**state, SESSION: added}

    def added(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what the session has added to a stored `state`, if it has."""
        found: Mapping[str, Any] | None = state.get(SESSION)
        return found

    outline: Collection[str] = ("model",)
    """The entries of a `state` that `check` looks at."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another framework or model by a StateMismatchError; for the first rank, on its own.

        It is a stored one, or what `outline` names of it, without elements.
        """
        if "model" not in state:
            raise StateMismatchError(
                "the run was written by another framework: give this one a URL of its own"
            )
        fitted(state["model"], self.model, "the run")

    def load(self, state: Mapping[str, Any]) -> None:
        """Put a `state` that `check` has accepted into the training, or raise a StateMismatchError where the
        optimizers are others."""
        load_model(state["model"], self.model, "the run")
        require_same_training(self, state[SESSION]["identities"], state["optimizers"], "the run")
        load_optimizers(self.optimizers, state["optimizers"], same_dtypes=True)

    def completed(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole `state` of a `rest` and the present `parts`."""
        return {**rest, **self.live()}

    def bare_state(self) -> dict[str, Any]:
        """As `state`, without what other processes or loaders are asked for."""
        return self.state()

    def describe(self, state: Mapping[str, Any]) -> Describe:
        """Return the roles of the tensors of a `state`."""
        return describe_training(
            self.model, self.optimizers, model_path=("model",), optimizers_path=("optimizers",)
        )

    def parts(self, state: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
        """Return the model's state and the optimizers' in a `state`, as ``load_state_dict`` takes them."""
        return state["model"], state["optimizers"]

    def rehearsed(self, state: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
        """Return the `parts` that are tried on copies; of a model that changes what it loads, its own state."""
        return self.parts(state)

    def rest(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a `state` without these parts, which a step log restores by itself."""
        return {
            key: value for key, value in state.items() if key not in (self.model_key, self.optimizers_key)
        }

    def logged(self, state: Callable[[], Mapping[str, Any]]) -> "Captured":
        """Return what a step log stores of a `state` besides its own; called on every rank."""
        return self.rest(state())

    def log_options(self) -> dict[str, Any]:
        """Return further arguments of the `TrainingLog`."""
        return {}

    def followed(self) -> dict[str, Any]:
        """Return the part of a `state` with weights, and averages of them that exist from the start."""
        return {"model": state_of(self.model)}

    def live(self) -> dict[str, Any]:
        """Return the part of a `state` whose live tensors ``adopt`` overwrites: weights, averages and optimizers' states."""
        return {**self.followed(), "optimizers": [state_of(optimizer) for optimizer in self.optimizers]}

    def weight_names(self) -> Collection[str]:
        """Return the names in the model's part of a `state`."""
        names: Collection[str] = state_of(self.model).keys()
        return names

    # ---- shards and copies, as of `ShardedPlacement`

    model_key, optimizers_key, writer = "model", "optimizers", "the training's framework"
    """The entries of a `state` that `targets` looks for, and who writes it, for messages."""
    fills_copies = False
    """Whether a restore fills the `targets` of a model that is not sharded, too."""
    apart: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Of a sharded model's last `state`, what this rank has for itself."""
    _targets: Targets | None = None

    def own(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what each rank stores for itself, values by group and name."""
        return self.apart

    def targets(
        self, specs: Mapping[str, TensorSpec], others: Mapping[str, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that a restore fills; what is wrong with them must be found here."""
        keys = {"model_key": self.model_key, "optimizers_key": self.optimizers_key}
        self._targets = Targets(self.model, [*self.optimizers], writer=self.writer, **keys)
        return self._targets.find(specs, others)

    def reordered(self, states: Sequence[Any]) -> list[Any]:
        """Return optimizers' states of a checkpoint that has filled the `targets` by the numbers that parameters have here."""
        return [*states] if self._targets is None else self._targets.reordered(states)

    def copied(self, spec: TensorSpec) -> bool:
        """Return parameters and their optimizers' state; of buffers the first rank's count, whose data parallelism gives them to all."""
        return spec.tag.parameter is not None and spec.tag.role not in (Role.BUFFER, Role.AVERAGE)

    # ---- measuring; the model is in the mode that is asked for, and all is put back afterwards

    @abstractmethod
    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> Loss:
        """Return the loss of the model with its present weights, or several where the batch stands for as many.

        Args:
            batch: on the host; it may be changed.
            index: of the batch.
            held_out: whether it is one of validation.
            together: whether all ranks measure, and may communicate; otherwise one measures alone.

        Raises:
            ConfigError: there is no loss of such a batch.
        """

    def step_losses(self, parts: Sequence[Any], index: int) -> Iterable[torch.Tensor]:
        """Yield the losses whose gradients one step adds up, with graphs; the parts of its batch are on the host, and
        not to be changed."""
        raise NotImplementedError

    def clip(self) -> None:  # noqa: B027 - most trainings do not
        """Limit the gradients as training does before a step."""

    @property
    def scaler(self) -> Any:
        """What scales losses of half-precision training; None where nothing does."""
        return None

    def around(self) -> Sequence[object]:
        """Return what a step or an evaluation may change in addition to the model, as of `preserved_state`."""
        return ()

    def averages(self, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Return the averages of the weights in a stored `state` that `measuring` takes, by their names in it."""
        return {}

    def measuring(self, averages: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context for measurements of other weights than the training's: of averages of them, by their names
        in a `state`."""
        return nullcontext()

    def obstacle(self, *, shards: bool) -> str | None:
        """Return why steps of this training cannot be repeated by `step_losses`, `clip` and the optimizers; None where they can."""
        lacks = type(self).step_losses is TrainingAdapter.step_losses
        return "the framework's steps cannot be repeated" if lacks else None

    # ---- numbers

    def metrics(self) -> dict[str, float]:
        """Return the finite metrics of the present weights; on the first rank at least."""
        return {}

    def lacks(self, monitor: str, step: int, metrics: Mapping[str, float]) -> str:
        """Say that `metrics`, at the save of a step, lack the monitor."""
        return (
            f"monitor={monitor!r} had not been logged when step {step} was saved, or was NaN or infinite; until it is a number,"
            " checkpoints take no part in the ranking, and all stay. Logged so far:"
            f" {', '.join(sorted(metrics)) or 'nothing'}"
        )

    def path_settings(self) -> dict[str, Any]:
        """With ``adopt``: the settings of which a resumed run must have the same to go the same way."""
        return {}

    def log(self, reports: Sequence[SaveReport]) -> None:  # noqa: B027 - some have none
        """Give finished saves to the framework's loggers; on the first rank."""

    def show_saving(self, step: int | None) -> None:  # noqa: B027 - most frameworks have no progress bar
        """Show in the progress bar, if there is one, that the save of a step is being written; None: no longer."""
