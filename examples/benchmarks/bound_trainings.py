"""All trainings of the bench of the bound, and on which of them constants may be chosen."""

from __future__ import annotations

import hashlib
import inspect
from functools import partial
from pathlib import Path

from bound_training import Kind
from bound_trainings_fast import FAST
from bound_trainings_fields import FIELDS
from bound_trainings_images import IMAGES
from bound_trainings_more import MORE
from bound_trainings_short import SHORT
from bound_trainings_tables import TABLES
from bound_trainings_text import TEXT

__all__ = ["KINDS", "LISTED", "TUNED", "source_digest"]

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (*TEXT, *IMAGES, *TABLES, *SHORT, *MORE, *FIELDS, *FAST)
}
"""By name, in the order of the tables."""

LISTED = tuple(name for name in KINDS if name not in {kind.name for kind in (*MORE, *FIELDS, *FAST)})
"""Those that run unless others are asked for."""

TUNED = frozenset(
    {
        "gpt",
        "vit",
        "diffusion",
        "recommender",
        "fine-tuning",
        "moe-muon",
        "vae-lion",
        "warm-restarts",
        "matrix-factorization",
        "lstm",
        "forecasting",
        "autoencoder",
        "autoencoder-short",
        "sines-fit",
        "gru-ctc",
        "gpt-nadam",
        "binary",
    }
)
"""Constants of the library are chosen on these; on the others, they are only reported."""

_SHARED = ("bound_training.py", "bound_data.py", "bound_optimizers.py", "../gpt.py")


def source_digest(kind: Kind) -> str:
    """Another one whenever the source of a training has changed: of its own module, its models, and what all use."""
    build = kind.build.func if isinstance(kind.build, partial) else kind.build
    own = Path(inspect.getfile(build))
    models = own.with_name(own.name.replace("trainings", "models"))
    files = [own, models, *(own.parent / name for name in _SHARED)]
    text = b"\0".join(path.read_bytes() for path in files)
    return hashlib.sha256(text).hexdigest()[:12]
