"""Checkpoints of PyTorch training runs, 20-100 times smaller, saved without stopping training."""

__version__ = "0.1.0"
