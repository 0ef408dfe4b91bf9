"""Private PyTorch API that tells whether a tensor's memory was handed out for writing, by whatever way, since it was watched.

A storage that PyTorch copies when it is written (copy on write) loses that mark at the first access that may write: an op in place, a write
through `.data` or a view of it, a collective, a receive, the storage's own methods, numpy, DLPack, an address as a number. Reads by
PyTorch's own ops leave the mark. A storage that shares its memory with none loses it without a copy: the mark is all that changes.

Code that takes the address to read, as Inductor's and Triton's do, takes the mark away, too: who runs such code watches the tensor again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

#: devices whose memory is watched: on others it is not known what a mark does
_WATCHED = frozenset({"cpu", "cuda"})


def watch(tensor: torch.Tensor) -> bool:
    """Watch the memory of a tensor from now on; False if that can't be done, such as for memory that PyTorch did not allocate."""
    if tensor.device.type not in _WATCHED:
        return False
    if tensor.is_cuda:
        _keep_streams_recorded()
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


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is watched, and nobody could write to it since."""
    return bool(torch._C._is_cow_tensor(tensor))  # type: ignore[attr-defined]


def address(tensor: torch.Tensor) -> int:
    """Where a tensor begins, without access to what is there."""
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]


def around_backward(outs: object, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have these called around each backward of compiled code. outs: what its forward gave."""
    given: Iterable[object] = outs if isinstance(outs, (tuple, list)) else (outs,)
    nodes = {x.grad_fn for x in given if isinstance(x, torch.Tensor) and x.grad_fn is not None}
    for node in nodes:
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(lambda grads: before())
            node.register_hook(lambda grads, given: after())


@functools.cache
def _keep_streams_recorded() -> torch.library.Library:
    """`record_stream` looks whether memory is the CUDA allocator's own by what frees it, which is another function while it is watched. So
    the memory is no longer watched once a stream is recorded for it. Gives what keeps this so."""
    op = torch.ops.aten.record_stream.default
    key = torch._C.DispatchKey.BackendSelect

    def unwatched(keys: torch._C.DispatchKeySet, tensor: torch.Tensor, stream: torch.Stream) -> None:
        if is_unwritten(tensor):
            tensor.untyped_storage().data_ptr()
        op.redispatch(keys.remove(key), tensor, stream)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("record_stream", unwatched, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    return library
