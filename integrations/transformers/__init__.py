"""Hugging Face Transformers."""
