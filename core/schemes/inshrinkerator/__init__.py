"""Inshrinkerator (arXiv 2306.11800): sensitivity, partition, clustering, delta coding."""
