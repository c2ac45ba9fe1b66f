"""The run store: immutable containers, and manifests whose appearance commits a checkpoint."""

from shrinkpoint.store.catalog import DamagedCheckpoint
from shrinkpoint.store.gc import GcReport
from shrinkpoint.store.manifest import BlobRef, Manifest
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter

__all__ = ["BlobRef", "DamagedCheckpoint", "GcReport", "Manifest", "RetryPolicy", "RunStore", "RunWriter"]
