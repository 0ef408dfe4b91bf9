"""The steps of a rewriting in their order (steps.py), what carries them out (running.py), and what the backend calls (rewriting.py)."""
