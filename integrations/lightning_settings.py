"""The options of the Lightning callback, checked and sorted by who needs them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.triggers import Schedule
from shrinkpoint.resume import ResumePolicy, check_policy
from shrinkpoint.saver import SaverConfig

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `CompressedCheckpoint` was told; see there."""

    url: str
    schedule: Schedule
    saver: SaverConfig
    on_epoch_end: bool
    monitor: str | None
    mode: Literal["min", "max"]
    save_top_k: int
    save_last: bool
    resume: ResumePolicy
    probe_batches: int
    storage_options: Mapping[str, object] | None

    @classmethod
    def build(
        cls,
        *,
        url: str,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        save_top_k: int,
        keep_last: int,
        monitor: str | None,
        mode: Literal["min", "max"],
        resume: ResumePolicy,
        probe_batches: int,
        options: Mapping[str, Any],
        **more: Any,
    ) -> "Settings":
        """Check and sort the callback's arguments.

        Raises:
            ConfigError: one of them has a value that cannot work.
        """
        if not isinstance(url, str) or not url.rstrip("/"):
            raise ConfigError(
                f"url={url!r} must be the folder or URL of a run, for example 's3://bucket/run-7'"
            )
        if "#" in url:
            raise ConfigError(f"url={url!r} must name a run without '#', which separates a checkpoint's step")
        if type(save_top_k) is not int or save_top_k < -1:
            raise ConfigError(f"save_top_k={save_top_k!r} must be an integer: how many, or -1 for all")
        if save_top_k > 1 and monitor is None:
            raise ConfigError(
                f"save_top_k={save_top_k} ranks by a metric: name it with monitor=, or use keep_last="
            )
        if type(probe_batches) is not int or probe_batches < 1:
            raise ConfigError(f"probe_batches={probe_batches!r} must be an integer of at least 1")
        unknown = set(options) - SaverConfig.names()
        if unknown:
            raise ConfigError(f"{', '.join(sorted(unknown))}: CompressedCheckpoint has no such option")
        check_policy(resume)
        keep: dict[str, Any] = {} if save_top_k == -1 else {"keep_last": keep_last}
        if save_top_k > 0 and monitor is not None:
            keep["keep_best"] = save_top_k
        return cls(
            url=url.rstrip("/"),
            schedule=Schedule(
                every_n_train_steps=every_n_train_steps,
                every_n_epochs=every_n_epochs,
                train_time_interval=train_time_interval,
            ),
            saver=SaverConfig(**{"monitor": monitor, "mode": mode, **keep, **options}),
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            resume=resume,
            probe_batches=probe_batches,
            **more,
        )
