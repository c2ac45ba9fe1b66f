"""Makes a run of existing checkpoints: by step, each read back and compared with its original."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError, CorruptionError, StateMismatchError
from shrinkpoint.io.loading import load
from shrinkpoint.io.ordinary import Ordinary, describe_state, difference, read_ordinary
from shrinkpoint.quality.evaluation import Evaluate
from shrinkpoint.saver import Saver
from shrinkpoint.state.training import Describe, Role, TrainingState
from shrinkpoint.state.tree import Path as Place
from shrinkpoint.store.connect import StorageOptions

_MODEL = (Role.WEIGHT, Role.BUFFER)
_ROUNDED = (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES)
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Count what an import has done."""

    steps: tuple[int, ...]
    """Stored by this call."""
    present: tuple[int, ...]
    """Stored already, and compared with their originals again."""
    original_bytes: int
    stored_bytes: int
    notes: tuple[str, ...]
    """What comes back as a plainer type."""


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
    ordered, sizes = _ordered(list(paths), say)
    saver = Saver(url, SaverConfig(scheme=scheme, busy="wait"), storage_options=storage_options)
    saver.check()
    stored: list[int] = []
    notes: dict[str, None] = {}
    try:
        known = {manifest.step for manifest in saver.store.manifests()}
        _check_place(ordered, known, url)
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
                stored.append(step)
            say(f"comparing {where} with {path.name}")

            def rounded(place: Place, tensor: torch.Tensor, describe: Describe = describe) -> bool:
                return scheme != "lossless" and describe(place, tensor).role in _ROUNDED

            back = load(str(Address(url=url, step=step)), storage_options=storage_options)
            found = difference(original.state, back, lambda text: notes.setdefault(text), rounded)
            if found is not None:
                raise _differs(path, step, url, found, is_new=step not in known)
        sums = sum(
            manifest.chain[-1].total for manifest in saver.store.manifests() if manifest.step in ordered
        )
    finally:
        saver.close()
    present = tuple(step for step in ordered if step in known)
    return Imported(
        steps=tuple(stored), present=present, original_bytes=sizes, stored_bytes=sums, notes=tuple(notes)
    )


def _ordered(paths: Sequence[Path], say: Callable[[str], object]) -> tuple[dict[int, Path], int]:
    """Return the checkpoints by step, and their bytes, after what cannot be one run was refused."""
    found: dict[int, Path] = {}
    sizes, first = 0, ("", Shapes())
    for count, path in enumerate(paths, 1):
        say(f"looking into {path.name} ({count} of {len(paths)})")
        one = read_ordinary(path)
        if one.step is None:
            raise ConfigError(
                f"{path} has no step, neither inside nor in its name: rename it, as in step=500{path.suffix}"
            )
        if one.step in found:
            known = read_ordinary(found[one.step])
            if difference(known.state, one.state, lambda _: None) is None:
                continue  # a link or a copy, such as Lightning's last.ckpt
            raise ConfigError(
                f"{known.path} and {path} are both of step {one.step}, and differ: a run has one of each; name the checkpoints without one"
                " of the two, as by a longer pattern"
            )
        shapes = _model(one)
        if first[0] and shapes != first[1]:
            differ = sorted(
                name for name in shapes.keys() | first[1].keys() if shapes.get(name) != first[1].get(name)
            )
            raise StateMismatchError(
                f"{path} is of another model than {first[0]}: {', '.join(differ[:3])} differ in shape, or are not in both. Import each model"
                " into a run of its own"
            )
        first = (str(path), shapes)
        found[one.step] = path
        sizes += one.bytes
    return dict(sorted(found.items())), sizes


def _model(one: Ordinary) -> Shapes:
    specs = TrainingState.capture(one.state, describe_state(one.state)).specs.values()
    return {str(spec.tag.parameter): spec.shape for spec in specs if spec.tag.role in _MODEL}


def _check_place(ordered: dict[int, Path], known: set[int], url: str) -> None:
    late = [path for step, path in ordered.items() if step not in known and step < max(known, default=0)]
    if late:
        raise ConfigError(
            f"{late[0]} is older than the newest checkpoint of {url}, of step {max(known)}, after which it would come: import all into a"
            " new run"
        )


def _differs(
    path: Path, step: int, url: str, found: str, *, is_new: bool
) -> CorruptionError | StateMismatchError:
    if is_new:
        return CorruptionError(
            f"step {step} of {url} is not what {path} has: {found}. Keep the original, and report this as a bug"
        )
    return StateMismatchError(
        f"{url} has another checkpoint of step {step} than {path}: {found}. Import into a new run"
    )
