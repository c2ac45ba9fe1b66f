"""What every baseline owes, whatever its options: chains that are restored as encoded, errors for damaged bytes and wrong options."""

from typing import Any

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

COMMON = {"min_elements": st.just(1), "moments": st.sampled_from(["exact", "levels"])}
PARTIAL = {"fraction": st.sampled_from([0.0, 0.1, 0.5, 1.0]), "scope": st.sampled_from(["global", "tensor"])}
OPTIONS: dict[Any, Any] = {
    Adaptive: st.builds(
        AdaptiveOptions,
        bits=st.sampled_from([1, 2, 4, 8]),
        num_bins=st.sampled_from([None, 1, 10]),
        ratio=st.sampled_from([0.0, 0.5, 1.0]),
        coder=st.sampled_from(["packed", "rans"]),
        **COMMON,
    ),
    DeltaDnn: st.builds(
        DeltaDnnOptions,
        error_bound=st.sampled_from([1e-7, 1e-3, 0.1]),
        relative=st.booleans(),
        coder=st.sampled_from(["lzma", "numbers"]),
        **COMMON,
    ),
    Gobo: st.builds(
        GoboOptions,
        bits=st.integers(1, 7),
        threshold=st.sampled_from([-1.0, -4.0, -100.0]),
        standardized=st.booleans(),
        coder=st.sampled_from(["packed", "rans"]),
        **COMMON,
    ),
    TopN: st.builds(PartialOptions, **PARTIAL, **COMMON),
    Scar: st.builds(ScarOptions, **PARTIAL, **COMMON),
    Uniform: st.builds(
        UniformOptions,
        bits=st.sampled_from([None, 1, 3, 8]),
        max_bits=st.integers(1, 8),
        coder=st.sampled_from(["cyclic", "rans"]),
        **COMMON,
    ),
}


@pytest.mark.parametrize("scheme", OPTIONS)
@settings(max_examples=80)
@given(data=st.data())
def test_chains_are_restored_as_encoded(scheme: Any, data: st.DataObject) -> None:
    states, chosen = data.draw(walks()), data.draw(OPTIONS[scheme])
    changes = iter([*data.draw(st.lists(OPTIONS[scheme], min_size=3, max_size=3))] * 2)

    def make(reference: Any) -> Any:
        if scheme is Uniform:
            return scheme(options=next(changes))  # though the width changes
        more = {"reference": reference} if scheme in (TopN, Scar) else {}
        return scheme(options=chosen, **more)

    restored = check_chain(states, make)
    if scheme is TopN and chosen.fraction == 1:
        for state, there in zip(states, restored, strict=True):
            pair = there.tensors["a/w"], state.tensors["a/w"]
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)  # 0.0 is not replaced by -0.0


CODECS = [
    *(CheckNRunWeightCodec(options=AdaptiveOptions(bits=3, coder=coder)) for coder in ("packed", "rans")),
    *(
        DeltaDnnCodec(options=DeltaDnnOptions(coder=coder, error_bound=bound))
        for coder in ("lzma", "numbers")
        for bound in (1e-1, 1e-4, 1e-6)
    ),
    *(GoboCodec(options=GoboOptions(coder=coder, threshold=-2.0)) for coder in ("packed", "rans")),
    *(PartialCodec(rows=rows, fraction=0.3) for rows in (True, False)),
    *(UniformCodec(options=UniformOptions(bits=4, coder=coder)) for coder in ("cyclic", "rans")),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_malformed_bytes_are_refused(codec: Any) -> None:
    before, after = torch.randn(2, 10, 10, generator=torch.Generator().manual_seed(0))
    if isinstance(codec, CheckNRunWeightCodec):
        after[:5] = before[:5]
    check_malformed(codec, before, after)
    if isinstance(codec, PartialCodec):
        check_malformed(codec, before.half(), after.half())


WRONG: dict[Any, list[dict[str, Any]]] = {
    AdaptiveOptions: [{"bits": 0}, {"num_bins": 0}, {"ratio": 2}, {"coder": "lzma"}],
    DeltaDnnOptions: [{"error_bound": 0}, {"relative": 1}, {"coder": "zstd"}],
    GoboOptions: [{"bits": 8}, {"threshold": 1}, {"standardized": 1}, {"coder": "lzma"}],
    ScarOptions: [{"fraction": 1.5}, {"scope": "layer"}],
    UniformOptions: [{"bits": 0}, {"max_bits": 9}, {"coder": "lzma"}, {"min_elements": True}],
}


@pytest.mark.parametrize(("kind", "wrong"), [(kind, wrong) for kind in WRONG for wrong in WRONG[kind]])
def test_options_are_checked(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)
