"""Classifies optimizer state (first moment, second moment, average) and compares updates from true and restored
state."""
