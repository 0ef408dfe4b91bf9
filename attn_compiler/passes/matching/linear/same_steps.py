"""Check that a function takes the same steps at the model's sizes as at the small sizes of the tests.

Numbers are compared at small sizes only. A text could act otherwise at a large batch without a branch, by a number computed from sizes or
by a loop over them. Steps are cheap to compare: on tensors without memory, a function runs at the model's own sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attn_compiler.passes.matching.linear import draws, operations, running
from attn_compiler.passes.matching.linear.draws import DrawSizes
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.spec.linear import LinearSpec
from attn_compiler.torch_private import substitution

#: batch sizes to check where the batch is not known
_BATCHES = (1, 3, 64, 4096)
#: functions that take sizes and positions
_OF_SIZES = frozenset(
    f"{operations.MOVES} empty zeros ones zeros_like ones_like eye new_zeros new_ones arange size dim chunk narrow pad flatten unflatten "
    "__getitem__ __setitem__ __get__".split()
)


def why_not(proposed: Proposed, spec: LinearSpec) -> str | None:
    """Return what a function does at a call's sizes but at no small ones; None if there is nothing."""
    tested = [_steps(proposed, spec, at) for at in draws.sizes(spec) if at.sort == draws.SORTS[0]]
    numbers = frozenset().union(*(one.numbers for one in tested))
    for at in _own_sizes(spec):
        found = _steps(proposed, spec, at)
        others = sorted(map(str, found.numbers - numbers))
        if others:
            return f"at {at.length} tokens of {at.batch} rows it computes with {others[0]}, and never where it was run"
        if not any(found.calls == one.calls for one in tested):
            return f"at {at.length} tokens of {at.batch} rows it takes other steps than where it was run"
    return None


def _own_sizes(spec: LinearSpec) -> Iterator[DrawSizes]:
    lengths = [spec.length] if isinstance(spec.length, int) else [at.length for at in draws.sizes(spec)]
    for batch in (spec.batch,) if isinstance(spec.batch, int) else _BATCHES:
        for length in lengths:
            yield DrawSizes(
                batch=batch,
                length=length,
                heads_k=spec.num_heads_k,
                heads_v=spec.num_heads_v,
                dim_k=spec.head_dim_k,
                dim_v=spec.head_dim_v,
                sort=draws.SORTS[0],
            )


class _Steps(TorchFunctionMode):
    """Recorder of steps. calls: names of the functions called, in order. numbers: numeric arguments, with the function's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.numbers: set[tuple[str, float]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name != "__get__":
            self.calls.append(name)
        if name not in _OF_SIZES:
            self.numbers.update((name, float(x)) for x in (*args, *kwargs.values()) if isinstance(x, (int, float)))
        return func(*args, **kwargs)


def _steps(proposed: Proposed, spec: LinearSpec, at: DrawSizes) -> _Steps:
    shapes = running.shapes_of(spec.form, at)
    given = [torch.empty(shapes[role], device="meta") for role in spec.form.roles]
    steps = _Steps()
    with substitution.outside_compilation(), torch.no_grad(), torch.device("meta"), steps:
        proposed.run(spec.form, given)
    return steps
