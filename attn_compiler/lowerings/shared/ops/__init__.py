"""Leaf ops: their registration, their schemas, and the op that lists tiles."""
