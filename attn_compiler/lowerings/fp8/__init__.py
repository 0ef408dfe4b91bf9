"""Attention in FP8: Triton, Hopper (Gluon), cuDNN and the reference."""
