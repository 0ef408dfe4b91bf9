"""Our Gluon kernels for Hopper.

Importing the package defines the leaf ops that go into graphs.
"""

from attn_compiler.lowerings.hopper import ops as ops
