"""A random program as data: the source text of a function, its inputs, and what the caller does between forward and backward.

In the text, `D` is the dtype of the program and `W` the wider one that it casts up to. The exact run has float64 for both. Dtypes that
a mask is computed in are written out, so that the exact run has the same mask. A comment `# probe: x, y` gives away the largest
and the smallest score of each row, which only the eager run looks at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz import linear_functions

Size = int | str
_PROBE = re.compile(r"# probe: ((\w+).*)$", re.MULTILINE)

#: dtype -> the one that a program casts up to
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, kw_only=True)
class Input:
    """One argument. shape: of the base tensor, each size a number or names of sizes joined by `*`.

    kind: "normal", "large" (scores of hundreds), "small" (near zero), "positive" (0-d), "kept" (bool, True for the first of each
    free axis), "split" (bool, both truth values in each row of the last two axes), "padding" (whole numbers 0 and 1, the first is 1),
    "filled" (whole numbers, 1 up to some place in each row and 0 behind it; of a size "fill" the places are others), "ids" (whole numbers
    0 to 2), "alike" (the same, and rows begin as others), "length" (1 to 3).
    layout: text of a view that the caller makes of the base, in which `{}` stands for it.
    """

    name: str
    shape: tuple[Size, ...]
    kind: str = "normal"
    grad: bool = False
    layout: str = "{}"

    def base(self, seed: int, dtype: torch.dtype, sizes: dict[str, int], device: str) -> torch.Tensor:
        shape = [length(size, sizes) for size in self.shape]
        generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, self.name)))
        if self.kind in ("normal", "large", "small", "positive"):
            # Drawn in float32 and rounded once, so that every dtype gets the same numbers.
            value = torch.randn(shape, generator=generator)
            value = {"large": value * 6, "small": value * 0.05, "positive": value.abs() * 0.2 + 0.1}.get(
                self.kind, value
            )
            return value.to(dtype).to(device)
        value = torch.randint(0, 3, shape, generator=generator)
        if self.kind == "kept":
            return _first_true(value > 0).to(device)
        if self.kind == "split":
            return _both_values(value > 0).to(device)
        if self.kind == "filled":
            return self._filled(shape, generator, sizes.get("fill", 0)).to(device)
        if self.kind == "alike":
            return _alike(value, generator).to(device)
        if self.kind == "padding":
            return _first_true(value > 0).long().to(device)
        return (value if self.kind == "ids" else value + 1).to(device)

    def _filled(self, shape: list[int], generator: torch.Generator, fill: int) -> torch.Tensor:
        rows, positions = shape
        most = torch.full((1 + fill, rows), positions + 1)
        ends = (torch.rand(most.shape, generator=generator) * most).long()[fill]
        # A row may be empty, but not the first one.
        ends[:1] = ends[:1].clamp(min=2)
        return (torch.arange(positions) < ends[:, None]).long()


def _first_true(kept: torch.Tensor) -> torch.Tensor:
    for axis in range(kept.dim()):
        if kept.shape[axis]:
            kept.select(axis, 0).fill_(True)
    return kept


def _alike(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Let each row begin as an earlier one, up to a place of its own. Groups, trees and equal rows come of it."""
    batch, positions = rows.shape
    for row in range(1, batch):
        leader, end = (int(torch.randint(most, (), generator=generator)) for most in (row, positions + 1))
        rows[row, :end] = rows[leader, :end]
    return rows


def _both_values(x: torch.Tensor) -> torch.Tensor:
    """Each row, and of a square each column, has a True and a False, if it has two elements."""
    if x.dim() > 1 and x.shape[-1] > 1:
        for row in range(x.shape[-2]):
            x[..., row, row % x.shape[-1]] = True
            x[..., row, (row + 1) % x.shape[-1]] = False
    return x


def length(size: Size, sizes: dict[str, int]) -> int:
    """The number that a size of an input is."""
    if isinstance(size, int):
        return size
    total = 1
    for name in size.split("*"):
        total *= int(name) if name.isdigit() else sizes[name]
    return total


@torch._dynamo.disable
def apart(text: str, x: torch.Tensor) -> None:
    """Run a text outside of compiled code, between two graphs. x: its tensor."""
    exec(text, {"x": x, "torch": torch})


@dataclass(frozen=True, kw_only=True)
class Program:
    """lines: the body of a function of `inputs`. outputs: names that it returns. after: what the caller does after the forward, to inputs
    and outputs by name. reads: how the caller reads each output, in which `{}` stands for it; none if as they are.

    rule: the generator that it comes from. sizes: by name; others, third: those of a second and a third call, none without one.
    lowerings: the option, None for the default. inner, unpad: options. share: the option share_prefix.
    """

    rule: str
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    after: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    sizes: tuple[tuple[str, int], ...] = ()
    others: tuple[tuple[str, int], ...] = ()
    third: tuple[tuple[str, int], ...] = ()
    dynamic: bool = False
    lowerings: tuple[str, ...] | None = None
    inner: str = "eager"
    verify: bool = False
    device: str = "cpu"
    reads: tuple[str, ...] = ()
    unpad: bool = False
    share: bool = False

    @property
    def source(self) -> str:
        head = f"def attention({', '.join(i.name for i in self.inputs)}):"
        return "\n    ".join([head, *self.lines, f"return ({', '.join(self.outputs)},)"])

    @property
    def is_whole(self) -> bool:
        """Whether it is one graph."""
        return not any("apart(" in line for line in self.lines)

    @property
    def calls(self) -> list[dict[str, int]]:
        """The sizes of each call."""
        return [dict(self.sizes), *(dict(more) for more in (self.others, self.third) if more)]

    def function(self, *, exact: bool = False, probe: Callable[[Any], None] | None = None) -> Callable[..., Any]:
        """The function itself. exact: in float64. probe: is told what the text gives away."""
        dtype = torch.float64 if exact else self.dtype
        scope: dict[str, Any] = {
            "torch": torch,
            "F": torch.nn.functional,
            "inf": float("inf"),
            "D": dtype,
            "W": WIDER.get(dtype, dtype),
            "checkpoint": torch.utils.checkpoint.checkpoint,
            "probe": probe,
            "apart": apart,
            **linear_functions.called_in(self.source, exact=exact),
        }
        text = self.source if probe is None else _PROBE.sub(r"probe(\1) if \2.numel() else None", self.source)
        # Under a file's name, without which torch 2.11 does not trace it.
        exec(compile(text, __file__, "exec"), scope)
        function: Callable[..., Any] = scope["attention"]
        return function

    def bases(self, sizes: dict[str, int], *, exact: bool = False) -> list[torch.Tensor]:
        """The tensors behind the inputs of one call; those that want a gradient are leaves."""
        made = [x.base(seed, self.dtype, sizes, self.device) for seed, x in enumerate(self.inputs)]
        if exact:
            made = [x.double() if x.is_floating_point() else x for x in made]
        return [x.requires_grad_() if i.grad else x for i, x in zip(self.inputs, made, strict=True)]

    def __repr__(self) -> str:
        head = [
            f"# {i.name}: {i.kind}{list(i.shape)}{' with gradient' if i.grad else ''}"
            f"{'' if i.layout == '{}' else ' as ' + i.layout.format('x')}"
            for i in self.inputs
        ]
        head.append(
            f"# rule: {self.rule}; {self.dtype}; sizes: {', then '.join(map(str, self.calls))}; dynamic: {self.dynamic}; "
            f"lowerings: {self.lowerings}; inner: {self.inner}; verify: {self.verify}"
            + "; unpad" * self.unpad
            + "; share" * self.share
        )
        tail = [f"# then the caller: {line}" for line in self.after]
        tail += [
            f"# the caller reads {text.format(name)}"
            for name, text in zip(self.outputs, self.reads, strict=False)
            if text != "{}"
        ]
        return "\n".join(["", *head, self.source, *tail, ""])
