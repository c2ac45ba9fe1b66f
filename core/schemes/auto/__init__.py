"""The default scheme: weights on a dithered trellis, moments by what they do to the next updates."""
