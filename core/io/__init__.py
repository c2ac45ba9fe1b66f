"""Reading and writing checkpoints outside of a training: weights, one file, safetensors."""
