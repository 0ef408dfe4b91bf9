"""Frozen data of an attention and of a machine. Imports neither FX nor CUDA."""
