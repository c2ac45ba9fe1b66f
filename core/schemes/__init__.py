"""Schemes: each assigns a codec, with its settings, to every tensor of a training state."""
