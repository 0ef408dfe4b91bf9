"""Leaf ops: what is registered for one, what they are given, and the op that lists tiles."""
