"""Shared by the integrations of all frameworks."""
