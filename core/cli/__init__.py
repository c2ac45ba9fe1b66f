"""The ``shrinkpoint`` command line."""
