"""The relative rise of the loss after a restore, with its confidence interval.

Let a restore change the weights w by an error e. The loss L of a batch then rises by

    L(w + e) - L(w) = g.e + e.H.e / 2 + ...

The first-order term changes its sign with e, differs between batches, and training removes it within some steps: it
is noise. The second-order term is the harm, which is to be known.

**At the restore** the loss is measured at w + e and at w - e, on the same batches (`measured_rise`). The mean of the
pair less L(w) is the harm, half of the pair's difference the first-order term n.

**After k steps** (`lasting_rises`) there is no mirror image, since a step from w - e leads elsewhere. The rise r(k) is
that of the training from w + e above the one from w. With s(m), the standard error of these batches' mean if the rise
is m (`Rise.error_of`), the harm and its error are

    m(k) = r(k) - n/2 - d(k)
    error(k)^2 = s(m(k))^2 + (n/2)^2 + (d(k)/2)^2 + (k f)^2 + u(k)^2

with four corrections:

* n/2: between nothing and all of the first-order term is left, so half of it is subtracted, and half is doubt.
* d(k), the delay: restored moments have lost some steps. While the loss falls steeply, these raise the present loss
  much and the final loss little. So the fall over the lost steps is subtracted, as far as the loss has risen, and
  half of it is doubt.
* f, the noise in a step that falls show: a restore does no good. Where r(k) - n/2 is a fall, that is noise, and as
  much could raise the loss. It is the largest fall per step of any k.
* u(k), the noise of updates: those from restored moments have other directions than the true ones. To first order they
  make the loss fall by more or by less, by a part of what it falls by anyway, on these batches and not on later ones.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

from shrinkpoint.errors import ConfigError

Losses: TypeAlias = Sequence[float]
"""The loss on each of some batches, always the same ones; a single number where only the mean is known."""

LOSS_FLOOR = 1e-8
"""Losses nearer to zero count as this one."""
CONFIDENCE = 1.645
"""Standard errors between the mean and an end of the interval: 95 % of a normal distribution lie below the upper end."""

ABSOLUTE = 2e-4
_OF_SHARE = 0.2
_LEAST = 1e-12
# Measured in pairs on two batches, the rise at ten checkpoints of a training varied by a third to four fifths of its mean, and
# by 0.02 % of the loss at least (five trainings); on 24 to 40 batches by somewhat less, so that what two batches add is 30 %
# of the true rise. Half of the *measured* one makes the upper end cover the truth in 94 % of such measurements.
_PROPORTIONAL = 0.5
_PRIOR_BATCHES = 2
_PRIOR_WEIGHT = 4  # degrees of freedom: two batches' own spread has one, and would be 0 by chance too often
_OF_UPDATES = 0.5  # of the fall and the update's error; chosen on the first probes of half of the trainings of docs/results.md
_SURPRISE = 2.0  # standard errors above what was expected: then the training has changed, and what was known is forgotten


@dataclass(frozen=True)
class Rise:
    """A relative rise of the loss, with its standard error."""

    mean: float
    """``inf`` where a loss was not finite."""
    error: float = 0.0
    """Standard error of the mean: of the batches' own spread, and of a prior for such measurements."""
    first_order: float = 0.0
    """The first-order term of a pair: the rise at the restore itself, less the mean."""
    batches: int = 0
    """Batches measured; 0 where no measurement was needed."""
    squares: float = 0.0
    """Sum of the batches' squared deviations from the mean."""
    absolute: float = ABSOLUTE
    """The part of the error that does not follow the size of the rise."""
    doubt: float = 0.0
    """A further standard error, independent of the batches' spread and of the size of the rise."""
    distance: float = 0.0
    """Euclidean distance of the restored weights from the true ones, where it is known."""

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - CONFIDENCE * self.error

    @property
    def high(self) -> float:
        """Upper end of the interval. A fall counts as no rise: a restore does no good, and as much noise could have raised the loss."""
        fell = math.isfinite(self.mean) and self.mean < 0
        return (0.0 if fell else self.mean) + CONFIDENCE * self.error

    @property
    def is_significant(self) -> bool:
        """Whether the rise is more than its own standard error."""
        return self.mean > self.error

    def within(self, allowed: float) -> bool:
        """Return whether the upper end is finite and no more than `allowed`."""
        return math.isfinite(self.high) and self.high <= allowed

    def times(self, factor: float) -> "Rise":
        """Return the rise multiplied by a factor, with the same relative error."""
        return replace(
            self,
            mean=self.mean * factor,
            error=self.error * factor,
            first_order=self.first_order * factor,
            squares=self.squares * factor**2,
            absolute=self.absolute * factor,
            doubt=self.doubt * factor,
        )

    def expecting(self, mean: float) -> "Rise":
        """Return the same measurement where a rise of `mean` was expected: the error follows the greater of the two.

        Otherwise a measurement that is too low by chance would be taken for a more precise one.
        """
        return self if self.batches == 0 else replace(self, error=self.error_of(max(abs(self.mean), mean)))

    def error_of(self, size: float) -> float:
        """Return the standard error of these batches' mean if the rise is `size` in truth."""
        prior = _PROPORTIONAL * size + self.absolute
        if self.batches < 2:
            return math.hypot(prior, self.doubt)
        of_one = _PRIOR_WEIGHT * _PRIOR_BATCHES * prior**2 + self.squares
        error = math.sqrt(of_one / (_PRIOR_WEIGHT + self.batches - 1) / self.batches)
        return math.hypot(error, self.doubt)


EXACT = Rise(0.0)
"""The rise of weights that are restored exactly: none."""


def relative_rise(loss: float, baseline: float) -> float:
    """``(loss - baseline) / max(|baseline|, LOSS_FLOOR)``; ``inf`` when either is not finite, and never ``-inf``."""
    if not (math.isfinite(loss) and math.isfinite(baseline)):
        return math.inf
    return max((loss - baseline) / max(abs(baseline), LOSS_FLOOR), -sys.float_info.max)


def absolute_error(share: float) -> float:
    """Return the part of a measurement's error that does not follow the rise.

    Args:
        share: what one restore may cost. Rises far below it need not be known better than to a fifth of it.
    """
    return max(_LEAST, min(ABSOLUTE, _OF_SHARE * share))


def measured_rise(
    true: Losses, restored: Losses, mirrored: Losses | None = None, *, absolute: float = ABSOLUTE
) -> Rise:
    """Return the relative rise of the loss, paired by batch: of a pair its second-order part, else all of it.

    Args:
        true: the losses without a restore.
        restored: at true + error, on the same batches; where their numbers differ, only the means are compared.
        mirrored: at true - error, or None. Where one is not finite, neither is the rise.
        absolute: see `absolute_error`.
    """
    if not len(true) == len(restored) == len(restored if mirrored is None else mirrored):
        true, restored = [_mean(true)], [_mean(restored)]
        mirrored = None if mirrored is None else [_mean(mirrored)]
    unit = max(abs(_mean(true)), LOSS_FLOOR)
    half = 0.0
    if mirrored is not None:
        half = _mean([plus / 2 - minus / 2 for plus, minus in zip(restored, mirrored, strict=True)])
        restored = [plus / 2 + minus / 2 for plus, minus in zip(restored, mirrored, strict=True)]
    differences = [loss - base for loss, base in zip(restored, true, strict=True)]
    mean = _mean(differences) / unit
    if not math.isfinite(mean):
        return Rise(math.inf, batches=len(true), absolute=absolute)
    deviations = [difference / unit - mean for difference in differences]
    squares = sum(deviation * deviation for deviation in deviations)
    rise = Rise(mean, first_order=half / unit, batches=len(true), squares=squares, absolute=absolute)
    return rise.expecting(0.0)


def lasting_rises(
    rises: Mapping[int, Rise],
    at: Rise,
    *,
    fall: float = 0.0,
    lost_steps: float = 0.0,
    update_error: float = 0.0,
) -> dict[int, Rise]:
    """Return what rises some steps after a restore say of its harm: the formula is above, in the module's docstring.

    Args:
        rises: by the number of steps, each measured at the restored weights alone.
        at: the pair at the restore.
        fall: of the true loss in a step, relative.
        lost_steps: that the restore sets training back by.
        update_error: of the first update after the restore, relative to the true one's length.
    """
    half = _finite(at.first_order / 2)
    harms = {steps: rise.mean - half for steps, rise in rises.items() if math.isfinite(rise.mean)}
    fallen = max((-harm / steps for steps, harm in harms.items()), default=0.0)
    lasting = dict(rises)
    for steps, harm in harms.items():
        delay = min(_finite(lost_steps * fall), max(0.0, harm))
        noises = half, max(0.0, fallen) * steps, delay / 2, _finite(_OF_UPDATES * steps * fall * update_error)
        harmful = replace(rises[steps], mean=harm - delay, doubt=reduce(math.hypot, noises, 0.0))
        lasting[steps] = harmful.expecting(0.0)
    return lasting


def _finite(value: float) -> float:
    """Return the value, or 0 where nothing is known by it."""
    return value if math.isfinite(value) else 0.0


def pooled(own: Rise, past: Rise | None) -> Rise:
    """Return the precision-weighted mean of a measurement and the prediction from earlier ones.

    A fall counts as no rise. A measurement that exceeds the prediction by more than both errors explain replaces it:
    the training has changed.

    Args:
        own: the measurement.
        past: the prediction; None where there is none.
    """
    if past is None or not math.isfinite(own.high) or own.error == 0 or past.error == 0:
        return own
    if own.mean - past.mean > _SURPRISE * math.hypot(own.error_of(past.mean), past.error):
        return own
    mean = past.mean
    for _ in range(2):  # the error of a measurement follows what both together come to
        own = own.expecting(mean)
        precision, before = own.error**-2, past.error**-2
        mean = (max(own.mean, 0.0) * precision + past.mean * before) / (precision + before)
    return replace(own, mean=mean, error=(precision + before) ** -0.5)


def _mean(values: Losses) -> float:
    return sum(values) / len(values)


_DRIFT = 0.3  # of the rise, from one save to the next: checkpoints differ, not only measurements of them
_OCTAVE = 0.5  # of the rise, for each octave between two scales: the square is no law far from where it was measured


@dataclass(frozen=True)
class History:
    """The pooled rise of all measurements so far, as it would be at one scale.

    A scalar Kalman filter with a random-walk model: from one save to the next its variance grows by a share of the rise
    (`aged`); a measurement is averaged in by its precision (`shrinkpoint.quality.measurement.pooled`).
    """

    scale: float
    mean: float
    error: float
    """Standard error of the mean."""

    @classmethod
    def of(cls, scale: float, rise: Rise, before: "History | None" = None) -> "History | None":
        """Return the estimate after a pooled measurement; `before` where the measurement carries no information."""
        if rise.batches == 0 or not (math.isfinite(rise.mean) and math.isfinite(rise.error)):
            return before
        return cls(scale, max(0.0, rise.mean), rise.error)

    def aged(self) -> "History":
        """Return the estimate one save later: the same mean, a larger error."""
        return replace(self, error=math.hypot(self.error, _DRIFT * self.mean))

    def predicted(self, scale: float) -> Rise:
        """Return the rise predicted at a scale."""
        ratio = scale / self.scale
        error = math.hypot(self.error, _OCTAVE * abs(math.log2(ratio)) * self.mean)
        return Rise(self.mean * ratio**2, error * ratio**2)

    def to_json(self) -> list[float]:
        """Return it in JSON primitives."""
        return [self.scale, self.mean, self.error]

    @classmethod
    def from_json(cls, value: Any) -> "History | None":
        """Return the history that `to_json` wrote; None for None.

        Raises:
            ConfigError: it is neither.
        """
        if value is None:
            return None
        right = isinstance(value, list) and len(value) == 3
        right = right and all(isinstance(item, float) and 0 <= item < math.inf for item in value)
        if not right or value[0] == 0:
            raise ConfigError(f"the measurements {value!r} of a search are malformed: start a new search")
        return cls(*value)
