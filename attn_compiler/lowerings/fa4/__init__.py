"""FlashAttention-4.

Importing the package defines the leaf ops that go into graphs.
"""

from attn_compiler.lowerings.fa4 import ops as ops
