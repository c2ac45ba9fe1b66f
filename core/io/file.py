"""``shrinkpoint.save``: one state dict in one file, without a run; ``shrinkpoint.load`` reads it
(`shrinkpoint.io.loading`)."""

import os
from pathlib import Path

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.plan import Plan
from shrinkpoint.quality.planner import Planner
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.exactness import exact_parts, large_share
from shrinkpoint.state.training import Describe, TrainingState, plain
from shrinkpoint.store.connect import Options, write_file
from shrinkpoint.warn import brief, warn


def save(
    state: object,
    path: str | Path,
    *,
    scheme: str = "lossless",
    describe: Describe = plain,
    storage_options: Options | None = None,
) -> int:
    """Write one state to one file, which appears whole or not at all.

    Args:
        state: as for ``torch.save``: nested dicts, lists, numbers, tensors.
        path: a path or URL; an existing file is replaced.
        scheme: ``lossless``; or one that quantizes the tensors that `describe` calls weights and moments: ``auto`` with
            mild steps, ``inshrinkerator`` with its mildest configuration, any other with its defaults.
        describe: gives each tensor's role (`shrinkpoint.state.roles`); without it every scheme stores exactly, with a
            warning.
        storage_options: passed to fsspec.

    Returns:
        The file's size in bytes.

    Raises:
        ConfigError: `path` is no path, as where the arguments are swapped.
        CannotRepresentError: `state` contains an object that cannot be stored without pickle; the message names it.
        StoreError: the file cannot be written.

    Examples:
        >>> size = shrinkpoint.save({"model": model.state_dict(), "epoch": 3}, "model.shrink")
        >>> shrinkpoint.load("model.shrink")["epoch"]
        3

        With a lossy scheme, `describe` gives the tensors' roles; a warning says that no loss bounds the noise:

        >>> from shrinkpoint.state.roles import describe_training
        >>> describe = describe_training(
        ...     model, [optimizer], model_path=("model",), optimizers_path=("optimizers",)
        ... )
        >>> state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
        >>> smaller = shrinkpoint.save(state, "state.shrink", scheme="auto", describe=describe)
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path must be a path or URL, not {brief(path)}: save(state, path)")
    config = SaverConfig(scheme=scheme)
    captured = TrainingState.capture(state, describe)
    host = TrainingState(captured.tree, {n: t.cpu() for n, t in captured.tensors.items()}, captured.specs)
    advice = "A Checkpointer measures losses; scheme='lossless' is exact"
    plan = Planner(config, lambda: 0.0, advice=advice).plan(SaveContext(state=host), None)
    encoded = encode_state(
        host,
        plan.scheme,
        step=0,
        reference=None,
        parent=None,
        threads=config.encoder_threads,
        exactly=plan.reason if plan.is_exact and scheme != "lossless" else None,
    )
    data = write_container(encoded.checkpoint)
    _warn_exact(str(path), scheme, plan, encoded, len(data), knows=describe is not plain)
    write_file(str(path), data, storage_options)
    return len(data)


def _warn_exact(path: str, scheme: str, plan: Plan, encoded: EncodedState, size: int, *, knows: bool) -> None:
    """Warn that a lossy scheme has stored everything exactly, and why."""
    if plan.is_exact and scheme != "lossless":
        why = (
            plan.reason
            if knows
            else "nothing says which of its tensors are weights and which an optimizer's. Give describe=, as"
            " shrinkpoint.state.roles.describe_training makes it of a model and its optimizers"
        )
        warn(f"scheme={scheme!r} has stored {path} bit-exactly, as 'lossless' does: {why}")
        return
    entries = encoded.checkpoint.entries
    parts = exact_parts(((entry.spec, entry.encoded.nbytes) for entry in entries), encoded.exact)
    reason = large_share(parts, size, path)
    if reason is not None:
        warn(reason[1])
