"""Makes the package `baselines` of the benchmarks one that is installed, as far as Python can tell: its schemes are found."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks" / "baselines"))

from baselines import BASELINES
from baselines.gobo import GoboOptions
from baselines.partial import TopN
from baselines.qd_compressor import Uniform, UniformOptions

__all__ = ["BASELINES", "GoboOptions", "TopN", "Uniform", "UniformOptions"]
