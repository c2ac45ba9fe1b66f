"""Losses that are made up, for tests that need an evaluation and not its result."""

from collections.abc import Mapping

import torch


def nearly_flat(weights: Mapping[str, torch.Tensor]) -> float:
    """A loss that sees the weights, and that no error in them raises by anything worth mentioning."""
    squares = [float(torch.nan_to_num(value.double()).square().sum()) for value in weights.values()]
    return 1.0 + 1e-9 * sum(squares)
