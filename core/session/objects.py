"""The objects of a hand-written loop: what a checkpoint holds of them, and how they are restored."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from shrinkpoint.coding.selective import decode_checkpoint
from shrinkpoint.engine.fitting import fitted, quantized_as
from shrinkpoint.engine.resume import require_same_ties
from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.optimizers.objects import with_object_states
from shrinkpoint.quality.evaluation import Loss
from shrinkpoint.quality.swap import swapped_tensors, swapped_weights
from shrinkpoint.saver import Saver
from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.changes import StepCount, WeightChanges
from shrinkpoint.session.continuing import load_optimizers, require_same_training
from shrinkpoint.session.data import (
    IteratorStart,
    generators,
    in_use,
    require_same_workers,
    sizes_of,
    unknown_order,
    warn_of_other_data,
)
from shrinkpoint.session.identity import disabled_scalers, rounded_weights, scheduler_classes
from shrinkpoint.session.trained import load_trained, require_shapes
from shrinkpoint.state.averages import live_tensors
from shrinkpoint.state.rng import (
    capture_rng,
    generator_state,
    is_generator,
    restore_own,
    restore_rng,
    set_generator,
)
from shrinkpoint.state.stateful import (
    has_state,
    load_object,
    load_stateful,
    optimizers_in,
    scheduler_in,
    state_of,
    unwrapped,
)
from shrinkpoint.state.training import Describe, Role, TrainingState, anonymous, plain
from shrinkpoint.state.tree import JSON, join_path
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.warn import brief, some, warn

if TYPE_CHECKING:
    from shrinkpoint.session.session import TrainingSession
    from shrinkpoint.steps.training import Captured

_FORMAT = "torch-loop"
_ALONE: Mapping[str, Any] = {"world": 1, "buckets": [], "hooks": []}


class Stateful(Protocol):
    """Anything with a state to save and restore: a scheduler, a sampler, a StatefulDataLoader, a scaler.

    `Checkpointer` takes such objects by name, saves what `state_dict` gives, and returns it to `load_state_dict` on resuming.

    Examples:
        >>> class Curriculum:
        ...     def __init__(self):
        ...         self.level = 0
        ...
        ...     def state_dict(self):
        ...         return {"level": self.level}
        ...
        ...     def load_state_dict(self, state_dict):
        ...         self.level = state_dict["level"]
        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, curriculum=Curriculum())
    """

    def state_dict(self) -> Any:
        """Return the state: nested numbers, strings and tensors."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state back."""
        ...


class LoopObjects(TrainingAdapter):
    """Model, optimizers and all other objects with a state, as `Checkpointer` takes them.

    Raises:
        ConfigError: one of them is not what its name says.
    """

    is_loop = True
    step = 0
    optimizers: Sequence[Any] = ()
    session: "TrainingSession"
    """That saves them."""
    given_metrics: Any = None
    """Of the save that is being made."""
    every: int | None = None
    """Steps between planned saves."""
    ordered: ClassVar[bool] = True
    """Whether optimizers take state by the order of their parameters."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        stateful: Mapping[str, Stateful],
        evaluate: Callable[[], Loss] | None = None,
        train_loss: Callable[[int], torch.Tensor] | None = None,
        clip_grad_norm: float | None = None,
        url: str = "the run",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {brief(model)}")
        self._model, self.evaluate, self.train_loss = model, evaluate, train_loss
        self._clip_grad_norm, self.url = clip_grad_norm, url
        self.given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        """The optimizers, in wrappers such as accelerate's."""
        for given in self.given:
            if not (has_state(given) and hasattr(given, "param_groups")):
                raise ConfigError(
                    f"optimizer must be a torch.optim.Optimizer, or a list of them, not {brief(given)}; [] for none"
                )
        self.optimizers = [unwrapped(given) for given in self.given]
        self.stateful = {
            name: _Generator(value) if is_generator(value) else value for name, value in stateful.items()
        }
        self.measures = evaluate is not None
        require_shapes(model)
        self._starts = {
            name: IteratorStart(value) for name, value in self.stateful.items() if IteratorStart.of(value)
        }
        self._made: tuple[int, int] | None = None
        self._steps = StepCount(self.optimizers)
        self.changes = WeightChanges(model)
        """How often the weights have changed."""

    @property
    def model(self) -> nn.Module:
        return self._model

    def log_options(self) -> dict[str, Any]:
        return {"stateful": {**self.stateful, "generators of its own": _Generators(self)}}

    def logged(self, state: Callable[[], Mapping[str, Any]]) -> "Captured":
        """See `TrainingAdapter.logged`; the log has these objects' states."""
        return {}

    def whole(self) -> dict[str, Any]:
        """Return the state with what the session adds that is the same on every rank."""
        state = LoopObjects.state(self)
        return {**state, **self.session.trained.state(state)}

    def way_back(self, saver: Saver, manifest: Manifest | None) -> Callable[[], None]:
        """Return a function that restores the present state: that of a checkpoint, or, without one, of a fresh start.

        Both are called on the first process alone, and call nothing that communicates with others.
        """
        fresh = copy.deepcopy(self.whole()) if manifest is None else None

        def reload() -> None:
            if manifest is None:  # a copy, since an optimizer may keep and change it
                LoopObjects.load(self, copy.deepcopy(fresh), warns=False)
                return
            again = decode_checkpoint(saver.store, manifest, threads=saver.config.encoder_threads)
            LoopObjects.load(self, again.state.to_object(), warns=False)

        return reload

    def state(self) -> dict[str, Any]:
        self.changes.follow()
        self._require_steps()
        self._require_callers()
        gradients = self.gradients()
        return {
            "format": _FORMAT,
            "step": self.step,
            "model": state_of(self.model),
            "optimizers": [with_object_states(state_of(optimizer)) for optimizer in self.given],
            "schedulers": scheduler_classes(self.stateful),
            "stateful": {name: state_of(value) for name, value in self.stateful.items()},
            "data": self._data(),
            "rng": self.rng(),
            **({"gradients": gradients} if gradients else {}),
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that wait for a step."""
        return self._steps.accumulated()

    def rng(self) -> dict[str, Any]:
        """Return the states of this process's generators, with those of modules, of loaders' data sets and collators."""
        starts = {name: one.states for name, one in self._starts.items() if one.states and one.is_in_use()}
        return {**capture_rng(self.generators()), **({"starts": starts} if starts else {})}

    def release(self) -> None:
        """Leave the optimizers and loaders as they were: nothing of them is noted any more."""
        self._steps.stop()
        for start in self._starts.values():
            start.stop()
        self._starts = {}

    def _require_steps(self) -> None:
        """Warn where the weights have changed since the last save, and none of the optimizers has made a step."""
        made, before = (self.changes.count, self._steps.count), self._made
        self._made = made
        if before is not None and made[0] > before[0] and made[1] == before[1] and self._steps.known:
            self.session.warn_once(
                "the weights have changed since the last save, and the optimizer that was given to the Checkpointer has made no step: if another"
                " one trains now, checkpoints hold the state of the one before. Go on with the same optimizer, add_param_group() to it, or"
                " make a new Checkpointer"
            )

    def _require_callers(self) -> None:
        """Warn where a scheduler, a gradient scaler or an accumulating Accelerator calls an optimizer, and its state is not saved."""
        known = {id(getattr(scheduler_in(value), "optimizer", None)) for value in self.stateful.values()}
        inner = [one for given in self.optimizers for one in optimizers_in(given) if id(one) not in known]
        if any(hasattr(getattr(one, "step", None), "_wrapped_by_lr_sched") for one in inner):
            self.session.warn_once(
                "the optimizer has a learning rate scheduler that was not given to the Checkpointer: after a resume it begins again. Give it by name,"
                " as in scheduler=scheduler"
            )
        if self._steps.by_scaler and self.scaler is None:
            self.session.warn_once(
                "the optimizer's steps are made by a GradScaler that was not given to the Checkpointer: after a resume its scale begins again. Give it by"
                " name, as in scaler=scaler"
            )
        given = (*self.given, *self.stateful.values())
        accelerated = [one.gradient_state for one in given if hasattr(one, "gradient_state")]
        if any(getattr(one, "sync_gradients", True) is False for one in accelerated):
            self.session.warn_once(
                "a save is within accelerate's accumulation of gradients: after a resume the Accelerator counts from 0, and the optimizer's steps fall on other"
                " batches. Save where accelerator.sync_gradients is True"
            )

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the model's modules, of loaders and of the other objects, by where they are."""
        loaders = [value for value in self.stateful.values() if hasattr(value, "dataset")]
        return generators(loaders, [self.model, *self.objects().values()])

    def joined(self, state: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
        """See `TrainingAdapter.joined`; a process alone has no sums of gradients."""
        alone = added["world"] == 1
        return {**state, **{key: added[key] for key in added if not alone or key not in _ALONE}}

    def added(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**_ALONE, **state}

    def schedulers(self) -> dict[str, Any]:
        return {name: value for name, value in self.stateful.items() if scheduler_in(value)}

    def modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in self.stateful.items() if isinstance(value, nn.Module)}

    def objects(self) -> dict[str, Any]:
        return {name: value for name, value in self.stateful.items() if not _may_load(value)}

    def bare_state(self) -> dict[str, Any]:
        return self.live()

    def followed(self) -> dict[str, Any]:
        return {
            "model": state_of(self.model),
            "stateful": {name: state_of(value) for name, value in self.objects().items()},
        }

    def live(self) -> dict[str, Any]:
        # a tensor of a loader's or sampler's state is a copy: reading it may start their workers
        states = [with_object_states(state_of(optimizer)) for optimizer in self.given]
        return {**self.followed(), "optimizers": states}

    def load(self, state: Any, *, warns: bool = True) -> None:
        """Restore what `state` returned, with warnings of what is overridden or not restored, unless it was restored
        before.

        Raises:
            StateMismatchError: it is the state of another framework's callback or of another model; nothing is
                changed then.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise StateMismatchError(
                f"{self.url} was written by another framework's callback, not by a Checkpointer: resume it"
                " there, or take its weights with `shrinkpoint export`"
            )
        given = fitted(state["model"], self.model, self.url, warns=warns)
        untied = require_same_ties(state["model"], self.model, self.url)
        self.settle()
        self.changes.follow()
        stored, trained = state["identities"], state["trained"]
        more = {"ordered": self.ordered, "warns": warns}
        require_same_training(
            self, stored, state["optimizers"], self.url, state.get("schedulers", {}), **more
        )
        disabled = disabled_scalers(state["stateful"], self.stateful, self.url)
        for name, value in self.stateful.items():
            require_same_workers(value, state["stateful"].get(name), name)
        given = quantized_as(state["model"], given, self.model)
        rounded = rounded_weights(given, state_of(self.model))
        unfrozen = load_trained(trained, self, self.url)
        said = (untied, disabled, rounded, unfrozen)
        for message in said if warns else ():
            if message is not None:
                warn(message)
        load_stateful(self.model, given)
        load_optimizers(self.given, state["optimizers"], same_dtypes=rounded is None)
        for name in sorted(state["stateful"].keys() ^ self.stateful.keys()) if warns else ():
            where = "the checkpoint" if name in self.stateful else "this run"
            warn(f"{name!r} is not in {where}: its state is not restored")
        self.step = state["step"]
        self._steps.put_back(state.get("gradients", {}))
        for name, value in self.stateful.items():
            if name in self._starts:
                self._starts[name].begin(state["rng"].get("starts", {}).get(name))
            if name in state["stateful"]:
                loaded = state["stateful"][name]
                stored = {} if _may_load(value) or isinstance(value, nn.Module) else _outlines(loaded)
                load_object(name, value, loaded)
                here = _outlines(state_of(value)) if stored else {}
                lost = [key for key in stored if here and stored[key] != here.get(key)]
                if lost and warns:
                    warn(
                        f"resume: {name}, a {type(value).__qualname__}, has not the checkpoint's {some(lost)}, though load_state_dict() was called: set this after"
                        " resuming, or build the object with it"
                    )
            if warns and (unknown := unknown_order(value, state["stateful"].get(name))):
                warn(unknown)
        # now that buffers of samples have their length back
        warn_of_other_data(state.get("data", {}) if warns else {}, self._data())
        restore_rng(state["rng"], self.generators())

    def in_use(self) -> str | None:
        """Return what is wrong with a resume inside a loop over one of the loaders, for a message; else None."""
        names = [name for name, value in self.stateful.items() if _may_load(value) and in_use(value)]
        said = (
            "{0} is being iterated over already, and that loop would not notice the position that a resume restores: call resume() first,"
            " and begin the loop, or iter({0}), after it"
        )
        return said.format(names[0]) if names else None

    def _data(self) -> dict[str, int]:
        loaders = {name: value for name, value in self.stateful.items() if _may_load(value)}
        return {key: size for name in loaders for key, size in sizes_of(loaders[name], f"{name}: ").items()}

    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> Loss:
        """See `TrainingAdapter.loss`; there is one batch, of the loop's own `evaluate`."""
        assert self.evaluate is not None
        return self.evaluate()

    def step_losses(self, parts: Sequence[Any], index: int) -> Sequence[torch.Tensor]:
        assert self.train_loss is not None
        return [self.train_loss(index)]

    def clip(self) -> None:
        if self._clip_grad_norm is not None:
            groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
            nn.utils.clip_grad_norm_(chain.from_iterable(groups), self._clip_grad_norm)

    @property
    def scaler(self) -> GradScaler | None:
        scalers = (value for value in self.stateful.values() if isinstance(value, GradScaler))
        return next((scaler for scaler in scalers if scaler.is_enabled()), None)

    def around(self) -> Sequence[object]:
        return [[*self.stateful.values()]]

    def metrics(self) -> Any:
        """Return what the loop has given with this save, whatever it is: the saver refuses what is no number."""
        return self.given_metrics

    def path_settings(self) -> dict[str, Any]:
        return {"every": self.every, "clip_grad_norm": self._clip_grad_norm}

    def lacks(self, monitor: str, step: int, metrics: Mapping[str, float]) -> str:
        return (
            f"monitor={monitor!r} is not among the metrics of the save of step {step}"
            f" ({', '.join(sorted(metrics)) or 'none was given'}): give it as metrics= of step or save, or save_top_k cannot rank this"
            " checkpoint. This warning comes once"
        )

    def averages(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        found = self.captured({"stateful": state["stateful"]}, self.describe(state))
        specs = found.specs.items()
        return {name: found.tensors[name] for name, spec in specs if spec.tag.role is Role.AVERAGE}

    @contextmanager
    def measuring(self, averages: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """See `TrainingAdapter.measuring`; averages whose state shares memory with an object are given to it."""
        owners = {
            name: value
            for name, value in self.stateful.items()
            if any(key.startswith(join_path(("stateful", name)) + "/") for key in averages)
        }

        def state() -> dict[str, Any]:
            return {"stateful": {name: state_of(value) for name, value in owners.items()}}

        with self.changes.undone(), ExitStack() as stack:
            for value in owners.values():
                if isinstance(value, nn.Module):  # in eval mode, which is undone afterwards
                    stack.enter_context(swapped_weights(value, {}))
            if owners:
                live = live_tensors(state, averages, self.captured)
                stack.enter_context(swapped_tensors(live, averages))
            yield

    def captured(self, state: object, describe: Describe = plain) -> TrainingState:
        """Return a part of `state` as tensors by name."""
        return TrainingState.capture(state, describe)

    def settle(self) -> None:
        """Let all parameters be in memory of their own."""


def _outlines(state: Any) -> dict[str, JSON]:
    """Return what of each entry of a state is no tensor."""
    entries = state if isinstance(state, Mapping) else {"state": state}
    return {str(key): anonymous(TrainingState.capture(value).tree) for key, value in entries.items()}


class _Generators:
    """The generators of a loop's objects, with their states as other objects have them."""

    def __init__(self, objects: LoopObjects) -> None:
        self._objects = objects

    def state_dict(self) -> dict[str, Any]:
        return {name: generator_state(one) for name, one in self._objects.generators().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore_own(state, self._objects.generators())


class _Generator:
    """A random generator, with its state as other objects have it."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": generator_state(self.generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_generator(self.generator, state["state"])


def _may_load(value: object) -> bool:
    """Return whether an object may be a loader or a sampler: reading its state may start workers."""
    is_iterable = hasattr(value, "__iter__") and not isinstance(value, nn.Module)  # nn.Sequential is
    return is_iterable or hasattr(value, "dataset")
