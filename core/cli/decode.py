"""Reads one whole checkpoint, of a run or of a single file."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shrinkpoint.cli.files import ContainerFile
from shrinkpoint.cli.options import addressed
from shrinkpoint.cli.runs import open_run, pick
from shrinkpoint.errors import NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.single import looks_like_file, naming

if TYPE_CHECKING:
    from shrinkpoint.coding.decode import Decoded
    from shrinkpoint.store.manifest import Manifest

__all__ = ["Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read, decoded and verified by its digests."""

    shown: str
    """Its location."""
    decoded: "Decoded"
    bytes: int
    """Bytes of its own container."""
    manifest: "Manifest | None"
    """None of a single file."""


def load(url: str, options: StorageOptions, step: int | None = None, seq: int | None = None) -> Loaded:
    """Read the checkpoint that the URL and the options name; by default a run's newest sound one.

    Raises:
        ConfigError: several of these name a checkpoint.
        NoCheckpointError: there is none.
        FormatError, ChainError: it is damaged.
        StoreError: it cannot be read.
    """
    address = addressed(url, step, seq)
    url = address.url
    with waiting_for(f"reading {url}") as waiting:
        from shrinkpoint.coding.decode import decode_chain, decode_checkpoint
        from shrinkpoint.config import SaverConfig
        from shrinkpoint.container.reader import read_container

        threads = SaverConfig().encoder_threads
        if looks_like_file(url):
            file = ContainerFile(url, options)
            with naming(file.url):
                decoded = decode_chain([read_container(file.read(0, file.size))], threads=threads)
            return Loaded(file.url, decoded, file.size, None)
        run = open_run(url, options)
        if address.is_newest:
            found = run.store.newest_sound(lambda m, data: decode_checkpoint(m, data, threads=threads))
            if found is None:
                raise NoCheckpointError(
                    f"{run.store.display} is a run without a checkpoint yet: there is nothing to read"
                )
            manifest, decoded = found
        else:
            manifest = pick(run, address)
            waiting.say(f"reading step {manifest.step} of {run.store.display}")
            decoded = decode_checkpoint(manifest, run.store.fetch(manifest), threads=threads)
        return Loaded(run.store.display, decoded, manifest.chain[-1].total, manifest)
