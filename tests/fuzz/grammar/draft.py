"""A program that is being drawn: what every part of the grammar writes into."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.program import Input, Size

Dims = tuple[str, ...]


@dataclass(kw_only=True)
class Draft:
    """sizes: of "b", "h", "kv", "q", "k", "d", "e" (v's head dim). dims: what the dimensions of `s` mean; "bh" is one of both.

    grads: some inputs want gradients. writes: the text may write in place. widest: the dtype that a softmax may run in.
    last: what the text does right before it returns. repeated: of k and v those that have as many heads as q by now.
    unpad, share, reads: see Program. others, third: sizes of a second and a third call, if the rule has its own.
    kept: names of the conditions that were put on `s`, in its dimensions.
    """

    draw: Any
    sizes: dict[str, int]
    grads: bool
    writes: bool
    dtype: torch.dtype = torch.float32
    widest: torch.dtype = torch.float64
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    layouts: bool = False
    dims: Dims = ()
    causal_allowed: bool = True
    indent: str = ""
    names: int = 0
    repeated: set[str] = field(default_factory=set)
    kept: list[str] = field(default_factory=list)
    unpad: bool = False
    share: bool = False
    reads: list[str] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    third: dict[str, int] = field(default_factory=dict)

    def pick(self, *options: Any) -> Any:
        return options[0] if len(options) == 1 else self.draw(st.sampled_from(options))

    def maybe(self, one_in: int = 2) -> bool:
        return bool(self.draw(st.integers(0, one_in - 1)) == one_in - 1)

    def number(self, least: int, most: int) -> int:
        return int(self.draw(st.integers(least, most)))

    def new(self, prefix: str, shape: Sequence[Size], kind: str = "normal", *, grad: bool | None = None) -> str:
        """A new argument; gives its name."""
        name = f"{prefix}{len(self.inputs)}"
        is_float = kind in ("normal", "large", "small", "positive")
        wants = self.grads and is_float and (self.maybe() if grad is None else grad)
        layout = self._layout(shape, kind) if self.layouts and self.maybe() else "{}"
        shape = tuple(shape)
        if layout != "{}":
            shape, layout = layout  # type: ignore[misc]
        self.inputs.append(Input(name=name, shape=tuple(shape), kind=kind, grad=wants, layout=layout))
        return name

    def _layout(self, shape: Sequence[Size], kind: str) -> Any:
        """(shape of the base, view of it) for a tensor that does not lie contiguous, or not at the start of its memory."""
        rank = len(shape)
        if rank == 0:
            return "{}"
        options: list[Any] = [((*shape[:-1], 2, shape[-1]), "{}.select(-2, 1)")]
        options.append(((2, *shape), "{}[1]"))
        options.append(((*shape, 2), "{}[..., 1]"))
        if rank > 1:
            a = self.number(0, rank - 2)
            swapped = list(shape)
            swapped[a], swapped[-1] = swapped[-1], swapped[a]
            options.append((tuple(swapped), f"{{}}.transpose({a}, -1)"))
            options.append((tuple(reversed(shape)), f"{{}}.permute({', '.join(map(str, reversed(range(rank))))})"))
        if isinstance(shape[0], str) and "*" not in shape[0] and rank > 1 and not self.writes:
            sizes = ", ".join(["{size}", *["-1"] * (rank - 1)])
            options.append(((1, *shape[1:]), f"{{}}.expand({sizes.format(size='$' + shape[0])})"))
        return self.pick(*options)

    def add(self, *lines: str) -> None:
        self.lines.extend(self.indent + line for line in lines)

    def name(self, prefix: str) -> str:
        """A new name for a value in the text."""
        self.names += 1
        return f"{prefix}_{self.names}"

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.add(head)
        outer, self.indent = self.indent, self.indent + "    "
        yield
        self.indent = outer

    def product(self, axes: str) -> Size:
        """The size of an input along one of the scores' dimensions."""
        return "*".join(axes) if len(axes) > 1 else axes

    def at(self, axis: str) -> int:
        """The dimension of `s` that has this axis."""
        return next(i for i, dim in enumerate(self.dims) if axis in dim)

    def both(self, *steps: Callable[[Draft], None]) -> None:
        for step in steps:
            step(self)
