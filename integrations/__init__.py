"""Integrations with training frameworks: everything framework-specific except the callbacks themselves."""
