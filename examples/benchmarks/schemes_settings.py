"""Every scheme with the options that it is compared with: as published, as mended, and swept where size trades for loss."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "baselines"))

from baselines import (
    AdaptiveOptions,
    DeltaDnnOptions,
    GoboOptions,
    PartialOptions,
    ScarOptions,
    UniformOptions,
)

from shrinkpoint.schemes.auto.scheme import AutoOptions
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.catalogue import build, options_of
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.schemes.published.excp_codecs import ExcpOptions
from shrinkpoint.schemes.published.lc_checkpoint import LCCheckpointOptions

_MATRICES: dict[str, Any] = {"matrices_only": True, "min_elements": 2000}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One scheme with its options."""

    scheme: str
    label: str
    options: Any = None
    configuration: Configuration | None = None
    """Of Inshrinkerator, which has no settings of its own but those that its search chooses."""
    restores: bool = False
    """Whether runs are restored ten times with it: the few that stand for their scheme."""

    def build(self, save_context: SaveContext) -> Scheme:
        """The scheme for one save."""
        if self.configuration is None:
            return build(self.scheme, self.options, save_context)
        options = self.options or InshrinkeratorOptions()
        weights = Weights(save_context.state, options, save_context.gradients)
        return Inshrinkerator(options, weights, self.configuration)


def _auto() -> Iterator[Setting]:
    for scale in (0.125, 0.25, 0.375, 0.5, 0.75, 0.875, 1.0, 1.5, 2.0, 3.0):
        options = AutoOptions(weight_scale=scale)
        yield Setting(
            scheme="auto",
            label=f"scale {scale:g}",
            options=options,
            restores=scale in (0.125, 0.25, 0.5, 1.0, 1.5, 2.0),
        )


def _excp() -> Iterator[Setting]:
    """As published but for one-dimensional parameters, then with the second moments restored as row times column, which is the
    better half, and at last with one-dimensional parameters too, as the repository has it.
    """
    for refill, words in (("none", ""), ("factored", ", refilled")):
        for alpha in (5e-5, 2e-4, 5e-4, 1e-3, 3e-3):
            options = ExcpOptions(alpha=alpha, refill=refill, **_MATRICES)
            often = alpha in (5e-5, 1e-3)
            yield Setting(scheme="excp", label=f"alpha {alpha:g}{words}", options=options, restores=often)
    for alpha in (1e-4, 2e-4, 3e-4, 5e-4, 1e-3):
        options = ExcpOptions(
            alpha=alpha, refill="factored", coder="rans", base_moments="quantized", **_MATRICES
        )
        yield Setting(scheme="excp", label=f"alpha {alpha:g}, refilled, rANS, lossy base", options=options)
    for alpha in (5e-5, 2e-4, 5e-4, 1e-3, 3e-3):
        yield Setting(scheme="excp", label=f"alpha {alpha:g}, vectors", options=ExcpOptions(alpha=alpha))


def _inshrinkerator() -> Iterator[Setting]:
    mild = Configuration(bins=32, prune=0.0, protect=0.01, metric="sensitivity", embedding_bins=32)
    harsh = Configuration(bins=8, prune=0.3, protect=0.005, metric="sensitivity", embedding_bins=16)
    for label, configuration in (("mild", mild), ("harsh", harsh)):
        yield Setting(scheme="inshrinkerator", label=label, configuration=configuration, restores=True)


def _weights_only() -> Iterator[Setting]:
    """The schemes for weights: as published, moments exact; and swept, with Adam's moments in levels, for the whole state."""
    swept: Sequence[tuple[str, str, Any]] = (
        ("lc-checkpoint", "2 bit", LCCheckpointOptions(bits=2)),
        ("lc-checkpoint", "3 bit", LCCheckpointOptions()),
        ("uniform", "by entropy", UniformOptions()),
        ("uniform", "8 bit", UniformOptions(bits=8)),
        ("adaptive", "4 bit", AdaptiveOptions()),
        ("adaptive", "8 bit", AdaptiveOptions(bits=8)),
        ("gobo", "3 bit", GoboOptions()),
        ("gobo", "5 bit", GoboOptions(bits=5)),
        ("delta-dnn", "1e-2", DeltaDnnOptions(error_bound=1e-2)),
        ("delta-dnn", "1e-3", DeltaDnnOptions()),
        ("topn", "a tenth", PartialOptions()),
        ("topn", "half", PartialOptions(fraction=0.5)),
        ("scar", "an eighth", ScarOptions()),
        ("scar", "half", ScarOptions(fraction=0.5)),
    )  # fmt: skip
    for scheme, label, options in swept:
        if options == options_of(scheme):
            yield Setting(scheme=scheme, label=label, options=options, restores=True)
        moments = replace(options, moments="levels")
        yield Setting(scheme=scheme, label=f"{label}, moments too", options=moments)


SETTINGS: tuple[Setting, ...] = (
    *_auto(),
    *_excp(),
    *_inshrinkerator(),
    *_weights_only(),
    Setting(scheme="lossless", label="exact"),
)


def known(texts: Iterable[str]) -> list[str]:
    """What the user named: schemes, or ``scheme:label``; several by commas where no label holds one.

    Raises:
        ValueError: a name stands for nothing.
    """
    names = {name for s in SETTINGS for name in (s.scheme, f"{s.scheme}:{s.label}")}
    found = [name for text in texts for name in ([text] if text in names else text.split(","))]
    unknown = sorted(set(found) - names)
    if unknown:
        raise ValueError(f"no setting is called {', '.join(unknown)}; there are {'; '.join(sorted(names))}")
    return found


def chosen(settings: Sequence[Setting], only: Collection[str]) -> list[Setting]:
    """The settings whose scheme, or ``scheme:label``, is named; all of them if nothing is."""
    return [s for s in settings if not only or s.scheme in only or f"{s.scheme}:{s.label}" in only]
