"""Private PyTorch API that tells whether a tensor's memory was handed out for writing, by whatever way, since it was watched.

A storage that PyTorch copies when it is written (copy on write) loses that mark at the first access that may write. That is an op in place,
a write through `.data` or a view of it, a collective, a receive, the storage's own methods, numpy, DLPack, an address as a number. Reads by
PyTorch's own ops leave the mark. A storage that shares its memory with none loses it without a copy: the mark is all that changes.

Code that takes the address to read, as Inductor's and Triton's do, takes the mark away, too: who runs such code watches the tensor again.
Two threads must not take it away at once, which PyTorch does not guard against. So it goes before such code runs, while Python's own lock
is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: devices whose memory is watched. No GPU has run code beside a mark.
_WATCHED = frozenset({"cpu"})


def is_watchable(tensor: torch.Tensor) -> bool:
    """Whether memory of its device is watched at all."""
    return tensor.device.type in _WATCHED


def watch(tensor: torch.Tensor) -> bool:
    """Watch the memory of a tensor from now on; False if that can't be done, such as for memory that PyTorch did not allocate."""
    if not is_watchable(tensor):
        return False
    _prepare()
    try:
        # The clone is gone at once, and with it the only one that a write would make a copy for.
        if torch._C._len_torch_dispatch_stack():
            with torch._C._DisableTorchDispatch():
                torch._lazy_clone(tensor)
        else:
            torch._lazy_clone(tensor)
    except RuntimeError:
        return False
    return is_unwritten(tensor)


def watch_again(tensor: torch.Tensor) -> None:
    """Watch the memory of a tensor that could be watched before."""
    if torch._C._len_torch_dispatch_stack():
        watch(tensor)
    else:
        torch._lazy_clone(tensor)


def unwatch(tensor: torch.Tensor) -> None:
    """Watch the memory of a tensor no longer."""
    if is_unwritten(tensor):
        tensor.data_ptr()


#: whether the memory of a tensor is watched, and nobody could write to it since
is_unwritten: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]

#: where a tensor begins, without access to what is there
address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]


def around_backward(outs: object, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have these called around each backward of compiled code. outs: what its forward gave."""
    given: Iterable[object] = outs if isinstance(outs, (tuple, list)) else (outs,)
    nodes = {x.grad_fn for x in given if isinstance(x, torch.Tensor) and x.grad_fn is not None}
    for node in nodes:
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(lambda grads: before())
            node.register_hook(lambda grads, given: after())


@functools.cache
def _prepare() -> torch.library.Library:
    """What PyTorch does to memory without a look at the mark ends the watch first. Gives what keeps this so.

    `record_stream` asks whether memory is the CUDA allocator's own by what frees it, which is another function while it is watched. A
    storage that grows gets other memory, and from PyTorch 2.13 on its mark stays, and fails at the first write.
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
