"""What the processes that run programs have to know before torch is imported there, as environment variables.

On the CPU no process may see a GPU: Dynamo asks CUDA for its current device wherever there is one, which a fork of a process that used CUDA
can't do, and a lowering could be chosen that only a GPU has. Without a GPU Triton's kernels run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def variables(device: str) -> dict[str, str]:
    """What is set for programs on that device."""
    # What a planted fault changes is in no key of a rewrite.
    mine = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ATTN_COMPILER_CACHE_REWRITES": "0"}
    if device == "cpu":
        mine |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return mine


@contextlib.contextmanager
def prepared(device: str) -> Iterator[None]:
    """Processes that are started inside have the variables; this one gets its own back."""
    mine = variables(device)
    before = {name: os.environ.get(name) for name in mine}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
