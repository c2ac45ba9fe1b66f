"""The library's version, as files and manifests name it."""

__version__ = "0.1.0"
