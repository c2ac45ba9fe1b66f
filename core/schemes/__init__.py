"""Named recipes that turn a training state into coded tensors, and back."""
