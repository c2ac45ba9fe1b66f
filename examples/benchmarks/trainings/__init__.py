"""All trainings of the bench of the bound, and on which of them constants may be chosen."""

from trainings.base import Kind
from trainings.functions import FIELDS, FITTED, HEAT
from trainings.images import IMAGES, MLP_NADAM, SIGNS, VAE_NADAM
from trainings.play import PLAY
from trainings.states import STATES
from trainings.tables import SEQUENCES, SERIES_NADAM, SHORT, TABLES
from trainings.text import MORE_TEXT, NADAM_TEXT, TEXT

_LISTED = (*TEXT, *IMAGES, *TABLES, *SHORT)
_MORE = (*PLAY, *HEAT, *MORE_TEXT, *FIELDS)
_FAST = (*FITTED, *SEQUENCES, *NADAM_TEXT, VAE_NADAM, SERIES_NADAM, MLP_NADAM, *SIGNS)
"""Of each kind the first was shown to the project from outside, by its failure; the others were written for its mending."""

KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_LISTED, *_MORE, *_FAST, *STATES)}
"""By name, in the order of the tables."""

GROUPS = {
    group: tuple(kind.name for kind in kinds)
    for group, kinds in (("listed", _LISTED), ("more", _MORE), ("fast", _FAST), ("states", STATES))
}
"""The groups that docs/results.md names."""

TUNED = frozenset(
    {
        "gpt", "vit", "diffusion", "recommender", "fine-tuning", "moe-muon", "vae-lion", "warm-restarts",
        "matrix-factorization", "lstm", "forecasting", "autoencoder", "autoencoder-short", "sines-fit", "gru-ctc",
        "gpt-nadam", "binary",
    }
)  # fmt: skip
"""Constants of the library are chosen on these; on the others, they are only reported."""
