"""Several object stores as one, of which some may be lost: shards with parity, and records on a majority (docs/stores.md)."""

from shrinkpoint.store.striped.calls import Patience
from shrinkpoint.store.striped.objects import StripedObjects

__all__ = ["Patience", "StripedObjects"]
