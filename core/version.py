"""The library's version, as files and manifests name it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
