"""Inshrinkerator's dynamic search over configurations, spread over the saves of a run."""
