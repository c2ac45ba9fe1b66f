"""What runs beside the training: compiled loops, background threads, signals, progress."""
