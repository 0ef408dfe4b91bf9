"""Triton kernels, one family a file. They import triton, which is not needed to import attn_compiler itself."""
