"""Registration of the backend, once a process: the entry point of `torch.compile(backend="attn_compiler")` imports this module.

Dynamo asks whether a name is registered, loads its entry point if it is not, and registers the loaded object. Threads that compile for the
first time at once all come to the last step, and all but the first fail there: "duplicate name". So the import registers the backend, since
the import system runs it in one thread alone, and the entry point gives None. `register_backend` takes None for its use as a decorator, and
registers nothing. A torch newer than the tried ones may lack something that the backend needs: Inductor takes its place then.
"""

from __future__ import annotations

from torch._dynamo.backends import registry

try:
    from attn_compiler.compiling.backend import attn_compiler
except (ImportError, AttributeError) as error:
    from attn_compiler.compiling import without_us

    attn_compiler = without_us.or_raise(error)

NAME = "attn_compiler"
#: the object of the entry point
NOTHING_MORE = None

# The entry point of an older installation gives the backend itself.
if NAME not in registry._COMPILER_FNS:
    registry.register_backend(attn_compiler, name=NAME)
