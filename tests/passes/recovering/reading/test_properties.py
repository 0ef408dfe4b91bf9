"""Random small programs: what is read for their result is evaluated at every index against the result itself.

A program is lines of source text over a few inputs; lines that eager PyTorch does not accept are left out. Every value broadcasts
to (QUERIES, KEYS), so that any two of them meet. Bools and whole numbers must be equal, and so must floats that claim to be exact.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, fx
from torch._dynamo.exc import TorchRuntimeError

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.recovering import reading
from attn_compiler.passes.recovering.reading import Unreadable
from tests.passes.compiling import mirror_of
from tests.passes.mirror_values import MirrorValues

QUERIES, KEYS = 3, 4
NAN = float("nan")

#: by name: (QUERIES, 1), (1, KEYS) or both; dtypes of all sorts, and values that overflow or round in the smaller ones
INPUTS: dict[str, Tensor] = {
    "mask": torch.tensor([[1, 0, 2, -1]]),
    "flag": torch.tensor([[True], [False], [True]]),
    "byte": torch.tensor([[250], [3], [0]], dtype=torch.uint8),
    "short": torch.tensor([[120, -128, 1, 7]], dtype=torch.int8),
    "large": torch.tensor([[2**24 + 1], [2**24], [-3]]),
    "real": torch.tensor([[0.5, NAN, -0.1, 1.0], [0.1, 2.5, -3.5, 0.0], [1e30, 257.0, math.inf, -1.0]]),
    "half": torch.tensor([[0.1], [1000.0], [-2.0]], dtype=torch.bfloat16),
}
TABLE = torch.tensor([0.5, -1.5, 2.5, 3.5, 0.1])

DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
LOWEST = "-3.4028234663852886e38"
NUMBERS = st.sampled_from(["0", "1", "-1", "2", "3", "-3", "7", "300", "0.5", "0.1", "-2.5", "1e9", "True", LOWEST])

#: with {x}, {y}, {z}: earlier values; {n}: a number; {d}: a dtype; {i}: a small whole number
SOURCES = [
    *INPUTS,
    "torch.arange({q})[:, None]",
    "torch.arange({k})[None, :]",
    "torch.arange({i}, {k} + {i})[None, :]",
    "torch.arange(0, 2 * KEYS, 2)[None, :]",
    "torch.arange({q}, dtype=torch.int32)[:, None]",
    "torch.arange({k}, dtype=torch.{d})[None, :]",
    "torch.full(({q}, {k}), {n})",
    "torch.full((1, {k}), {n}, dtype=torch.{d})",
    "torch.ones({q}, {k}, dtype=torch.{d})",
    "torch.zeros({q}, 1, dtype=torch.{d})",
]
STEPS = [
    *(f"{{x}} {op} {{y}}" for op in ("<=", "<", ">=", ">", "==", "!=", "+", "-", "*", "&", "|", "^")),
    *(f"{{x}} {op} {{n}}" for op in ("<=", "<", ">=", ">", "==", "!=", "+", "-", "*", "//", "%")),
    "{n} - {x}",
    "{n} * {x}",
    "~{x}",
    "-{x}",
    "{x}.abs()",
    "{x}.logical_not()",
    "torch.logical_and({x}, {y})",
    "torch.logical_or({x}, {y})",
    "torch.logical_xor({x}, {y})",
    "torch.minimum({x}, {y})",
    "torch.maximum({x}, {y})",
    "{x}.clamp({i}, 3)",
    "{x}.clamp(min=0)",
    "torch.div({x}, {i}, rounding_mode='floor')",
    "torch.remainder({x}, {i})",
    "torch.where({x}.bool(), {y}, {z})",
    "torch.where({x}.bool(), {y}, {n})",
    "torch.where({x}.bool(), {n}, {n})",
    f"torch.where({{x}}.bool(), 0.0, {LOWEST})",
    "{x}.masked_fill({y}.bool(), {n})",
    "{x}.expand({q}, {k}).masked_fill({y}.bool(), {n})",
    "{x}.to(torch.{d})",
    "{x}.bool()",
    "{x}.float()",
    "{x}.long()",
    "{x}.type_as({y})",
    "{x}.expand({q}, {k})",
    "{x}.expand({q}, {k}).transpose(0, 1).contiguous().mT",
    "{x}.expand({k}, {q}).permute(1, 0)",
    "{x}.unsqueeze(0).squeeze(0)",
    "{x}[None].expand(2, {q}, {k})[1]",
    "{x}.expand({q}, {k})[1:2]",
    "{x}.expand({q}, {k})[:, 2:3]",
    "{x}.expand({q}, {k})[..., ::3][:, :1]",
    "{x}.expand({q}, {k}).select(1, 1)[:, None]",
    "{x}.expand({q}, {k}).reshape({q}, 1, {k}).view({q}, {k})",
    "torch.tril({x}.expand({q}, {k}), diagonal={i} - 2)",
    "torch.triu({x}.expand({q}, {k}), diagonal={i} - 1)",
    "torch.cumsum({x}.expand({q}, {k}), -1)",
    "{x}.expand({q}, {k}).cumsum(0)",
    "torch.diff({x}.expand({q}, {k}), prepend={x}.expand({q}, {k})[:, :1] - 1, dim=-1)",
    "torch.diff({x}.expand({q}, {k}), dim=0)[:1]",
    "TABLE[{x}.clamp(0, 4)]",
    "F.embedding({x}.clamp(0, 4), TABLE[:, None])[..., 0]",
    "{x}.expand({q}, {k})[torch.arange({q}) // 2]",
    "torch.zeros_like({x}.float()).masked_fill({y}.bool(), {n})",
    "torch.full_like({x}, {n})",
]
#: whole tensors and parts of them, in place and through views
WRITES = [
    "{x}.logical_not_()",
    "{x}.neg_()",
    "{x}.add_({n})",
    "{x}.add_({y})",
    "{x}.mul_({y})",
    "{x}.fill_({n})",
    "{x}.copy_({y})",
    "{x}.logical_or_({y})",
    "{x}.masked_fill_({y}.bool(), {n})",
    "{x}[:, 1:].logical_not_()[:, :1]",
    "{x}[:1].add_({n})",
    "{x}[:, {i} : {i} + 1].copy_({y}[:, :1])",
    "{x}[..., ::2].mul_(-1)[..., :1]",
    "{x}.mT.logical_not_().mT",
]
VIEWS = [
    "{x}[:, :]",
    "{x}.mT.mT",
    "{x}.unsqueeze(0)[0]",
    "{x}.detach()",
    "{x}[:, 1:2]",
    "{x}[1:2]",
    "{x} * 1",
    "{x}.clone()",
]
NAMES = {"torch": torch, "F": F, "TABLE": TABLE, "KEYS": KEYS}


@dataclass(frozen=True)
class Program:
    """lines: "v3 = ..."; the last value is the result. used: the inputs that it takes."""

    lines: tuple[str, ...]
    used: tuple[str, ...]

    @property
    def source(self) -> str:
        # Another result of an input, so that there is something to trace whatever the program is.
        body = "\n    ".join([*self.lines, f"return v{len(self.lines) - 1}.clone(), real.sin()"])
        return f"def program({', '.join(self.used)}):\n    {body}\n"

    def function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        names: dict[str, Any] = dict(NAMES)
        # Under a file's name, without which torch 2.11 does not trace it.
        exec(compile(self.source, __file__, "exec"), names)
        return names["program"]  # type: ignore[no-any-return]


@st.composite
def programs(draw: st.DrawFn, dynamic: bool, steps: Sequence[str] = STEPS) -> Program:
    lines: list[str] = []
    values: dict[str, Any] = {**NAMES, **_copied(INPUTS)}
    for step in range(draw(st.integers(2, 8))):
        template = draw(st.sampled_from(SOURCES if step == 0 or draw(st.integers(0, 2)) == 0 else steps))
        earlier = [f"v{i}" for i in range(len(lines))] or ["mask"]
        # Later values are more likely: the last one is the result.
        pick = st.sampled_from([*earlier, *earlier[-2:], *earlier[-1:] * 2])
        text = template
        for place in ("{x}", "{y}", "{z}"):
            text = text.replace(place, draw(pick)) if place in text else text
        while "{n}" in text:
            text = text.replace("{n}", draw(NUMBERS), 1)
        while "{i}" in text:
            text = text.replace("{i}", str(draw(st.integers(0, 3))), 1)
        text = text.replace("{d}", draw(st.sampled_from(DTYPES))) if "{d}" in text else text
        sizes = ("real.size(0)", "real.size(1)") if dynamic else (str(QUERIES), str(KEYS))
        text = text.replace("{q}", sizes[0]).replace("{k}", sizes[1])
        if _is_accepted(text, values):
            values[f"v{len(lines)}"] = eval(text, values)
            lines.append(f"v{len(lines)} = {text}")
    if not lines:
        lines.append("v0 = mask + 0")
    used = tuple(name for name in INPUTS if name == "real" or any(name in line for line in lines))
    return Program(lines=tuple(lines), used=used)


def _is_accepted(text: str, values: dict[str, Any]) -> bool:
    """Whether eager PyTorch takes the line, and its result still broadcasts with all others."""
    values = copy.deepcopy({name: x for name, x in values.items() if isinstance(x, Tensor)}) | NAMES
    try:
        found = eval(text, dict(values))
    except (RuntimeError, TypeError, IndexError, NotImplementedError, OverflowError, ZeroDivisionError):
        return False
    whole = not text.endswith(".long()") or _has_whole_numbers(eval(text.removesuffix(".long()"), dict(values)))
    return whole and found.dim() == 2 and found.size(0) in (1, QUERIES) and found.size(1) in (1, KEYS)


def _has_whole_numbers(x: Tensor) -> bool:
    """Whether every element has a whole part that int64 can hold: what a NaN, an infinity or 1e30 becomes is the machine's choice."""
    return not x.is_floating_point() or bool((x.isfinite() & (x.abs() < 2.0**62)).all())


# ---- evaluating -----------------------------------------------------------------------------------------------------


def _run(mirror: Mirror, given: Mapping[str, Tensor]) -> tuple[dict[fx.Node, Any], dict[str, int]]:
    """Every node's value, and every symbol's."""
    sizes: dict[str, int] = {}
    arguments: dict[fx.Node, Any] = {}
    placeholders = [n for n in mirror.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            dynamo = mirror.dynamo_node(node)
            name = (dynamo if dynamo is not None else node).name.removeprefix("l_").removesuffix("_")
            arguments[node] = given.get(name, TABLE).clone()
            known = zip(value.shape, arguments[node].shape, strict=True)
            sizes |= {str(axes.size_expr(s)): n for s, n in known}
    interpreter = MirrorValues(mirror)
    interpreter.run(*(arguments.get(n, sizes.get(str(n.meta.get("val")))) for n in placeholders))
    return interpreter, {name: n for name, n in sizes.items() if not name.isdigit()}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Programs write to their inputs."""
    return {name: x.clone() for name, x in tensors.items()}


def _check(program: Program, dynamic: bool) -> None:
    given = {name: INPUTS[name] for name in program.used}
    try:
        mirror = mirror_of(program.function(), *_copied(given).values(), dynamic=dynamic)
    except TorchRuntimeError:
        # Fake tensors are stricter than real ones about some dtypes.
        return
    (node, _) = next(n for n in mirror.graph.nodes if n.op == "output").args[0]
    reader = reading.of(mirror)
    try:
        x = reader.read(node, (Index("q"), Index("k")))
    except Unreadable:
        return
    run, sizes = _run(mirror, given)
    wanted = run.of_node[node]

    def load(name: str, at: tuple[int, ...]) -> Any:
        return run.held(reader.tensors[name])[at].item()

    for q, k in itertools.product(*map(range, wanted.shape)):
        found = ix.evaluate(x, {"q": q, "k": k} | sizes, load)
        # Read where the axis has one element is read at 0.
        _assert_same(found, wanted[q, k].item(), wanted.dtype, x, program)


def _assert_same(found: Any, wanted: Any, dtype: torch.dtype, x: ix.Expr, program: Program) -> None:
    said = f"{ix.text(x)} is {found}, not {wanted}, in\n{program.source}"
    if dtype.is_floating_point and not ix.is_exact(x):
        return
    assert found == wanted or (found != found and wanted != wanted), said


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_what_is_read_is_what_is_computed(dynamic: bool, data: st.DataObject) -> None:
    _check(data.draw(programs(dynamic)), dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_what_is_read_of_tensors_that_are_written_is_what_they_hold_then(dynamic: bool, data: st.DataObject) -> None:
    _check(data.draw(programs(dynamic, [*STEPS, *(WRITES + VIEWS) * 4])), dynamic)
