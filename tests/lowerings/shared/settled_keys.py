"""Keys of kernels that are asked for in one order and in the other: python -m tests.lowerings.shared.settled_keys

In a process of its own, since kernels that Triton's interpreter runs, which the other tests use, have no keys.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from triton.runtime.jit import JITCallable

from attn_compiler.lowerings.decode.kernels.decode import attention_decode
from attn_compiler.lowerings.hopper.kernels.backward_sm90 import attention_backward_sm90
from attn_compiler.lowerings.hopper.kernels.forward_sm90 import attention_forward_sm90
from attn_compiler.lowerings.shared.kernels.backward import attention_grad_q
from attn_compiler.lowerings.shared.kernels.forward import attention_again, attention_forward
from attn_compiler.lowerings.shared.kernels.kv_backward import attention_grad_kv
from attn_compiler.lowerings.shared.launching import cache_keys

KERNELS: tuple[Any, ...] = (
    attention_forward_sm90,
    attention_again,
    attention_backward_sm90,
    attention_grad_q,
    attention_grad_kv,
    attention_forward,
    attention_decode,
)


def _forget() -> None:
    """As in a new process."""
    for one in gc.get_objects():
        if issubclass(type(one), JITCallable):
            one.hash, one.used_global_vals = None, {}


def _keys(kernels: Any, *, settled: bool) -> dict[str, str]:
    _forget()
    found = {}
    for kernel in kernels:
        if settled:
            cache_keys.settle(kernel)
        found[kernel.fn.__name__] = kernel.cache_key
    return found


def main() -> None:
    orders = KERNELS, KERNELS[::-1]
    json.dump(
        [{"settled": settled, "keys": [_keys(o, settled=settled) for o in orders]} for settled in (True, False)],
        sys.stdout,
    )


if __name__ == "__main__":
    main()
