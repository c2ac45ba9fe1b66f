import dataclasses
import inspect
import pickle
from dataclasses import replace

import pytest

import shrinkpoint
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.catalogue import (
    AutoOptions,
    ExcpOptions,
    InshrinkeratorOptions,
    ItmoOptions,
    LCCheckpointOptions,
)
from shrinkpoint.steps.options import StepLog

NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("scheme", "zip", "'auto' or 'inshrinkerator'"),
        ("scheme", None, "'lossless'"),
        ("busy", "drop", "'skip' or 'wait'"),
        ("mode", "lowest", "'min' or 'max'"),
        ("key_every", 0, "positive"),
        ("key_every", None, "positive"),
        ("key_every", 2.0, "positive"),
        ("key_every", True, "positive"),
        ("key_every", 513, "512 at most"),
        ("guards", 1, "True or False"),
        ("guards", None, "True or False"),
        ("keep_last", 0, "positive"),
        ("keep_every", "10", "positive"),
        ("save_top_k", -2, "or -1 for all"),
        ("save_total_limit", 0, "positive"),
        ("threads", 0, "positive"),
        ("monitor", 5, "name of a metric"),
        ("max_degradation", -0.1, "0 or more"),
        ("max_degradation", 1.5, "1 at most"),
        ("max_degradation", NAN, "number"),
        ("max_degradation", "1%", "number"),
        ("max_degradation", None, "number"),
        ("search_overhead", -1, "0 or more"),
        ("grace_s", NAN, "0 or more"),
        ("grace_s", True, "number"),
        ("options", {"alpha": 0.01}, "AutoOptions"),
        ("options", InshrinkeratorOptions(), "'auto' takes AutoOptions"),
        ("restore_budget", 0, "positive"),
        ("keep_optimizer", -1, "0 or more"),
        ("adopt", 0.5, "number of planned saves"),
        ("adopt", -2, "number of planned saves"),
        ("probe_steps", -1, "0 or more"),
        ("probe_steps", 2.5, "number of steps"),
    ],
)
def test_a_bad_value_is_named_with_its_fix(field, value, fix):
    with pytest.raises(ConfigError) as caught:
        SaverConfig(**{field: value})
    message = str(caught.value)
    assert field in message
    assert repr(value) in message
    assert fix in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("coder", "huffman", "'rle-huffman'"),
        ("min_elements", 0, "from 1 to"),
        ("min_elements", 10.5, "an integer"),
    ],
)
def test_a_bad_option_of_the_scheme_is_named_with_its_fix(field, value, fix):
    with pytest.raises(ConfigError) as caught:
        InshrinkeratorOptions(**{field: value})
    message = str(caught.value)
    assert field in message
    assert repr(value) in message
    assert fix in message


@pytest.mark.parametrize("advanced", [0, "", SaverConfig(keep_last=2), {1: 2}])
def test_what_is_no_advanced_is_refused(advanced):
    with pytest.raises(ConfigError, match=r"must be shrinkpoint.Advanced|no option '1'"):
        SaverConfig.of(advanced)


def test_several_best_need_their_metric():
    with pytest.raises(ConfigError, match=r"save_top_k=2 ranks by a metric"):
        SaverConfig(save_top_k=2)
    assert SaverConfig(save_top_k=2, monitor="val_loss").save_top_k == 2


def test_the_limits_of_each_field_are_allowed():
    SaverConfig(max_degradation=0, search_overhead=float("inf"), grace_s=0, key_every=512)
    SaverConfig(max_degradation=1, threads=3, keep_last=1, keep_every=1)
    InshrinkeratorOptions(min_elements=1)


def test_a_scheme_is_given_by_its_name_by_its_options_or_by_a_mapping():
    wide = ExcpOptions(alpha=1e-4)
    for scheme in (wide, {"name": "excp", "alpha": 1e-4}):
        config = SaverConfig(scheme=scheme)
        assert (config.scheme, config.scheme_options) == ("excp", wide)
        assert dataclasses.replace(config, key_every=2).scheme_options == wide
    assert SaverConfig(scheme="excp").scheme_options == ExcpOptions()
    assert SaverConfig(scheme={"name": "lossless"}).scheme == "lossless"
    with pytest.raises(ConfigError, match=r"lacks the scheme's name: add it"):
        SaverConfig(scheme={"alpha": 1})
    with pytest.raises(ConfigError, match=r"ExcpOptions has no option 'alfa' \(did you mean alpha\?\)"):
        SaverConfig(scheme={"name": "excp", "alfa": 1})


@pytest.mark.parametrize(("key_every", "period"), [(1, 1), (2, 4), (8, 16), (512, 1024)])
def test_bases_come_every_twice_key_every_where_chains_have_one_level(key_every, period):
    assert SaverConfig(key_every=key_every).period == period


def test_threads_default_to_half_of_the_processors(monkeypatch):
    for processors, expected in ((1, 1), (2, 1), (9, 4)):
        monkeypatch.setattr("shrinkpoint.config.processors", lambda processors=processors: processors)
        assert SaverConfig().encoder_threads == expected
    assert SaverConfig(threads=7).encoder_threads == 7


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SaverConfig().scheme = "lossless"


def test_the_top_level_names_are_there():
    assert set(dir(shrinkpoint)) == set(shrinkpoint.__all__)
    for name in shrinkpoint.__all__:
        assert getattr(shrinkpoint, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        shrinkpoint.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "typed", "wanted"),
    [
        (SaverConfig, "schem", "scheme"),
        (StepLog, "segment_step", "segment_steps"),
        (AutoOptions, "min_element", "min_elements"),
        (ExcpOptions, "alfa", "alpha"),
        (InshrinkeratorOptions, "min_element", "min_elements"),
        (ItmoOptions, "alfa", "alpha"),
        (LCCheckpointOptions, "bit", "bits"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest(kind, typed, wanted):
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__} has no option '{typed}' \(did you mean {wanted}\?\)"
    ):
        kind(**{typed: 1})
    assert wanted in inspect.signature(kind).parameters
    assert replace(kind()) == pickle.loads(pickle.dumps(kind())) == kind()
