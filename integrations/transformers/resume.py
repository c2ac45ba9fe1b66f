"""The start of a Hugging Face run: checks that it can be saved, and continues it from the newest checkpoint."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.transformers.state import arguments
from shrinkpoint.session.data import other_processes
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.store.manifest import Manifest

AFTER_THE_END = 2**52
"""A step that lies behind the end of every training, and in floating point on an epoch's edge."""

_COPIES = ("NO", *(f"MULTI_{kind}" for kind in ("GPU", "CPU", "NPU", "MLU", "MUSA", "XPU", "HPU")))


def require_supported_args(args: Any) -> None:
    """Refuse a training whose whole state no process will ever have, before a model is moved anywhere."""
    if getattr(args, "deepspeed", None):
        raise ConfigError(
            f"deepspeed={args.deepspeed!r}: DeepSpeed keeps the state in buffers of its own, which CompressedCheckpoint does not support."
            " Train with FSDP2 (fsdp_config={'version': 2}) or DDP (torchrun), or leave the saving to the Trainer's own save_strategy"
        )


def require_supported(trainer: Any) -> None:
    """As `require_supported_args`, with checks that need the trainer."""
    require_supported_args(trainer.args)
    kind = getattr(trainer.accelerator, "distributed_type", "NO")
    name = str(getattr(kind, "value", kind))
    if name == "FSDP" and not is_sharded(trainer):
        raise ConfigError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), whose flat parameters are not supported: set fsdp_version: 2 in"
            " accelerate's configuration, or since transformers 5 fsdp_config={'version': 2}"
        )
    divided = getattr(trainer, "is_tp_enabled", False) or getattr(
        trainer, "is_distributed_loading_by_transformers", False
    )
    if name not in (*_COPIES, "FSDP") or divided:
        raise ConfigError(
            f"accelerate trains this model as {'TENSOR_PARALLEL' if divided else name}, which CompressedCheckpoint cannot save"
            " yet: train on a single device, with DDP (torchrun) or with FSDP2"
        )
    if trainer.args.world_size != world().size:
        raise ConfigError(
            f"{trainer.args.world_size} processes train, of which torch.distributed knows {world().size}: start them with"
            " torchrun or accelerate launch"
        )


def is_sharded(trainer: Any) -> bool:
    """Return whether FSDP2 shards the model once training begins."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and int(getattr(plugin, "fsdp_version", 1)) == 2


def choose(run: TrainingSession, trainer: Any, given: Any) -> Mapping[str, Any] | None:
    """Return the state that a training continues from, compared with its model; the same on all ranks. None where no
    run is continued.

    Of a sharded model it is the trainer's part alone: tensors are filled by `TrainingSession.restore` once the model
    is sharded. The user's ``resume_from_checkpoint`` takes precedence, a shrinkpoint address or any value that the
    trainer accepts.

    Raises:
        NoCheckpointError: there is none, and ``resume="must"``.
        StateMismatchError: the run is another model's or framework's.
        ChainError, StoreError: no checkpoint can be read.
    """
    url = run.settings.url
    address = Address.parse(given) if isinstance(given, str) else None
    if address is not None and address.url != url:
        raise ConfigError(
            f"resume_from_checkpoint={given!r} is not in {url}, where CompressedCheckpoint saves: continue that run with its"
            " own URL, or take its weights with `shrinkpoint export`"
        )
    if (
        given is True
        and run.settings.resume != "never"
        and world().on_first(lambda: bool(run.saver.store.manifests()))
    ):
        given = None  # "continue from the last checkpoint": there is none in the trainer's folder, only in the run
    if given is not None and address is None:
        run.require_own_run()
        run.warn_newer(f"resume_from_checkpoint={given!r}")
        return None
    manifest = run.choose() if address is None else run.decide(lambda: _at(run, address))
    if manifest is None:
        run.require_own_run()
        return None
    if run.shards:
        stored = world().on_first(lambda: _outline(run, manifest))
    else:
        stored = run.restore(manifest)
        world().on_first(lambda: run.adapter.check(stored))
    run.saved_step = manifest.step
    run.remember()
    step = stored["trainer"]["global_step"]
    run.announce(step)
    if is_complete(stored, trainer.args):
        run.warn_complete(step, "Raise max_steps or num_train_epochs to continue")
    run.warn_once(other_processes(len(stored["processes"])))
    found: Mapping[str, Any] = stored
    return found


def _at(run: TrainingSession, address: Address) -> Manifest:
    if not address.is_newest:
        return address.find(run.saver.store.manifests())
    newest = run.saver.newest()
    if newest is None:
        raise NoCheckpointError(f"{run.settings.url} contains no checkpoint")
    return newest


def _outline(run: TrainingSession, manifest: Manifest) -> dict[str, Any]:
    keys = ("format", "trainer", "arguments", "stopped", "steps_per_epoch")
    found = run.outline((*run.adapter.outline, *keys, "world"), manifest)
    assert found is not None
    run.adapter.check(found)
    return {**{key: found[key] for key in keys}, "processes": [None] * found["world"]}


def is_complete(stored: Mapping[str, Any], args: Any) -> bool:
    """Return whether the training is complete: the trainer itself would make one step more where ``max_steps`` ended an epoch early."""
    state, now = stored["trainer"], arguments(args)
    done = state["global_step"]
    if stored["arguments"] == now:
        return bool(stored["stopped"]) or done >= state["max_steps"]
    if now["max_steps"] > 0:
        return bool(done >= now["max_steps"])
    per_epoch = stored["steps_per_epoch"]
    return per_epoch is not None and done >= math.ceil(now["num_train_epochs"] * per_epoch)


def write_thin(stored: Mapping[str, Any], folder: Path, *, complete: bool) -> str:
    """Write a folder with only the trainer's state, from which it determines its position: after the end, where
    nothing is left to train."""
    step = {"global_step": AFTER_THE_END} if complete else {}
    (folder / TRAINER_STATE_NAME).write_text(json.dumps({**stored["trainer"], **step}, default=float))
    return str(folder)
