"""What a compiled frame rests on in modules: it is compiled anew where any of that is another one, and only there."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.comptime import ComptimeContext, comptime

from attn_compiler.torch_private import outside_reads
from attn_compiler.torch_private.outside_reads import OutsideRead

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


READS: dict[str, tuple[tuple[str, ...], str | None]] = {
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
    names, key = READS[name]
    value: Any = module
    for one in names:
        value = getattr(value, one)
    read = OutsideRead(module=NAME, names=names, key=key, value=value if key is None else value[key])
    graphs: list[int] = []

    def note(context: ComptimeContext) -> None:
        outside_reads.guard(context, [read] if read.holds() else [])

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
