"""Ops that passes write into graphs besides a family's leaf ops."""
