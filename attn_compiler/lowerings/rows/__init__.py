"""Attention on a CPU, batch row by batch row: PyTorch's flash kernel on the keys that a row may use.

Importing the package defines the leaf op.
"""

from attn_compiler.lowerings.rows import ops as ops
