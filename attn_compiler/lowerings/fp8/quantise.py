"""q, k and v in FP8: by one op for all three (rounding.py); q and k, where their scales are numbers of the recipe, by ordinary nodes
of the graph, which Inductor fuses into whatever made them (nodes.py).

    x8 = cast(clamp(x · scale)), scale = largest of the format / amax, descale = 1 / scale

amax is the largest finite magnitude: what kernels leave out (padding) may hold anything. A number that is not finite becomes NaN; in
int8, which has none, 0. Keys that nobody may see become 0 and count for no magnitude, as far as visible_keys.py knows them. Rounding has
no gradient: restoring.py attaches one to what comes of it.

With smooth_k, k loses its mean over the sequence before it is rounded, and every score of a row loses the same by that, q · mean. A
softmax does not change by it, so the backward gets k without its mean, too, and the lse that belongs to that. P, dK and dV are the same,
and so is dQ, as a row of dS adds up to 0. A softcap and sinks compare with scores themselves: there the kernel adds the shift, q · mean,
and the backward's k has its mean again. With hadamard, q and k are turned by one rotation: scores stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.fp8 import nodes, rounding
from attn_compiler.lowerings.fp8.rounding import EACH, How, Rounding
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling

aten = torch.ops.aten

#: what comes before a family's own operands
_ALWAYS = ("q8", "k8", "v8", "descale_q", "descale_k", "descale_v")

#: a buffer, and what it held before
History = tuple[fx.Node, fx.Node]


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """operands: those of `names`, which leaf ops read. kept: those of `kept_names`, for the backward; none without gradients."""

    operands: list[fx.Node]
    kept: list[fx.Node]


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
    match recipe_of(spec).scaling:
        case CurrentScaling(granularity="block", block=block):
            return Scales(block=block)
        case _:
            return Scales(block=None)


def needs_shift(spec: AttentionSpec) -> bool:
    """Whether a kernel has to know by what scores of a row are too small."""
    return recipe_of(spec).smooth_k and (spec.score.pointwise is not None or spec.score.sinks is not None)


def names(spec: AttentionSpec) -> tuple[str, ...]:
    """Of the operands that `emit` makes, in order.

    q8 (B, Hq, Sq, D), k8 (B, Hkv, Skv, D): the dtypes of Fp8Recipe.format_of. v8 (B, Hkv, Dv, Skv'): with positions last, as tensor
    cores take it, and in the order that rounding.in_order undoes; Skv' is Skv up to a multiple of 16, and what is beyond Skv is 0.
    descale_q, descale_k, descale_v: see `Scales`. shift: float32 (B, Hq, Sq), contiguous: q · mean.
    """
    return (*_ALWAYS, "shift") if needs_shift(spec) else _ALWAYS


def kept_names(*, has_mean: bool, positions_last: bool) -> tuple[str, ...]:
    """Of what a backward makes q, k and v of: q8, k8 and their descales, as in `names`; v as it was rounded, in the model's dtype, where v8
    has positions last, else v8 and its descale. mean: of rounding.mean_fp8, what k lost and gets back."""
    v = ("v",) if positions_last else ("v8", "descale_v")
    return ("q8", "k8", "descale_q", "descale_k", *v, *(("mean",) if has_mean else ()))


def emit(
    emitter: Emitter,
    spec: AttentionSpec,
    operands: Operands,
    *,
    positions_last: bool = True,
    seen: fx.Node | None = None,
) -> Rounded:
    """Round the site's q, k and v. positions_last: v8 as `names` says; else all three lie as they did. seen: of `visible_keys.emit`."""
    made = _Quantiser(emitter, spec, positions_last, seen).all_of(operands)
    kept = kept_names(has_mean=needs_shift(spec), positions_last=positions_last) if spec.needs_grad else ()
    return Rounded(operands=[made[name] for name in names(spec)], kept=[made[name] for name in kept])


@dataclass(frozen=True)
class _Quantiser:
    emitter: Emitter
    spec: AttentionSpec
    positions_last: bool = True
    seen: fx.Node | None = None

    def all_of(self, operands: Operands) -> dict[str, fx.Node]:
        read = {name: self._detached(node) for name, node in (("q", operands.q), ("k", operands.k), ("v", operands.v))}
        made = {}
        if self._recipe.smooth_k:
            op = torch.ops.attn_compiler.mean_fp8.default
            made["mean"] = self._call(op, read["k"], self._recipe.hadamard, *self._further)
        how, history = {name: self._how(name) for name in read}, self._history(read)
        largest = self._magnitudes(read, made.get("mean"), how, history)
        by_nodes = [name for name in read if self._fuses(name)]
        for name in by_nodes:
            made[f"{name}8"], made[f"descale_{name}"] = self._by_nodes(read[name], how[name])
        rest = [name for name in read if name not in by_nodes]
        outputs = self._round({name: read[name] for name in rest}, made.get("mean"), largest, how)
        for i, name in enumerate(rest):
            made[f"{name}8"], made[f"descale_{name}"], made[name] = (
                self._item(outputs, EACH * i + j) for j in range(EACH)
            )
        if history is not None:
            self._move_on(history, self._item(outputs, EACH * len(rest)))
        if needs_shift(self.spec):
            made["shift"] = self._item(outputs, EACH * len(rest) + 1)
        return made

    def _by_nodes(self, x: fx.Node, how: How) -> tuple[fx.Node, fx.Node]:
        return nodes.rounded(self.emitter, x, how, self.seen if how.of_keys else None)

    @property
    def _further(self) -> list[fx.Node]:
        """What all ops take last."""
        return [] if self.seen is None else [self.seen]

    def _fuses(self, name: str) -> bool:
        """What is known beforehand, and not the op's to turn or to move: then the tensor need not be written for an op to read it."""
        recipe = self._recipe
        return isinstance(recipe.scaling, StaticScaling) and name != "v" and not (recipe.hadamard or recipe.smooth_k)

    @property
    def _recipe(self) -> Fp8Recipe:
        return recipe_of(self.spec)

    @property
    def _newest_per(self) -> rounding.Per | None:
        scaling = self._recipe.scaling
        return scaling.granularity if isinstance(scaling, DelayedScaling) else None

    def _how(self, name: str) -> How:
        recipe, scaling = self._recipe, self._recipe.scaling
        # Here, since it would take nodes long to bring v back into its order.
        is_restored = name == "v" and self.positions_last and self.spec.needs_grad
        return How(
            format=recipe.format_of(name),
            margin=0 if isinstance(scaling, StaticScaling) else scaling.margin,
            magnitude=getattr(scaling, name) if isinstance(scaling, StaticScaling) else None,
            rotated=name != "v" and recipe.hadamard,
            turned=name == "v" and self.positions_last,
            as_given=not self.positions_last,
            restore=self.spec.dtype if is_restored else "",
            has_mean=name == "k" and recipe.smooth_k,
            has_shift=name == "q" and needs_shift(self.spec),
            of_keys=name != "q" and self.seen is not None,
        )

    def _rounding(self, how: Iterable[How], per: rounding.Per | None) -> str:
        block = scales_of(self.spec).block or CurrentScaling().block
        return Rounding(each=tuple(how), block=block, per=per).to_text()

    def _round(
        self, x: dict[str, fx.Node], mean: fx.Node | None, largest: dict[str, fx.Node], how: dict[str, How]
    ) -> fx.Node:
        op = torch.ops.attn_compiler.round_fp8.default
        known = [largest[name] for name in x if name in largest]
        text = self._rounding((how[name] for name in x), self._newest_per)
        return self._call(op, list(x.values()), mean, known, text, *self._further)

    def _magnitudes(
        self, x: dict[str, fx.Node], mean: fx.Node | None, how: dict[str, How], history: History | None
    ) -> dict[str, fx.Node]:
        """float32 (B|1, H|1, 1) of each tensor; nothing where each block has its own."""
        match self._recipe.scaling:
            case CurrentScaling(granularity=granularity) if granularity != "block":
                per: rounding.Per = "tensor" if granularity == "tensor" else "row"
                op = torch.ops.attn_compiler.largest_fp8.default
                kept = self._call(op, list(x.values()), mean, self._rounding(how.values(), per), *self._further)
                return self._parts(kept, x, per)
            case DelayedScaling() as delayed if history is not None:
                return self._parts(self._of_steps_before(history, delayed), x, delayed.granularity)
            case _:
                return {}

    def _parts(self, kept: fx.Node, x: dict[str, fx.Node], per: rounding.Per) -> dict[str, fx.Node]:
        found, start = {}, 0
        for name, node in x.items():
            value = self.emitter.value(node)
            size = rounding.count(value, per)
            part = self._call(aten.slice.Tensor, kept, 0, start, start + size)
            shape = {"tensor": (1, 1, 1), "head": (1, -1, 1), "row": (-1, value.shape[1], 1)}[per]
            found[name], start = self._call(torch.reshape, part, shape), start + size
        return found

    def _history(self, x: dict[str, fx.Node]) -> History | None:
        """The buffer (amax_history_len, n), for n magnitudes of all tensors: the newest first."""
        scaling = self._recipe.scaling
        if not isinstance(scaling, DelayedScaling):
            return None
        counts = [rounding.count(self.emitter.value(node), scaling.granularity) for node in x.values()]
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

    def _detached(self, x: fx.Node) -> fx.Node:
        return self._call(torch.Tensor.detach, x)

    def _item(self, outputs: fx.Node, i: int) -> fx.Node:
        return self._call(operator.getitem, outputs, i)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(function, *args, **kwargs)
