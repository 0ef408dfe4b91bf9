"""Our Triton kernels for few queries and a long cache.

Importing the package defines the leaf ops that go into graphs.
"""

from attn_compiler.lowerings.decode import ops as ops
