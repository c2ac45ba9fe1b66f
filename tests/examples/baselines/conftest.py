"""The tests import the package `baselines` of the benchmarks."""

import support.baselines  # noqa: F401
