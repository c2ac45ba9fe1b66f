"""What holds of every baseline: chains are restored as they were encoded, malformed bytes and options are refused."""

import pytest
import torch
from baselines.check_n_run import Adaptive, AdaptiveOptions, CheckNRunWeightCodec
from baselines.delta_dnn import DeltaDnn, DeltaDnnCodec, DeltaDnnOptions
from baselines.gobo import Gobo, GoboCodec, GoboOptions
from baselines.partial import PartialCodec, PartialOptions, Scar, ScarOptions, TopN
from baselines.qd_compressor import Uniform, UniformCodec, UniformOptions
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import check_chain, check_malformed, walks

from shrinkpoint.errors import ConfigError

PACKED, LZMA, CYCLIC = (
    st.sampled_from(names) for names in (["packed", "rans"], ["lzma", "numbers"], ["cyclic", "rans"])
)
PARTS = {"fraction": st.sampled_from([0.0, 0.1, 0.5, 1.0]), "scope": st.sampled_from(["global", "tensor"])}
OPTIONS = {
    Adaptive: (
        AdaptiveOptions,
        {
            "bits": st.sampled_from([1, 2, 4, 8]),
            "num_bins": st.sampled_from([None, 1, 10]),
            "ratio": st.sampled_from([0.0, 0.5, 1.0]),
            "coder": PACKED,
        },
    ),
    DeltaDnn: (
        DeltaDnnOptions,
        {"error_bound": st.sampled_from([1e-7, 1e-3, 0.1]), "relative": st.booleans(), "coder": LZMA},
    ),
    Gobo: (
        GoboOptions,
        {
            "bits": st.integers(1, 7),
            "threshold": st.sampled_from([-1.0, -4.0, -100.0]),
            "standardized": st.booleans(),
            "coder": PACKED,
        },
    ),
    Uniform: (
        UniformOptions,
        {"bits": st.sampled_from([None, 1, 3, 8]), "max_bits": st.integers(1, 8), "coder": CYCLIC},
    ),
    TopN: (PartialOptions, PARTS),
    Scar: (ScarOptions, PARTS),
}


@pytest.mark.parametrize("scheme", OPTIONS)
@settings(max_examples=80)
@given(walks(), st.data())
def test_chains_are_restored_as_encoded(scheme, states, data):
    kind, fields = OPTIONS[scheme]
    moments = st.sampled_from(["exact", "levels"])
    some = st.builds(kind, min_elements=st.just(1), moments=moments, **fields)
    # the width of levels may change on the way
    chosen = iter(
        data.draw(st.lists(some, min_size=6, max_size=6)) if scheme is Uniform else [data.draw(some)] * 6
    )
    partial = issubclass(scheme, TopN)
    last = []

    def make(reference):
        last[:] = [next(chosen)]
        return scheme(options=last[0], **({"reference": reference} if partial else {}))

    restored = check_chain(states, make)
    if scheme is TopN and last[0].fraction == 1:
        for state, there in zip(states, restored, strict=True):
            pair = there.tensors["a/w"], state.tensors["a/w"]
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)  # 0.0 is not replaced by -0.0


BEFORE, AFTER = torch.randn(2, 10, 10, generator=torch.Generator().manual_seed(0))
FIRST_ROWS = torch.cat([BEFORE[:5], AFTER[5:]])
CODECS = {
    **{
        f"check-n-run, {c}": (CheckNRunWeightCodec(options=AdaptiveOptions(bits=3, coder=c)), FIRST_ROWS)
        for c in ("packed", "rans")
    },
    **{
        f"delta-dnn, {c}, {bound}": (
            DeltaDnnCodec(options=DeltaDnnOptions(coder=c, error_bound=bound)),
            AFTER,
        )
        for c in ("lzma", "numbers")
        for bound in (1e-1, 1e-4, 1e-6)
    },
    **{
        f"gobo, {c}": (GoboCodec(options=GoboOptions(coder=c, threshold=-2.0)), AFTER)
        for c in ("packed", "rans")
    },
    **{
        f"qd-compressor, {c}": (UniformCodec(options=UniformOptions(bits=4, coder=c)), AFTER)
        for c in ("cyclic", "rans")
    },
    **{f"partial, rows {rows}": (PartialCodec(rows=rows, fraction=0.3), AFTER) for rows in (True, False)},
}


@pytest.mark.parametrize("name", CODECS)
def test_malformed_bytes_are_refused(name):
    codec, after = CODECS[name]
    check_malformed(codec, BEFORE, after)
    if isinstance(codec, PartialCodec):
        check_malformed(codec, BEFORE.half(), after.half())


WRONG = (
    *((AdaptiveOptions, one) for one in ({"bits": 0}, {"num_bins": 0}, {"ratio": 2}, {"coder": "lzma"})),
    *((DeltaDnnOptions, one) for one in ({"error_bound": 0}, {"relative": 1}, {"coder": "zstd"})),
    *((GoboOptions, one) for one in ({"bits": 8}, {"threshold": 1}, {"standardized": 1}, {"coder": "lzma"})),
    *((ScarOptions, one) for one in ({"fraction": 1.5}, {"scope": "layer"})),
    *(
        (UniformOptions, one)
        for one in ({"bits": 0}, {"max_bits": 9}, {"coder": "lzma"}, {"min_elements": True})
    ),
)


@pytest.mark.parametrize(("kind", "wrong"), WRONG)
def test_options_are_checked(kind, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)
