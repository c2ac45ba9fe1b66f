"""A model for the bench's short trainings."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["Autoencoder"]


class Autoencoder(nn.Module):
    """One hidden layer that is wider than its input, so that the loss falls as long as it is trained.

    Args:
        width: of the points.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def loss(self, points: Tensor) -> Tensor:
        """Mean squared error of the points."""
        restored: Tensor = self.layers(points)
        return (restored - points).square().mean()
