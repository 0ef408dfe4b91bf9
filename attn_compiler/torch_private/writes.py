"""Private PyTorch API that detects if a tensor's memory was exposed for writing, in any way, since it was watched.

A copy-on-write storage loses that mark at the first access that may write. That is an op in place, a write through `.data` or a view of it,
a collective, a receive, the storage's own methods, numpy, DLPack, an address as a number. Reads by PyTorch's own ops leave the mark. A
storage that shares its memory with none loses it without a copy: only the mark changes.

Code that takes the address to read, as Inductor's and Triton's do, removes the mark, too: the caller of such code watches the tensor again.
Two threads must not remove it at once, which PyTorch does not guard against. So it is removed before such code runs, while Python's own
lock is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: devices whose memory is watched. Not tried on a GPU.
_WATCHED = frozenset({"cpu"})


def is_watchable(tensor: torch.Tensor) -> bool:
    """Return True if memory of its device is watched at all."""
    return tensor.device.type in _WATCHED


def watch(tensor: torch.Tensor) -> bool:
    """Watch the memory of a tensor; False if that is impossible, such as for memory that PyTorch did not allocate."""
    if not is_watchable(tensor):
        return False
    _prepare()
    try:
        # The clone is freed at once, so a write makes no copy.
        if torch._C._len_torch_dispatch_stack():
            with torch._C._DisableTorchDispatch():
                torch._lazy_clone(tensor)
        else:
            torch._lazy_clone(tensor)
    except RuntimeError:
        return False
    return is_unwritten(tensor)


def watch_again(tensor: torch.Tensor) -> None:
    """Watch the memory of a tensor that was watched before."""
    if torch._C._len_torch_dispatch_stack():
        watch(tensor)
    else:
        torch._lazy_clone(tensor)


def unwatch(tensor: torch.Tensor) -> None:
    """Stop watching the memory of a tensor."""
    if is_unwritten(tensor):
        tensor.data_ptr()


#: True if the memory of a tensor is watched, and was not exposed for writing since
is_unwritten: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]

#: the address of a tensor, without access to its memory
address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]


def around_backward(outs: object, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these before and after each backward of compiled code. outs: the outputs of its forward."""
    given: Iterable[object] = outs if isinstance(outs, (tuple, list)) else (outs,)
    nodes = {x.grad_fn for x in given if isinstance(x, torch.Tensor) and x.grad_fn is not None}
    for node in nodes:
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(lambda grads: before())
            node.register_hook(lambda grads, given: after())


@functools.cache
def _prepare() -> torch.library.Library:
    """Stop watching before ops of PyTorch that ignore the mark. Return the registration, which has to be kept.

    `record_stream` recognises the CUDA allocator's memory by its deleter, which differs while memory is watched. A storage that grows gets
    other memory, and from PyTorch 2.13 on its mark stays, and fails at the first write.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    every = {"record_stream": torch.ops.aten.record_stream.default, "resize_": torch.ops.aten.resize_.default}
    for name, op in every.items():
        library.impl(name, functools.partial(_unwatched, op), "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    torch.UntypedStorage.resize_ = _resized  # type: ignore[method-assign, assignment]
    return library


_KEY = torch._C.DispatchKey.BackendSelect


def _unwatched(op: Any, keys: torch._C.DispatchKeySet, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    unwatch(tensor)
    return op.redispatch(keys.remove(_KEY), tensor, *args, **kwargs)


_resize = torch.UntypedStorage.resize_


def _resized(storage: torch.UntypedStorage, size: int) -> Any:
    if storage.device.type in _WATCHED and not torch._C._len_torch_dispatch_stack():
        storage.data_ptr()
    return _resize(storage, size)
