"""Rounding of q, k and v to FP8, and the gradient of attention on rounded tensors, for the lowerings of all families."""

#: Bytes: the vectors that kernels load, along a head dim and, of v, along the sequence.
VECTOR = 16
