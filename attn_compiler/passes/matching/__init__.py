"""Matching of graph nodes to attention, and reports of nodes that only look like attention."""
