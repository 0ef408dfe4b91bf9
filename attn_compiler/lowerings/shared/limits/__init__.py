"""Limits of kernels and libraries, as reasons; and the sites that a family takes, as data (takes.py)."""
