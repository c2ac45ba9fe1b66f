"""The tests import the package `baselines` of the benchmarks."""

import support.baseline_schemes  # noqa: F401
