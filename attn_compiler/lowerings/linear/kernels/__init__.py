"""Triton kernels of linear attention. They import triton, so they are imported late."""
