"""What `torch.compile(backend="attn_compiler")` loads by the entry point: importing this module registers the backend, once a process.

Dynamo asks whether a name is registered, loads its entry point if it is not, and registers what that gave. Threads that compile for the
first time at once all come to the last step, and all but the first fail there: "duplicate name". So the import does it, which the import
system lets one thread alone run, and the entry point gives None. `register_backend` takes that for its use as a decorator, and
registers nothing. A torch that is newer than what was tried may lack what the backend needs: Inductor takes its place then.
"""

from __future__ import annotations

from torch._dynamo.backends import registry

try:
    from attn_compiler.compiling.backend import attn_compiler
except (ImportError, AttributeError) as error:
    from attn_compiler.compiling import without_us

    attn_compiler = without_us.or_raise(error)

NAME = "attn_compiler"
#: what the entry point gives
NOTHING_MORE = None

# An installation of before this module has an entry point that gives the backend itself.
if NAME not in registry._COMPILER_FNS:
    registry.register_backend(attn_compiler, name=NAME)
