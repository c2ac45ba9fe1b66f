"""Lossless coders: integer symbols or raw tensor bytes to bytes, and back."""
