"""q, k and v in FP8, by one op for all three (fp8_rounding.py).

    x8 = cast(clamp(x · scale)), scale = largest of the format / amax, descale = 1 / scale

amax is the largest finite magnitude: what kernels leave out (padding) may hold anything. A number that is not finite becomes NaN; in
int8, which has none, 0.

The backward gets what the forward saw: q, k and v as they were rounded, again in the model's dtype. Its weights come from the scores
and the forward's lse; those of the model's own q and k are others, and where scores are large, or a scale is too old, by factors without
a bound. Rounding itself passes gradients on as if it were not there.

With smooth_k, k loses its mean over the sequence before it is rounded. Every score of a row loses the same by that, q · mean, which
the kernel adds to the lse, or to the scores beneath a softcap. With hadamard, q and k are turned by one rotation: scores stay, and what the
backward reads is turned back.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.lowerings import fp8_rounding
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.fp8_rounding import Rounding
from attn_compiler.spec import AttentionSpec

aten = torch.ops.aten

#: what comes before a family's own operands
_ALWAYS = ("q8", "k8", "v8", "descale_q", "descale_k", "descale_v")

#: a buffer, and what it held before
History = tuple[fx.Node, fx.Node]


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """q, k, v: for the backward, in the model's dtype (without gradients: anything of their shape, so that nothing has to be written).
    operands: those of `names`."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    operands: list[fx.Node]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """How a descale lies: float32 (B|1, Hq|Hkv|1, n), contiguous. block: the positions of each of the n, None if n is 1."""

    block: int | None


def recipe_of(spec: AttentionSpec) -> Fp8Recipe:
    """The site's recipe. Raises ValueError without one, which why_not refuses."""
    if spec.fp8 is None:
        raise ValueError("an FP8 lowering needs a recipe")
    return spec.fp8


def scales_of(spec: AttentionSpec) -> Scales:
    scaling = recipe_of(spec).scaling
    is_blocks = isinstance(scaling, CurrentScaling) and scaling.granularity == "block"
    return Scales(block=scaling.block if is_blocks and isinstance(scaling, CurrentScaling) else None)


def names(spec: AttentionSpec) -> tuple[str, ...]:
    """Of the operands that `emit` makes, in order.

    q8 (B, Hq, Sq, D), k8 (B, Hkv, Skv, D): the dtypes of Fp8Recipe.format_of. v8 (B, Hkv, Dv, Skv'): with positions last, as tensor
    cores take it, and in the order that fp8_rounding.in_order undoes; Skv' is Skv up to a multiple of 16, and what is beyond Skv is 0.
    descale_q, descale_k, descale_v: see `Scales`. shift: float32 (B, Hq, Sq), contiguous: q · mean.
    """
    return (*_ALWAYS, "shift") if recipe_of(spec).smooth_k else _ALWAYS


def emit(
    emitter: Emitter,
    spec: AttentionSpec,
    operands: Operands,
    *,
    positions_last: bool = True,
    restored: bool = True,
    rounds_q: bool = True,
) -> Rounded:
    """Round the site's q, k and v. positions_last: v8 as `names` says; else all three lie as they did. restored: the backward reads q, k
    and v, else they are there for their gradients alone. rounds_q: else q8 is q in the model's dtype, for a kernel that rounds it, and
    descale_q is 1; not with smooth_k or hadamard."""
    made = _Quantiser(emitter, spec, positions_last, restored, rounds_q).all_of(operands)
    return Rounded(q=made["q"], k=made["k"], v=made["v"], operands=[made[name] for name in names(spec)])


@dataclass(frozen=True)
class _Quantiser:
    emitter: Emitter
    spec: AttentionSpec
    positions_last: bool = True
    restored: bool = True
    rounds_q: bool = True

    def all_of(self, operands: Operands) -> dict[str, fx.Node]:
        given = {"q": operands.q, "k": operands.k, "v": operands.v}
        rounded = {name: x for name, x in given.items() if name != "q" or self.rounds_q}
        read = rounded if self._writes_restored else {name: self._detached(x) for name, x in rounded.items()}
        mean = self._mean(given["k"]) if self._recipe.smooth_k else None
        how, history = self._how(list(rounded)), self._history(read)
        largest = self._magnitudes(read, mean, how, history)
        outputs = self._round(read, mean, list(largest.values()), how)
        made: dict[str, fx.Node] = {} if self.rounds_q else self._q_as_it_is(given["q"])
        for i, name in enumerate(read):
            made[f"{name}8"], made[f"descale_{name}"], back = (
                self._item(outputs, fp8_rounding.EACH * i + j) for j in range(fp8_rounding.EACH)
            )
            made[name] = back if self._writes_restored else self._in_its_place(name, given[name])
        newest = fp8_rounding.EACH * len(read)
        if history is not None:
            self._move_on(history, self._item(outputs, newest))
        if mean is not None:
            made["shift"] = self._item(outputs, newest + 1)
        return made

    def _mean(self, k: fx.Node) -> fx.Node:
        return self._call(torch.ops.attn_compiler.mean_fp8.default, self._detached(k), self._recipe.hadamard)

    def _q_as_it_is(self, q: fx.Node) -> dict[str, fx.Node]:
        one = self._call(torch.full, (1, 1, 1), 1.0, device=self.emitter.value(q).device)
        return {"q8": self._detached(q), "descale_q": one, "q": self._in_its_place("q", q)}

    @property
    def _recipe(self) -> Fp8Recipe:
        return recipe_of(self.spec)

    @property
    def _writes_restored(self) -> bool:
        return self.spec.needs_grad and self.restored

    def _how(self, names: Sequence[str]) -> Rounding:
        recipe, scaling = self._recipe, self._recipe.scaling
        each = [
            fp8_rounding.How(
                format=recipe.format_of(name),
                margin=0 if isinstance(scaling, StaticScaling) else scaling.margin,
                magnitude=getattr(scaling, name) if isinstance(scaling, StaticScaling) else None,
                rotated=name != "v" and recipe.hadamard,
                turned=name == "v" and self.positions_last,
                as_given=not self.positions_last,
                restore=self.spec.dtype if self._writes_restored else "",
                has_mean=name == "k" and recipe.smooth_k,
                has_shift=name == "q" and recipe.smooth_k,
            )
            for name in names
        ]
        return Rounding(each=tuple(each), block=scales_of(self.spec).block or CurrentScaling().block)

    def _round(self, x: dict[str, fx.Node], mean: fx.Node | None, largest: list[fx.Node], how: Rounding) -> fx.Node:
        scaling = self._recipe.scaling
        if isinstance(scaling, DelayedScaling):
            how = dataclasses.replace(how, per=scaling.granularity)
        op = torch.ops.attn_compiler.round_fp8.default
        return self._call(op, list(x.values()), mean, largest, how.to_text())

    def _magnitudes(
        self, x: dict[str, fx.Node], mean: fx.Node | None, how: Rounding, history: History | None
    ) -> dict[str, fx.Node]:
        """float32 (B|1, H|1, 1) of each tensor; nothing where each block has its own."""
        match self._recipe.scaling:
            case CurrentScaling(granularity=granularity) if granularity != "block":
                per: fp8_rounding.Per = "tensor" if granularity == "tensor" else "row"
                op = torch.ops.attn_compiler.largest_fp8.default
                text = dataclasses.replace(how, per=per).to_text()
                kept = self._call(op, [self._detached(node) for node in x.values()], mean, text)
                return self._parts(kept, x, per)
            case DelayedScaling() as delayed if history is not None:
                return self._parts(self._of_steps_before(history, delayed), x, delayed.granularity)
            case _:
                return {}

    def _parts(self, kept: fx.Node, x: dict[str, fx.Node], per: fp8_rounding.Per) -> dict[str, fx.Node]:
        found, start = {}, 0
        for name, node in x.items():
            value = self.emitter.value(node)
            size = fp8_rounding.count(value, per)
            part = self._call(aten.slice.Tensor, kept, 0, start, start + size)
            shape = {"tensor": (1, 1, 1), "head": (1, -1, 1), "row": (-1, value.shape[1], 1)}[per]
            found[name], start = self._call(torch.reshape, part, shape), start + size
        return found

    def _history(self, x: dict[str, fx.Node]) -> History | None:
        """The buffer (amax_history_len, n), for n magnitudes of all tensors: the newest first."""
        scaling = self._recipe.scaling
        if not isinstance(scaling, DelayedScaling):
            return None
        counts = [fp8_rounding.count(self.emitter.value(node), scaling.granularity) for node in x.values()]
        return self.emitter.buffer("amax", (scaling.amax_history_len, sum(counts)))

    def _of_steps_before(self, history: History, scaling: DelayedScaling) -> fx.Node:
        """(n,)"""
        _, before = history
        newest = self._call(aten.slice.Tensor, before, 0, 0, 1) if scaling.amax_compute_algo != "max" else before
        return self._call(torch.amax, newest, 0)

    def _move_on(self, history: History, newest: fx.Node) -> None:
        """By one step."""
        buffer, before = history
        kept = self._call(aten.slice.Tensor, before, 0, 0, self.emitter.value(before).shape[0] - 1)
        row = self._call(torch.unsqueeze, newest, 0)
        self._call(operator.setitem, buffer, ..., self._call(torch.cat, [row, kept]))

    def _in_its_place(self, name: str, given: fx.Node) -> fx.Node:
        """Without a backward that reads it."""
        if not self.spec.needs_grad:
            value = self.emitter.value(given)
            nothing = self._call(torch.empty, (1, 1, 1, 1), dtype=value.dtype, device=value.device)
            return self._call(torch.Tensor.expand_as, nothing, given)
        if name == "v" or not self._recipe.hadamard:
            return given
        return self._call(torch.ops.attn_compiler.stand_in_fp8.default, given)

    def _detached(self, x: fx.Node) -> fx.Node:
        return self._call(torch.Tensor.detach, x)

    def _item(self, outputs: fx.Node, i: int) -> fx.Node:
        return self._call(operator.getitem, outputs, i)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(function, *args, **kwargs)
