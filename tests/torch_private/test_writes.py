"""Reads and writes that a graph does not show."""

from __future__ import annotations

import copy
import ctypes
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.utils._python_dispatch import TorchDispatchMode

from attn_compiler.torch_private import substitution, writes as torch_writes
from attn_compiler.torch_private.substitution import OutsideRead

# Memory that is watched.
S = 6
OTHER = torch.eye(S)

Use = Callable[[Tensor], object]


@pytest.fixture
def watched() -> Tensor:
    tensor = torch.ones(S, S).tril()
    assert torch_writes.watch(tensor)
    return tensor


def _in_thread(x: Tensor) -> None:
    thread = threading.Thread(target=lambda: x.data.copy_(OTHER))
    thread.start()
    thread.join()


def _uncounted(x: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.copy_(OTHER)


def _in_inference(x: Tensor) -> None:
    with torch.inference_mode():
        x.data.copy_(OTHER)


WRITES: dict[str, Use] = {
    "op in place": lambda x: x.copy_(OTHER),
    "data": lambda x: x.data.copy_(OTHER),
    "data, some": lambda x: x.data[:, 1:3].zero_(),
    "data of a view": lambda x: x.mT.data.diagonal().fill_(7),
    "data, parts": lambda x: x.data.split(3, -1)[1].zero_(),
    "data, out": lambda x: torch.add(OTHER, 1, out=x.data),
    "data, several": lambda x: torch._foreach_copy_([x.data], [OTHER]),
    "data, ATen's op": lambda x: torch.ops.aten.copy_.default(x.data, OTHER),
    "data, random": lambda x: x.data.normal_(),
    "data, bytes": lambda x: x.data.view(torch.int32).zero_(),
    "data, in a thread": _in_thread,
    "data, in inference mode": _in_inference,
    "view by strides": lambda x: x.as_strided((S * S,), (1,)).zero_(),
    "data by strides": lambda x: x.data.as_strided((S,), (S + 1,)).zero_(),
    "no count": _uncounted,
    "storage": lambda x: x.untyped_storage().fill_(0),
    "storage, a byte": lambda x: x.untyped_storage().__setitem__(3, 9),
    "storage, copied to": lambda x: x.untyped_storage().copy_(OTHER.untyped_storage()),
    "another tensor of the storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (S, S), (S, 1)).zero_(),
    "numpy": lambda x: x.numpy().fill(3),
    "numpy's own way": lambda x: np.asarray(x).fill(3),
    "numpy by DLPack": lambda x: np.from_dlpack(x).shape,
    "DLPack": lambda x: torch.from_dlpack(x).zero_(),
    "an address": lambda x: ctypes.memset(x.data_ptr(), 0, 8),
    "an address of the storage": lambda x: ctypes.memset(x.untyped_storage().data_ptr(), 0, 8),
    "shared with processes": lambda x: x.share_memory_().data.zero_(),
    "other data": lambda x: setattr(x, "data", OTHER.clone()),
    "another storage": lambda x: x.set_(OTHER.clone()),
    "bigger": lambda x: x.resize_(3 * S, 3 * S).fill_(1),
    "bigger, as another": lambda x: x.resize_as_(torch.ones(3 * S, 3 * S)).fill_(1),
    "data, bigger": lambda x: x.data.resize_(3 * S, 3 * S).fill_(1),
    "storage, freed and back": lambda x: [x.untyped_storage().resize_(n) for n in (0, 4 * S * S)] and x.fill_(1),
    "storage, bigger": lambda x: x.untyped_storage().resize_(9 * S * S) and x.fill_(1),
}

READS: dict[str, Use] = {
    "sum": lambda x: x.sum(),
    "number": lambda x: x[0, 0].item(),
    "list": lambda x: x.tolist(),
    "words": repr,
    "copy": lambda x: x.clone(),
    "deep copy": copy.deepcopy,
    "cast": lambda x: x.bool(),
    "view, read": lambda x: x.mT[:, 1:].contiguous(),
    "expanded": lambda x: x.expand(2, S, S).clone(),
    "compared": lambda x: torch.equal(x, OTHER),
    "where": lambda x: torch.where(x > 0, 0.0, x),
    "gathered": lambda x: x.gather(0, torch.zeros(S, S, dtype=torch.long)),
    "joined": lambda x: torch.cat([x, x]),
    "multiplied": lambda x: x @ x,
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen_and_does_what_it_does(watched: Tensor, name: str) -> None:
    own = watched.clone()
    assert torch_writes.is_unwritten(watched)
    WRITES[name](watched)
    WRITES[name](own)
    assert not torch_writes.is_unwritten(watched)
    if name not in ("bigger", "bigger, as another", "data, random"):
        torch.testing.assert_close(watched, own)


@pytest.mark.parametrize("name", READS)
def test_a_read_is_no_write(watched: Tensor, name: str) -> None:
    READS[name](watched)
    assert torch_writes.is_unwritten(watched)


def test_nothing_is_copied_where_memory_is_watched_and_written(watched: Tensor) -> None:
    at = torch_writes.address(watched)
    watched.data.zero_()
    assert watched.data_ptr() == at
    assert torch_writes.watch(watched)
    assert torch_writes.address(watched) == at


def test_what_looks_at_a_tensor_sees_a_clone_of_it_written_alone(watched: Tensor) -> None:
    """One whom the memory is shared with by copy on write has a copy of its own."""
    clone = torch._lazy_clone(watched)
    clone.zero_()
    assert not clone.any()
    assert watched.any()


def test_pickled_and_read_again_it_is_the_same(watched: Tensor) -> None:
    torch.testing.assert_close(pickle.loads(pickle.dumps(watched)), torch.ones(S, S).tril())


def test_memory_that_pytorch_did_not_allocate_is_not_watched() -> None:
    for tensor in (torch.from_numpy(np.ones((S, S))), torch.frombuffer(bytearray(8), dtype=torch.uint8)):
        assert not torch_writes.watch(tensor)
        assert not torch_writes.is_unwritten(tensor)
    assert not torch_writes.watch(torch.ones(2, device="meta"))


def test_no_mode_sees_that_memory_is_watched() -> None:
    seen: list[object] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            seen.append(func)
            return None

    tensor = torch.ones(S)
    with Look():
        assert torch_writes.watch(tensor)
    assert seen == []


def test_memory_that_a_stream_is_recorded_for_is_not_watched_any_more(watched: Tensor) -> None:
    """CUDA's allocator would not take it for its own. On a CPU there is nothing to record."""
    with pytest.raises(NotImplementedError, match="record_stream"):
        watched.record_stream(torch.Stream(device="cpu"))
    assert not torch_writes.is_unwritten(watched)


def test_calls_around_a_backward_come_around_that_of_compiled_code_alone() -> None:
    said: list[str] = []
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: (x.sin(), x.shape[0]), backend="aot_eager")

    def watch_around(outs: object) -> None:
        torch_writes.around_backward(outs, lambda: said.append("before"), lambda: said.append("after"))

    outs = compiled(x)
    watch_around(outs)
    watch_around(x.cos())
    outs[0].sum().backward(retain_graph=True)
    assert said == ["before", "after"]
    outs[0].sum().backward()
    assert said == ["before", "after"] * 2


# What a compiled frame rests on in modules.
NAME = "module_of_outside_reads"


@pytest.fixture
def module() -> Iterator[Any]:
    made: Any = types.ModuleType(NAME)
    made.number, made.pair, made.function, made.nothing = 1.0, (1, "a"), lambda *, x=1: x, None
    made.inner = types.SimpleNamespace(number=2)
    sys.modules[NAME] = made
    torch._dynamo.reset()
    yield made
    del sys.modules[NAME]


OUTSIDE_READS_READS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "number": (("number",), None),
    "pair": (("pair",), None),
    "function": (("function",), None),
    "code": (("function", "__code__"), None),
    "default": (("function", "__kwdefaults__"), "x"),
    "nothing": (("nothing",), None),
    "further in": (("inner", "number"), None),
}

#: changes, and whether what was read is another one then
CHANGES: dict[str, tuple[tuple[str, Callable[[Any], None], bool], ...]] = {
    "number": (
        ("equal", lambda m: setattr(m, "number", float("1")), False),
        ("another", lambda m: setattr(m, "number", 2.0), True),
        ("another type", lambda m: setattr(m, "number", 1), True),
    ),
    "pair": (("another", lambda m: setattr(m, "pair", (1, "b")), True),),
    "function": (("alike", lambda m: setattr(m, "function", lambda *, x=1: x), True),),
    "code": (("another", lambda m: setattr(m.function, "__code__", (lambda *, x: 2).__code__), True),),
    "default": (
        ("another", lambda m: m.function.__kwdefaults__.update(x=2), True),
        ("another's", lambda m: m.function.__kwdefaults__.update(y=2), False),
        ("none", lambda m: m.function.__kwdefaults__.clear(), True),
    ),
    "nothing": (("something", lambda m: setattr(m, "nothing", 0), True),),
    "further in": (
        ("another", lambda m: setattr(m.inner, "number", 3), True),
        ("gone", lambda m: delattr(m, "inner"), True),
    ),
}


@pytest.mark.parametrize(
    ("name", "change", "is_another"),
    [(name, change, is_another) for name, changes in CHANGES.items() for _, change, is_another in changes],
)
def test_a_frame_is_compiled_anew_where_something_is_another_one(
    module: Any, name: str, change: Callable[[Any], None], is_another: bool
) -> None:
    names, key = OUTSIDE_READS_READS[name]
    value: Any = module
    for one in names:
        value = getattr(value, one)
    read = OutsideRead(module=NAME, names=names, key=key, value=value if key is None else value[key])
    graphs: list[int] = []

    def note(context: ComptimeContext) -> None:
        substitution.guard(context, [read] if read.holds() else [])

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(1)
        return gm.forward

    def run(x: torch.Tensor) -> torch.Tensor:
        comptime(note)
        return x + 1

    compiled = torch.compile(run, backend=backend)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert (len(graphs), read.holds()) == (1, True)
    change(module)
    compiled(torch.ones(2))
    assert (len(graphs) > 1, not read.holds()) == (is_another, is_another)
