"""q, k and v in FP8: by one op for all three (rounding.py); q and k with scales from the recipe by ordinary graph nodes, which Inductor
fuses with their producers (`round_by_nodes`).

    x8 = cast(clamp(x · scale)), scale = largest of the format / amax, descale = 1 / scale

amax is the largest finite magnitude: masked elements (padding) may hold anything. A number that is not finite becomes NaN, or 0 in int8,
which has no NaN. Invisible keys become 0 and count for no magnitude, as far as visible_keys.py knows them. Rounding has no gradient:
restoring.py attaches one to the attention's output.

With smooth_k, k's mean over the sequence is subtracted before rounding, which lowers every score of a row by q · mean. A softmax does not
change by it, so the backward gets k without its mean, too, and the matching lse. P, dK and dV are the same, and so is dQ, as a row of dS
adds up to 0. A softcap and sinks depend on the scores themselves: then the kernel adds the shift, q · mean, and the backward's k has its
mean again. With hadamard, q and k are multiplied by one rotation, which keeps the scores.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.fp8 import rounding
from attn_compiler.lowerings.fp8.rounding import EACH, How, Rounding
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling

aten = torch.ops.aten

#: operands before a family's own
_ALWAYS = ("q8", "k8", "v8", "descale_q", "descale_k", "descale_v")

#: a buffer, and its contents before this step
History = tuple[fx.Node, fx.Node]


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """Rounded tensors. operands: those of `names`, which leaf ops read. kept: those of `kept_names`, for the backward; none without
    gradients."""

    operands: list[fx.Node]
    kept: list[fx.Node]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Layout of a descale: float32 (B|1, Hq|Hkv|1, n), contiguous. block: positions of each of the n; None if n is 1."""

    block: int | None


def recipe_of(spec: AttentionSpec) -> Fp8Recipe:
    """Return the site's recipe. Raises ValueError without one, which why_not refuses."""
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
    """Return whether a kernel needs the shift that restores a row's scores."""
    return recipe_of(spec).smooth_k and (spec.score.pointwise is not None or spec.score.sinks is not None)


def names(spec: AttentionSpec) -> tuple[str, ...]:
    """Return the names of the operands that `emit` makes, in order.

    q8 (B, Hq, Sq, D), k8 (B, Hkv, Skv, D): the dtypes of Fp8Recipe.format_of. v8 (B, Hkv, Dv, Skv'): with positions last, in the order of
    tensor cores that rounding.in_order undoes; Skv' is Skv up to a multiple of 16, with zeros beyond Skv. descale_q, descale_k, descale_v:
    see `Scales`. shift: float32 (B, Hq, Sq), contiguous: q · mean.
    """
    return (*_ALWAYS, "shift") if needs_shift(spec) else _ALWAYS


def kept_names(*, has_mean: bool, positions_last: bool) -> tuple[str, ...]:
    """Return the names of the backward's tensors: q8, k8 and their descales, as in `names`; the rounded v in the model's dtype where v8
    has positions last, else v8 and its descale. mean: of rounding.mean_fp8, which was subtracted from k and is added again."""
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
    """Round the site's q, k and v. positions_last: v8 as in `names`; else all three keep their strides. seen: of `visible_keys.emit`."""
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
        given = {"q": operands.q, "k": operands.k, "v": operands.v}
        read = {name: self._call(torch.Tensor.detach, node) for name, node in given.items()}
        made = {}
        if self._recipe.smooth_k:
            op = torch.ops.attn_compiler.mean_fp8.default
            made["mean"] = self._call(op, read["k"], self._recipe.hadamard, *self._further)
        how, history = {name: self._how(name) for name in read}, self._history(read)
        largest = self._magnitudes(read, made.get("mean"), how, history)
        by_nodes = [name for name in read if self._fuses(name)]
        for name in by_nodes:
            seen = self.seen if how[name].of_keys else None
            made[f"{name}8"], made[f"descale_{name}"] = round_by_nodes(self.emitter, read[name], how[name], seen)
        rest = [name for name in read if name not in by_nodes]
        outputs = self._round({name: read[name] for name in rest}, made.get("mean"), largest, how)
        for i, name in enumerate(rest):
            made[f"{name}8"], made[f"descale_{name}"], made[name] = (
                self._item(outputs, EACH * i + j) for j in range(EACH)
            )
        if history is not None:
            self._shift_history(history, self._item(outputs, EACH * len(rest)))
        if needs_shift(self.spec):
            made["shift"] = self._item(outputs, EACH * len(rest) + 1)
        return made

    @property
    def _further(self) -> list[fx.Node]:
        """Last operands of all ops."""
        return [] if self.seen is None else [self.seen]

    def _fuses(self, name: str) -> bool:
        """Return whether nodes round the tensor: its scale is known, and no op rotates or moves it. The tensor then need not be written."""
        recipe = self._recipe
        return isinstance(recipe.scaling, StaticScaling) and name != "v" and not (recipe.hadamard or recipe.smooth_k)

    @property
    def _recipe(self) -> Fp8Recipe:
        return recipe_of(self.spec)

    def _how(self, name: str) -> How:
        recipe, scaling = self._recipe, self._recipe.scaling
        # The op restores v, since nodes would take long to undo the order of its positions.
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
        scaling = self._recipe.scaling
        newest_per = scaling.granularity if isinstance(scaling, DelayedScaling) else None
        text = self._rounding((how[name] for name in x), newest_per)
        return self._call(op, list(x.values()), mean, known, text, *self._further)

    def _magnitudes(
        self, x: dict[str, fx.Node], mean: fx.Node | None, how: dict[str, How], history: History | None
    ) -> dict[str, fx.Node]:
        """Return float32 (B|1, H|1, 1) of each tensor; nothing where each block has its own."""
        match self._recipe.scaling:
            case CurrentScaling(granularity=granularity) if granularity != "block":
                per: rounding.Per = "tensor" if granularity == "tensor" else "row"
                op = torch.ops.attn_compiler.largest_fp8.default
                kept = self._call(op, list(x.values()), mean, self._rounding(how.values(), per), *self._further)
                return self._parts(kept, x, per)
            case DelayedScaling() as delayed if history is not None:
                return self._parts(self._past_magnitudes(history, delayed), x, delayed.granularity)
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
        """Return the buffer (amax_history_len, n), for n magnitudes of all tensors: the newest first."""
        scaling = self._recipe.scaling
        if not isinstance(scaling, DelayedScaling):
            return None
        counts = [rounding.count(self.emitter.value(node), scaling.granularity) for node in x.values()]
        return self.emitter.buffer("amax", (scaling.amax_history_len, sum(counts)))

    def _past_magnitudes(self, history: History, scaling: DelayedScaling) -> fx.Node:
        """Return the magnitudes of earlier steps, (n,)."""
        _, before = history
        newest = self._call(aten.slice.Tensor, before, 0, 0, 1) if scaling.amax_compute_algo != "max" else before
        return self._call(torch.amax, newest, 0)

    def _shift_history(self, history: History, newest: fx.Node) -> None:
        """Shift the buffer by one step."""
        buffer, before = history
        kept = self._call(aten.slice.Tensor, before, 0, 0, self.emitter.value(before).shape[0] - 1)
        row = self._call(torch.unsqueeze, newest, 0)
        self._call(operator.setitem, buffer, ..., self._call(torch.cat, [row, kept]))

    def _item(self, outputs: fx.Node, i: int) -> fx.Node:
        return self._call(operator.getitem, outputs, i)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(function, *args, **kwargs)


def round_by_nodes(emitter: Emitter, x: fx.Node, how: How, seen: fx.Node | None = None) -> tuple[fx.Node, fx.Node]:
    """Round x, (B, H, S, D) and without a gradient, as fp8_rounding.round_fp8 with how.magnitude. Returns it in x's strides, and the
    descale, float32 (1, 1, 1). seen: as there. Raises ValueError without a magnitude.

    Inductor fuses the cast with the tensor's producer, and never writes the tensor in the model's dtype. Where scales come from the data,
    Inductor 2.11 is slower than an op (rounding.py). Rotary embedding, magnitudes of blocks and cast become three kernels, each with a pass
    of its own over memory. With the largest magnitude of each row for later steps they become one. On an H200 that took as long as rotary
    embedding and op (123 µs for q and k of 67 MB each), or 70 µs longer (in prefill).
    """
    if how.magnitude is None:
        raise ValueError("nodes round by magnitudes that are known beforehand")
    scale = how.fits / how.magnitude
    wide = emitter.call(torch.Tensor.to, x, torch.float32)
    inside = emitter.call(torch.clamp, emitter.call(torch.mul, wide, scale), -how.largest, how.largest)
    # Clamping alone would make infinite elements finite.
    other = 0.0 if how.dtype == torch.int8 else float("nan")
    finite = emitter.call(torch.where, emitter.call(torch.isfinite, wide), inside, other)
    if seen is not None:
        of_positions = emitter.call(torch.unsqueeze, emitter.call(torch.unsqueeze, seen, 1), 3)
        finite = emitter.call(torch.where, of_positions, finite, 0.0)
    whole = emitter.call(torch.round, finite) if how.dtype == torch.int8 else finite
    descale = emitter.call(torch.full, (1, 1, 1), 1 / scale, device=emitter.value(x).device)
    return emitter.call(torch.Tensor.to, whole, how.dtype), descale
