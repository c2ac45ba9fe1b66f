"""Storage for ``torch.distributed.checkpoint``: `StorageWriter` and `StorageReader`, for those who call its ``save`` and ``load``."""

from shrinkpoint.dcp.reader import StorageReader
from shrinkpoint.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
