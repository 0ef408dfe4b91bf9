"""Compilation, launch and replay of a kernel, whatever it computes."""
