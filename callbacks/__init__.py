"""One thin callback per framework; import the framework's own module, for example ``shrinkpoint.callbacks.lightning``."""
