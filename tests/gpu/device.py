"""On which device the tests of this folder run."""

import os

import torch

__all__ = ["DEVICE", "ON_GPU", "WANTED"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: products are repeatable

WANTED = torch.cuda.is_available() or "SHRINKPOINT_GPU_TESTS" in os.environ
"""Whether to run them at all: where there is a GPU, or where the device is given."""
DEVICE: str = os.environ.get("SHRINKPOINT_GPU_TESTS", "cuda")
"""``cuda``; ``SHRINKPOINT_GPU_TESTS=cpu`` runs the same tests without one, which shows whether they are sound themselves."""
ON_GPU = DEVICE == "cuda"
