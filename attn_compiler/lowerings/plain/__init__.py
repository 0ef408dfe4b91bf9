"""Attention in plain PyTorch ops.

Importing the package defines the reference's leaf op.
"""

from attn_compiler.lowerings.plain import ops as ops
