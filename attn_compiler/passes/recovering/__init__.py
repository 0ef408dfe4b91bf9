"""Meaning of masks and score changes, and the spec that follows from it."""
