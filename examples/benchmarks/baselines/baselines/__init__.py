"""Schemes that the tables compare with, as another package brings its own: see README.md beside this file."""

from baselines.check_n_run import Adaptive, AdaptiveOptions, CheckNRunWeightCodec
from baselines.delta_dnn import DeltaDnn, DeltaDnnCodec, DeltaDnnOptions
from baselines.gobo import Gobo, GoboCodec, GoboOptions
from baselines.partial import PartialCodec, PartialOptions, Scar, ScarOptions, TopN
from baselines.qd_compressor import Uniform, UniformCodec, UniformOptions
from shrinkpoint.schemes.catalogue import SchemeEntry

UNIFORM = SchemeEntry(lambda options, _: Uniform(options=options), UniformOptions, (UniformCodec,))
ADAPTIVE = SchemeEntry(lambda options, _: Adaptive(options=options), AdaptiveOptions, (CheckNRunWeightCodec,))
GOBO = SchemeEntry(lambda options, _: Gobo(options=options), GoboOptions, (GoboCodec,))
DELTA_DNN = SchemeEntry(lambda options, _: DeltaDnn(options=options), DeltaDnnOptions, (DeltaDnnCodec,))
TOPN = SchemeEntry(
    lambda options, save: TopN(options=options, reference=save.reference), PartialOptions, (PartialCodec,)
)
SCAR = SchemeEntry(
    lambda options, save: Scar(options=options, reference=save.reference), ScarOptions, (PartialCodec,)
)

BASELINES = ("uniform", "adaptive", "gobo", "delta-dnn", "topn", "scar")
"""The names under which they are found: the entry points in shrinkpoint_baselines-0.dist-info."""
