"""Calls of a leaf op on tensors: by our kernels, by a library, or by definition."""
