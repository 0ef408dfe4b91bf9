"""cuDNN's attention graphs.

Importing the package defines the leaf ops that go into graphs.
"""

from attn_compiler.lowerings.cudnn import ops as ops
