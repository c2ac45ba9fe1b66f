"""The search for the scale: what it chooses holds at the upper end, and luck neither widens nor narrows it for long."""

import itertools
import math
import random

import pytest

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.budget import RestoreBudget
from shrinkpoint.quality.ladder import ScaleLadder
from shrinkpoint.quality.measurement import EXACT, Rise, absolute_error, measured_rise
from shrinkpoint.quality.plan import Refusal
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.state.training import TrainingState

WIDEST = 1.0
NOTHING = TrainingState(None, {}, {})
BASE, DELTA = SaveContext(state=NOTHING), SaveContext(state=NOTHING, reference={})


class Measured:
    """Stands for the comparison of one save; rises are made up."""

    def __init__(self, measure):
        self.measure = measure

    def rise(self, scale, make):
        return self.measure(scale)


class Search:
    """A ladder, and what it chooses at each save."""

    def __init__(self, *, whole=False, **options):
        self.ladder, self.comparison = ScaleLadder(AutoOptions(**options), whole=whole), None

    def choose(self, measure, allowed, *, base, again=False):
        if not again:
            self.comparison = Measured(measure)
        return self.ladder.measured(BASE if base else DELTA, self.comparison, allowed)

    def narrower(self):
        return self.ladder.milder(BASE, self.comparison, 1e-3, Refusal("too much", False, frozenset()))


class Model:
    """A harm that goes with the square of the scale, measured in pairs on some batches."""

    def __init__(self, slope, allowed=1e-3, batches=2):
        self.slope, self.absolute, self.batches, self.asked = slope, absolute_error(allowed), batches, []

    def __call__(self, scale):
        self.asked.append(scale)
        losses = [2.0 * (1 + self.harm(scale))] * self.batches
        return measured_rise([2.0] * self.batches, losses, losses, absolute=self.absolute)

    def harm(self, scale):
        return self.slope * scale**2


class Noisy(Model):
    """Batches with luck of their own, larger than the harm and of the first order, and with harms that differ."""

    def __init__(self, slope, seed, luck=3.0, spread=0.7, **more):
        super().__init__(slope, **more)
        self.rng, self.luck, self.spread = random.Random(seed), luck, spread

    def __call__(self, scale):
        self.asked.append(scale)
        plus, minus = [], []
        for _ in range(self.batches):
            harm = self.harm(scale) * (1 + self.spread * self.rng.gauss(0, 1))
            luck = self.luck * math.sqrt(self.harm(scale) * 1e-3) * self.rng.gauss(0, 1)
            plus.append(2.0 * (1 + harm + luck))
            minus.append(2.0 * (1 + harm - luck))
        return measured_rise([2.0] * self.batches, plus, minus, absolute=self.absolute)


@pytest.mark.parametrize("slope", [1e-5, 1e-3, 2e-2, 0.3])
@pytest.mark.parametrize("allowed", [1e-4, 1e-3, 1e-2])
def test_what_is_chosen_holds_and_is_found_in_few_measurements(slope, allowed):
    search, model = Search(), Model(slope, allowed)
    for save in range(12):
        before = len(model.asked)
        choice = search.choose(model, allowed, base=save % 4 == 0)
        assert choice.rise.high <= allowed
        assert choice.rise.mean == pytest.approx(slope * choice.scale**2)
        assert len(model.asked) - before <= (5 if save == 0 else 3)
    assert choice.scale == WIDEST or choice.rise.mean > allowed / 4
    assert len(model.asked) < 12 + 10


def test_the_mildest_steps_that_still_break_the_bound_are_not_taken():
    choice = Search().choose(Model(100.0), 1e-3, base=True)
    assert choice.is_exact
    assert choice.rise == EXACT
    assert "stored exactly" in choice.reason


def test_a_loss_that_only_the_restored_weights_make_infinite():
    def measure(scale):
        return Rise(math.inf) if scale > 0.1 else Model(0.0)(scale)

    choice = Search().choose(measure, 0.01, base=True)
    assert not choice.is_exact
    assert choice.scale <= 0.1


def test_each_base_widens_by_an_octave_at_most_where_nothing_is_significant():
    search, scales = Search(), []
    flat = measured_rise([2.0, 2.0], [2.0, 2.0], [2.0, 2.0])
    for save in range(12):
        scales.append(search.choose(lambda scale: flat, 1e-3, base=save % 4 == 0).scale)
    assert len(set(scales[:4])) == len(set(scales[4:8])) == len(set(scales[8:])) == 1  # never within a chain
    assert scales[4] <= 2 * scales[0]
    assert scales[8] <= 2 * scales[4]


def test_a_long_chain_that_began_too_narrow_widens_by_an_octave_in_four_saves():
    scales = {}
    for whole in (False, True):
        search = Search(whole=whole)
        first = search.choose(Model(1e-3, 3e-6), 3e-6, base=True).scale
        within_noise = Model(1e-5, 1e-3)
        rest = [search.choose(within_noise, 3e-4, base=False).scale for _ in range(12)]
        scales[whole] = [round(math.log2(scale / first), 2) for scale in rest]
        assert all(within_noise(scale).high <= 3e-4 for scale in rest)
    assert len(set(scales[False])) == 1
    assert scales[True][0] == scales[False][0]
    steps = [later - earlier for earlier, later in itertools.pairwise(scales[True])]
    assert scales[True][-1] == scales[False][-1] + 1  # as far as the allowed rise can be told from zero
    assert all(sum(steps[index : index + 4]) <= 1 for index in range(len(steps)))


def test_within_a_chain_one_better_measurement_widens_nothing_and_a_worse_one_narrows():
    search = Search()
    first = search.choose(Model(1e-2), 1e-3, base=True).scale
    assert search.choose(Model(2e-3), 1e-3, base=False).scale == first
    assert search.choose(Model(1e-1), 1e-3, base=False).scale < first


def test_what_one_unlucky_measurement_has_narrowed_widens_again_in_the_same_chain():
    search, usual = Search(), Model(1e-3)
    before = search.choose(usual, 1e-3, base=True).scale
    narrowed = search.choose(Model(3e-2), 1e-3, base=False).scale
    assert narrowed < before / 3
    scales = [search.choose(usual, 1e-3, base=False).scale for _ in range(8)]
    assert scales[0] == narrowed  # one measurement alone is not believed
    assert scales[-1] >= before / 2
    steps = [wide / narrow for narrow, wide in itertools.pairwise(scales) if wide != narrow]
    assert steps
    assert min(steps) >= 2


def test_a_fixed_scale_is_the_only_one_considered():
    model = Model(1e-2)
    assert Search(weight_scale=0.7).choose(model, 1e-3, base=True).is_exact
    assert set(model.asked) == {0.7}
    assert Search(weight_scale=0.7).choose(model, 2e-2, base=True).scale == 0.7


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 1, "rung": 0, "history": None},
        {"version": 2, "rung": 99, "history": None},
        {"version": 2, "rung": 0.0, "history": None},
        {"version": 2, "rung": 0, "history": [1.0, math.nan, 0.0]},
        {"version": 2, "rung": 0, "history": [0.0, 1.0, 0.0]},
        {"version": 2, "rung": 0, "history": [1.0]},
    ],
)
def test_another_state_is_refused(state):
    with pytest.raises(ConfigError, match="start a new search"):
        ScaleLadder(AutoOptions()).load_state_dict(state)


def test_a_bound_out_of_reach_costs_one_measurement_a_save():
    search, steep, mild = Search(), Model(100.0), Model(1e-3)
    search.choose(steep, 1e-3, base=True)
    for _ in range(5):
        steep.asked.clear()
        assert search.choose(steep, 1e-3, base=False).is_exact
        assert len(steep.asked) == 1
    assert search.choose(mild, 1e-3, base=False).scale > 0.1


def chain(seed, batches):
    """Three chains of eight saves; how far each scale is from the widest that would hold, in octaves, and its harm."""
    rng = random.Random(seed)
    model = Noisy(10 ** rng.uniform(-3.5, 0), seed, batches=batches, spread=0.7 if batches > 1 else 0.5)
    search, best = Search(), math.sqrt(1e-3 / model.slope)
    chosen = []
    for save in range(24):
        choice = search.choose(model, 1e-3, base=save % 8 == 0)
        if not choice.is_exact:
            chosen.append((math.log2(choice.scale / min(best, WIDEST)), model.harm(choice.scale)))
        else:
            chosen.append((-10.0, 0.0))
    return chosen


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_luck_makes_the_search_neither_timid_nor_bold(batches):
    """Luck three times as large as the harm; each batch's harm varies by 70 %, and that of two as one number by 50 %."""
    runs = [chain(seed, batches) for seed in range(200)]
    settled = [octaves for run in runs for octaves, _ in run[8:]]
    assert sum(-1.01 <= octaves <= 0.5 for octaves in settled) >= 0.9 * len(settled)


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_ten_restores_keep_the_bound_in_truth(batches):
    kept = 0
    for seed in range(200):
        rng = random.Random(seed)
        model, search = Noisy(10 ** rng.uniform(-3.5, 0), seed, batches=batches), Search()
        budget, truth = RestoreBudget(0.01, 10), 0.0
        for save in range(10):
            choice = search.choose(model, budget.share, base=save % 8 == 0)
            if not choice.is_exact:
                truth += model.harm(choice.scale)
                budget.restored(choice.rise.mean, choice.rise.high)
        assert budget.spent_high <= 0.01 + 1e-9
        kept += truth <= 0.01
    assert kept >= 0.95 * 200
