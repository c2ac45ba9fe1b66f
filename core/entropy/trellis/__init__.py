"""The context coder of planes that are quantized on a trellis."""
