"""Frozen data that says what an attention is, and on which machine. Imports neither FX nor CUDA."""
