"""The run store: immutable containers, and manifests whose appearance commits a checkpoint."""
