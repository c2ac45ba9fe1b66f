"""Measures how much a restore raises the loss, and chooses scheme and settings so that it stays within the bound."""
