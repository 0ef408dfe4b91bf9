"""Our Triton kernels.

Importing the package defines the leaf ops that go into graphs.
"""

from attn_compiler.lowerings.triton import ops as ops
