"""What a session asks of a Composer run: its state, and its losses without side effects.

``Trainer.eval`` fires events, fills metrics and reads the user's loaders. So the model's own loss is computed on kept batches.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.algorithms import EMA, GradientClipping
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.core import Event, Precision, State, get_precision_context
from composer.loggers import Logger
from composer.utils import ensure_tuple
from torch import nn

from shrinkpoint.group.group import world
from shrinkpoint.integrations.composer.data import DataPlace
from shrinkpoint.integrations.composer.schedule import Settings
from shrinkpoint.integrations.composer.state import (
    model_state,
    numbered_states,
    parameter_names,
    plain_optimizers,
    shards_model,
    stored_state,
    trained_module,
    without_wrappers,
)
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.batches import to_host
from shrinkpoint.session.probe import loss_of
from shrinkpoint.session.reports import finite, numbers
from shrinkpoint.sharded.targets import require_model, reshard, target_for
from shrinkpoint.state.averages import AverageFinder
from shrinkpoint.state.roles import model_tags, part_tag, state_tag
from shrinkpoint.state.stateful import named_parameters
from shrinkpoint.state.training import Describe, Tag, TensorSpec, TrainingState
from shrinkpoint.state.tree import Path

_PRECISIONS = (Precision.FP32, Precision.AMP_FP16, Precision.AMP_BF16)
_EVENTS_OF_A_STEP = (
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_LOSS,
    Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
    Event.AFTER_TRAIN_BATCH,
)


class ComposerAdapter(TrainingAdapter):
    """One run's ``State``; see the base class."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.data = DataPlace()
        """The position in the training data."""
        self.evaluated: dict[str, int] = {}
        """At which batch each evaluator was run last, by its label."""
        self.run: State
        """Composer's state, and its logger, from the trainer's construction on."""
        self.logger: Logger

    @property
    def step(self) -> int:
        return int(self.run.timestamp.batch)

    @property
    def model(self) -> nn.Module:
        return trained_module(self.run)

    @property
    def optimizers(self) -> Sequence[Any]:
        """See the base class; SAM's is the one that it wraps."""
        return [*plain_optimizers(self.run).values()]

    @property
    def wrapped(self) -> Any:
        return self.run.model

    def names(self) -> Mapping[str, str]:
        return parameter_names(self.model)

    # ---- state

    def state(self) -> dict[str, Any]:
        state, place = self.run, self.data.state(self.run)
        if shards_model(state):
            reshard(self.model)
            self.apart = {"place": place}
            return world().on_every(lambda: stored_state(state, place))
        places = world().gather(place)
        if state.fsdp_enabled:  # its parameters may be whole, after an evaluation, until its state is taken
            return stored_state(state, places)
        # a callback's own state may fail on one rank alone
        return world().on_every(lambda: stored_state(state, places))

    def weight_names(self) -> Collection[str]:
        return dict(named_parameters(self.model, remove_duplicate=False)).keys()

    def bare_state(self) -> dict[str, Any]:
        return stored_state(self.run, [])

    def describe(self, state: Mapping[str, Any]) -> Describe:
        """Return what describes the tensors; Composer names moments after their parameters."""
        module = self.model
        own = {name: _renamed(tag) for name, tag in model_tags(module).items()}
        averages = AverageFinder(module, own)
        tags = {without_wrappers(name): tag for name, tag in own.items()}
        parameters = {without_wrappers(name): value for name, value in named_parameters(module)}
        optimizers = plain_optimizers(self.run)

        def describe(path: Path, tensor: torch.Tensor) -> Tag:
            match path:
                case ("state", "model", *more) if more:
                    return part_tag(tags, tuple(more))
                case ("state", "optimizers", kind, "state", name, key) if (
                    kind in optimizers and name in parameters
                ):
                    return state_tag(key, tensor, parameters[name], tags[name], optimizers[kind])
                case ("state", "algorithms" | "callbacks", *_):
                    return averages.tag(path, tensor)
            return Tag()

        return describe

    def parts(self, state: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
        """See the base class; of shards the optimizers' states are by the names of parameters."""
        optimizers = state["state"]["optimizers"]
        shards = shards_model(self.run)
        return state["state"]["model"], [*optimizers.values()] if shards else numbered_states(state, self.run)

    def rest(self, state: Mapping[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in state["state"].items() if key not in ("model", "optimizers")}
        return {**state, "state": rest}

    def followed(self) -> dict[str, Any]:
        """See the base class; with FSDP a collective."""
        state = self.run
        algorithms = [
            (type(each).__qualname__, each.state_dict() if isinstance(each, EMA) else {})
            for each in state.algorithms
        ]
        return {"state": {"model": model_state(state), "algorithms": algorithms}}

    def live(self) -> dict[str, Any]:
        stored = stored_state(self.run, [])["state"]
        if shards_model(self.run):
            return {"state": stored}
        return {"state": {**self.followed()["state"], "optimizers": stored["optimizers"]}}

    def targets(self, specs: Mapping[str, TensorSpec], others: Any = None) -> dict[str, torch.Tensor]:
        module = self.model
        reshard(module)
        names = parameter_names(module)
        live = TrainingState.capture({"state": {"model": model_state(self.run)}}, shards=True).tensors
        require_model(
            specs,
            live,
            module,
            below="state/model/",
            writer="Composer's callback",
            named=lambda name: names.get(name, name),
        )
        parameters = {
            names.get(name, name): parameter
            for name, parameter in named_parameters(module, remove_duplicate=False)
        }
        averages = AverageFinder(module, model_tags(module))
        return {
            name: target_for(spec, live.get(name), parameters, averages, names)
            for name, spec in specs.items()
        }

    # ---- measuring

    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> float:
        state, model = self.run, self._silenced()
        moved = state.device.batch_to_device(batch)
        with get_precision_context(state.precision, state.precision_config, fp8_autocast_enabled=False):
            return loss_of(model.loss(model(moved), moved))

    def _silenced(self) -> Any:
        model: Any = self.model
        model.logger = Logger(self.run)  # which writes nowhere, until all is put back
        return model

    def step_losses(self, parts: Sequence[Any], index: int) -> Iterator[torch.Tensor]:
        state, model = self.run, self._silenced()
        for part in parts:
            batch = state.device.batch_to_device(to_host(part))  # a copy: some models change their batch
            with get_precision_context(state.precision, state.precision_config):
                loss = _total(model.loss(model(batch), batch))
            yield loss / len(parts)

    def clip(self) -> None:
        sharded = self.run.fsdp_enabled
        for algorithm in self.run.algorithms:
            if isinstance(algorithm, GradientClipping):
                kind, threshold = algorithm.clipping_type, algorithm.clipping_threshold
                apply_gradient_clipping(self.model, kind, threshold, fsdp_enabled=sharded)

    @property
    def scaler(self) -> Any:
        return self.run.scaler

    def around(self) -> Sequence[object]:
        return [self.run]

    def obstacle(self, *, shards: bool) -> str | None:
        state = self.run
        if state.fsdp_enabled is not shards or state.precision not in _PRECISIONS:
            return "the model is sharded, or its precision is a library's"
        if len(state.optimizers) != 1 or getattr(state.optimizers[0], "_step_supports_amp_closure", False):
            return "there are several optimizers, or one that computes the loss itself"
        for algorithm in state.algorithms:
            if not isinstance(algorithm, GradientClipping) and any(
                algorithm.match(event, state) for event in _EVENTS_OF_A_STEP
            ):
                return f"{type(algorithm).__name__} takes part in every step"
        return None

    # ---- numbers

    def metrics(self) -> dict[str, float]:
        """See the base class; a metric of the first evaluator is also found under its bare name."""
        state = self.run
        values: dict[str, Any] = {"epoch": float(state.timestamp.epoch.value)} | {
            f"loss/train/{name.removeprefix('loss/train/')}": value
            for name, value in (state.total_loss_dict or {}).items()
        }
        values |= {f"metrics/train/{name}": value for name, value in state.train_metric_values.items()}
        for label, metrics in reversed(list(state.eval_metrics.items())):
            if self.evaluated.get(label) != self.step:
                continue  # Composer goes on showing its metrics
            known = {name: _computed(state, name, metric) for name, metric in metrics.items()}
            values |= {f"metrics/{label}/{name}": value for name, value in known.items()}
            values |= known
        return finite(values)

    def path_settings(self) -> dict[str, Any]:
        return {"save_interval": str(self._settings.interval)}

    def log(self, reports: Sequence[SaveReport]) -> None:
        """See the base class; at the present batch, since Weights & Biases drops values of an earlier one."""
        for report in reports:
            self.logger.log_metrics(numbers(report))


def _renamed(tag: Tag) -> Tag:
    if tag.parameter is None:
        return tag
    return Tag(role=tag.role, layer_type=tag.layer_type, parameter=without_wrappers(tag.parameter))


def _computed(state: State, name: str, metric: Any) -> Any:
    # Composer keeps one value by name, whichever evaluator came last; a metric remembers its own.
    own = getattr(metric, "_computed", None)
    return own if own is not None else state.eval_metric_values.get(name)


def _total(loss: Any) -> torch.Tensor:
    """Return the total loss, added up as in Composer."""
    if isinstance(loss, Mapping) and "total" in loss:
        total: torch.Tensor = loss["total"]
        return total
    return torch.stack([part.mean() for part in ensure_tuple(loss)]).sum()
