"""Makes a run of existing checkpoints: by step, each read back and compared with its original."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError, CorruptionError, StateMismatchError
from shrinkpoint.io.loading import load
from shrinkpoint.io.ordinary import Ordinary, describe_state, read_ordinary
from shrinkpoint.quality.evaluation import Evaluate
from shrinkpoint.saver import Saver
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import Describe, Role, TrainingState
from shrinkpoint.state.tree import Path as Place
from shrinkpoint.state.tree import join_path
from shrinkpoint.store.connect import StorageOptions

_MODEL = (Role.WEIGHT, Role.BUFFER)
_ROUNDED = (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES)
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Count what an import has done."""

    imported: tuple[int, ...]
    """Steps that this call has stored."""
    present: tuple[int, ...]
    """Stored already, and compared with their originals again."""
    original_bytes: int
    bytes: int
    notes: tuple[str, ...]
    """What does not come back as it was."""


def import_checkpoints(
    paths: Iterable[Path],
    url: str,
    *,
    scheme: str = "lossless",
    evaluate: Evaluate | None = None,
    storage_options: StorageOptions = None,
    say: Callable[[str], object] = lambda _: None,
) -> Imported:
    """Store checkpoints in a run, and compare each with its original after it was read back. Nothing is removed.

    Args:
        paths: the checkpoints, in any order.
        url: the run; those that it has already are compared, and not stored again.
        scheme: a lossy one rounds weights, and the moments of Adam and SGD; all else is compared.
        evaluate: the held-out loss with these weights and buffers, by their names in the model, as the scheme measures its bound.
        storage_options: for the run's store.
        say: called with what is being done.

    Raises:
        ConfigError: two have the same step, one has none, or is older than the run's newest.
        StateMismatchError: they are of different models, or the run has another checkpoint of a step.
        CorruptionError: what was read back differs from the original.
        ShrinkpointError: a checkpoint cannot be read, or the run cannot be written.
    """
    notes: dict[str, None] = {}
    ordered, size = _ordered(paths, notes, say)
    saver = Saver(url, SaverConfig(scheme=scheme, busy="wait"), storage_options=storage_options)
    saver.check()
    try:
        known = {manifest.step for manifest in saver.store.manifests()}
        for step, path in ordered.items():
            if step not in known and step < max(known, default=0):
                raise ConfigError(
                    f"{path} is older than the newest checkpoint of {url}, of step {max(known)}, after which it would come: import all into"
                    " a new run"
                )
        if known:
            saver.restore()
        for count, (step, path) in enumerate(ordered.items(), 1):
            where = f"step {step} ({count} of {len(ordered)})"
            original = read_ordinary(path)
            describe = describe_state(original.state)
            if step not in known:
                say(f"storing {where}")
                saver.save(original.state, step=step, describe=describe, evaluate=evaluate, wait=True)
                saver.require_stored()
            say(f"comparing {where} with {path.name}")
            lossy = None if scheme == "lossless" else describe
            back = load(str(Address(url=url, step=step)), storage_options=storage_options)
            differs = _difference(original.state, back, notes, lossy)
            if differs is not None and step in known:
                raise StateMismatchError(
                    f"{url} has another checkpoint of step {step} than {path}: {differs}. Import into a new run"
                )
            if differs is not None:
                raise CorruptionError(
                    f"step {step} of {url} is not what {path} has: {differs}. Keep the original, and report this as a bug"
                )
        stored = {manifest.step: manifest.chain[-1].total for manifest in saver.store.manifests()}
    finally:
        saver.close()
    return Imported(
        imported=tuple(step for step in ordered if step not in known),
        present=tuple(step for step in ordered if step in known),
        original_bytes=size,
        bytes=sum(stored[step] for step in ordered),
        notes=tuple(notes),
    )


def _ordered(
    paths: Iterable[Path], notes: dict[str, None], say: Callable[[str], object]
) -> tuple[dict[int, Path], int]:
    """Return the checkpoints by step, and their bytes, after what cannot be one run was refused."""
    found: dict[int, Path] = {}
    size, first, shapes = 0, Path(), Shapes()
    for count, path in enumerate(paths, 1):
        say(f"looking into {path.name} ({count})")
        one = read_ordinary(path)
        if one.step is None:
            raise ConfigError(
                f"{path} has no step, neither inside nor in its name: rename it, as in step=500{path.suffix}"
            )
        if one.step in found:
            known = read_ordinary(found[one.step])
            if _difference(known.state, one.state, {}) is None:
                notes[f"{path.name} is the same as {known.path.name}"] = None  # such as Lightning's last.ckpt
                continue
            raise ConfigError(
                f"{known.path} and {path} are both of step {one.step}, and differ: a run has one of each; name the checkpoints without one"
                " of the two, as by a longer pattern"
            )
        own = _shapes(one)
        first, shapes = (first, shapes) if found else (path, own)
        differ = sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name))
        if differ:
            raise StateMismatchError(
                f"{path} is of another model than {first}: {', '.join(differ[:3])} differ in shape, or are not in both. Import each model"
                " into a run of its own"
            )
        found[one.step] = path
        size += one.bytes
    return dict(sorted(found.items())), size


def _shapes(one: Ordinary) -> Shapes:
    specs = TrainingState.capture(one.state, describe_state(one.state)).specs.values()
    return {str(spec.tag.parameter): spec.shape for spec in specs if spec.tag.role in _MODEL}


def _difference(
    one: Any, other: Any, notes: dict[str, None], lossy: Describe | None = None, path: Place = ()
) -> str | None:
    """Return where two states differ, bit by bit; None where they are the same.

    Args:
        one: the original.
        other: what was read back.
        notes: gets what has not come back as it was, and is no value.
        lossy: gives the roles by which tensors are rounded.
        path: of both, in the whole.
    """
    if getattr(one, "_metadata", None) and not hasattr(other, "_metadata"):
        notes[
            "left out: _metadata of state_dict(), the modules' versions, without which load_state_dict works"
        ] = None
    if type(one) is not type(other) and isinstance(one, (type(other), bytearray)):
        notes[f"{type(one).__name__} comes back as {type(other).__name__}"] = None
    elif type(one) is not type(other):
        return _place(path, other)
    keys, others = (
        [*each]
        if isinstance(each, Mapping)
        else [*range(len(each))]
        if isinstance(each, list | tuple)
        else None
        for each in (one, other)
    )
    if keys is None or keys != others:
        rounded = lossy is not None and torch.is_tensor(one) and lossy(path, one).role in _ROUNDED
        return None if keys == others and _is_same(one, other, rounded=rounded) else _place(path, other)
    found = (_difference(one[key], other[key], notes, lossy, (*path, str(key))) for key in keys)
    return next((text for text in found if text is not None), None)


def _place(path: Place, found: Any) -> str:
    return f"{join_path(path) or 'the state'} was read back as another {type(found).__name__}"


def _is_same(one: Any, other: Any, *, rounded: bool) -> bool:
    """Compare numbers, texts, arrays and tensors as they are stored."""
    a, b = TrainingState.capture(one), TrainingState.capture(other)
    alike = torch.is_tensor(one) or json.dumps(a.tree) == json.dumps(b.tree)
    if not alike or a.specs != b.specs or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    pairs = [tuple(tensor_to_bytes(each[name]) for each in (a.tensors, b.tensors)) for name in a.specs]
    return rounded or all(np.array_equal(one, other) for one, other in pairs)
