"""Makes the golden chains of the baselines' codecs that there are not, as tests/golden/make_each.py those of this library's.

PYTHONPATH=tests python tests/examples/baselines/make_golden.py
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE.parents[1] / "golden"),
    str(HERE.parents[2] / "examples" / "benchmarks" / "baselines"),
]

from baselines.check_n_run import AdaptiveOptions, CheckNRunWeightCodec
from baselines.delta_dnn import DeltaDnnCodec, DeltaDnnOptions
from baselines.gobo import GoboCodec, GoboOptions
from baselines.partial import PartialCodec
from baselines.qd_compressor import UniformCodec, UniformOptions
from make_each import Variant, make, weight

CASES: Mapping[str, Mapping[str, Variant]] = {
    "qd-compressor-weight": {
        "cyclic": weight(lambda *_: UniformCodec()),
        "rans": weight(lambda *_: UniformCodec(options=UniformOptions(bits=4, coder="rans"))),
        "narrower": weight(
            lambda step, _: UniformCodec(options=UniformOptions(bits=6 - step)), dtype=torch.bfloat16
        ),
    },
    "check-n-run-weight": {
        "packed": weight(lambda *_: CheckNRunWeightCodec()),
        "rans": weight(lambda *_: CheckNRunWeightCodec(options=AdaptiveOptions(bits=2, coder="rans"))),
        "half": weight(
            lambda *_: CheckNRunWeightCodec(options=AdaptiveOptions(bits=8)), dtype=torch.bfloat16
        ),
    },
    "gobo-weight": {
        "packed": weight(lambda *_: GoboCodec(options=GoboOptions(threshold=-1.0))),
        "rans": weight(
            lambda *_: GoboCodec(options=GoboOptions(bits=2, standardized=True, coder="rans")),
            dtype=torch.bfloat16,
        ),
    },
    "delta-dnn-weight": {
        "lzma": weight(lambda *_: DeltaDnnCodec()),
        "numbers": weight(
            lambda step, _: DeltaDnnCodec(options=DeltaDnnOptions(error_bound=1e-6, coder="numbers"))
        ),
        "half": weight(
            lambda *_: DeltaDnnCodec(options=DeltaDnnOptions(error_bound=1e-5)), dtype=torch.bfloat16
        ),
    },
    "partial-weight": {
        "elements": weight(lambda *_: PartialCodec()),
        "rows": weight(lambda *_: PartialCodec(rows=True, fraction=0.25)),
        "half": weight(lambda *_: PartialCodec(fraction=0.5), dtype=torch.float16),
    },
}

if __name__ == "__main__":
    make(CASES, HERE / "golden")
