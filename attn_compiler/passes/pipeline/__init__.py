"""The steps of a rewriting in their order (steps.py), their execution (running.py), and the backend's entry point (rewriting.py)."""
