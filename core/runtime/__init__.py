"""Runtime services: compiled kernels, the background thread, signals, progress output."""
