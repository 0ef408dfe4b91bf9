"""q, k and v in FP8, as ordinary nodes of the graph: what Inductor fuses into whatever made them.

    x8 = cast(clamp(x · scale)), scale = largest of the format / amax, descale = 1 / scale

amax is the largest finite magnitude: what kernels leave out (padding) may hold anything. A number that is not finite becomes NaN; in
int8, which has none, 0.

The backward gets what the forward saw: q, k and v as they were rounded, again in the model's dtype. Its weights come from the scores
and the forward's lse; those of the model's own q and k are others, and where scores are large, or a scale is too old, by factors without
a bound. Rounding itself passes gradients on as if it were not there.

With smooth_k, k loses its mean over the sequence before it is rounded. Every score of a row loses the same by that, q · mean, which
the kernel adds to the lse, or to the scores beneath a softcap. With hadamard, q and k are turned by H / √D, H of Sylvester's:
scores stay.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.fp8_recipe import DTYPES, CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.lowerings import fp8_rounding
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.spec import AttentionSpec

aten = torch.ops.aten

#: what comes before a family's own operands
_ALWAYS = ("q8", "k8", "v8", "descale_q", "descale_k", "descale_v")


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


def emit(emitter: Emitter, spec: AttentionSpec, operands: Operands, *, positions_last: bool = True) -> Rounded:
    """Round the site's q, k and v. positions_last: v8 as `names` says; else it lies as k8 does."""
    made = _Quantiser(emitter, spec, positions_last).all_of(operands)
    return Rounded(q=made["q"], k=made["k"], v=made["v"], operands=[made[name] for name in names(spec)])


@dataclass(frozen=True)
class _Quantiser:
    emitter: Emitter
    spec: AttentionSpec
    positions_last: bool = True

    def all_of(self, operands: Operands) -> dict[str, fx.Node]:
        given = {"q": operands.q, "k": operands.k, "v": operands.v}
        return self._by_nodes(given) if scales_of(self.spec).block is None else self._in_one_pass(given)

    def _in_one_pass(self, given: dict[str, fx.Node]) -> dict[str, fx.Node]:
        """Each tensor by one op. k first, whose mean q is multiplied by."""
        made: dict[str, fx.Node] = {}
        mean = None
        for name in ("k", "q", "v"):
            x, factor = (given[name], 1.0)
            if name != "v" and self._recipe.hadamard:
                x, factor = self._product_with_signs(x)
            own_mean = None
            if name == "k" and self._recipe.smooth_k:
                exact = self._call(torch.mul, self._wide(self._call(torch.Tensor.detach, x)), factor)
                mean = own_mean = self._packed(self._mean(exact))
            meets = mean if name == "q" else None
            rounded, descale, restored = self._rounded(name, x, mean=own_mean, factor=factor, restore=meets is not None)
            if meets is not None:
                made["shift"] = self._shift(self._wide(self._call(torch.Tensor.detach, restored)), meets)
            made |= {f"{name}8": rounded, f"descale_{name}": descale}
            made[name] = restored if self.spec.needs_grad else self._nothing_of(given[name])
        return made

    def _rounded(
        self,
        name: str,
        x: fx.Node,
        *,
        mean: fx.Node | None = None,
        scale: fx.Node | None = None,
        factor: float = 1.0,
        restore: bool = False,
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Of `fp8_rounding.round_fp8`. The restored one is empty where no gradients are wanted, unless it is asked for."""
        scaling, with_grad = self._recipe.scaling, self.spec.needs_grad
        current = scaling if isinstance(scaling, CurrentScaling) else CurrentScaling()
        how = fp8_rounding.How(
            format=self._recipe.format_of(name),
            block=current.block,
            margin=current.margin,
            factor=factor,
            turned=name == "v" and self.positions_last,
            restore=self.spec.dtype if with_grad or restore else "",
        )
        x = x if with_grad else self._call(torch.Tensor.detach, x)
        op = torch.ops.attn_compiler.round_fp8.default
        outputs = self._call(op, x, mean, scale, how.to_text())
        rounded, descale, restored = (self._call(operator.getitem, outputs, i) for i in range(3))
        return rounded, descale, restored

    def _by_nodes(self, given: dict[str, fx.Node]) -> dict[str, fx.Node]:
        turned = ("q", "k") if self._recipe.hadamard else ()
        wide = {name: self._turned(x) if name in turned else self._wide(x) for name, x in given.items()}
        exact = {name: self._call(torch.Tensor.detach, x) for name, x in wide.items()}
        mean = None
        if self._recipe.smooth_k:
            mean = self._mean(exact["k"])
            exact["k"] = self._call(torch.sub, exact["k"], mean)
        made: dict[str, fx.Node] = {}
        for name, x in exact.items():
            scale = self._scale(name, x)
            descale = self._call(torch.reciprocal, scale)
            made[f"descale_{name}"] = self._packed(descale)
            if name == "v" and self.positions_last:
                made["v8"], _, restored = self._rounded(name, given[name], scale=self._packed(scale))
                made["v"] = restored if self.spec.needs_grad else self._nothing_of(given[name])
                continue
            rounded = self._cast(name, self._scaled(name, x, scale))
            restored = self._restored(rounded, descale)
            if name == "k" and mean is not None:
                restored = self._call(torch.add, restored, mean)
            if name == "q" and mean is not None:
                made["shift"] = self._shift(restored, mean)
            made[f"{name}8"] = rounded
            made[name] = self._for_backward(given[name], wide[name], restored)
        return made

    def _mean(self, k: fx.Node) -> fx.Node:
        """(B, Hkv, 1, D), of what is finite."""
        return self._call(torch.mean, self._finite(k, k), 2, True)

    def _restored(self, rounded: fx.Node, descale: fx.Node) -> fx.Node:
        return self._call(torch.mul, self._wide(rounded), self._spread(descale))

    def _nothing_of(self, given: fx.Node) -> fx.Node:
        """Anything of the shape and dtype, so that nothing has to be written."""
        value = self.emitter.value(given)
        empty = self._call(torch.empty, (1, 1, 1, 1), dtype=value.dtype, device=value.device)
        return self._call(torch.Tensor.expand_as, empty, given)

    def _for_backward(self, given: fx.Node, wide: fx.Node, restored: fx.Node) -> fx.Node:
        """`restored` in the model's dtype, with the gradient of what was rounded."""
        if not self.spec.needs_grad:
            return self._nothing_of(given)
        value = self.emitter.value(given)
        restored = self._call(torch.Tensor.to, restored, value.dtype)
        passed = self._call(torch.Tensor.to, wide, value.dtype)
        # Exactly 0, or NaN where `restored` is NaN as well.
        nothing = self._call(torch.sub, passed, self._call(torch.Tensor.detach, passed))
        return self._call(torch.add, restored, nothing)

    @property
    def _recipe(self) -> Fp8Recipe:
        return recipe_of(self.spec)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _wide(self, x: fx.Node) -> fx.Node:
        return self._call(torch.Tensor.to, x, torch.float32)

    def _finite(self, of: fx.Node, x: fx.Node) -> fx.Node:
        """x, and 0 where `of` is not finite."""
        return self._call(torch.where, self._call(torch.isfinite, of), x, 0.0)

    def _shift(self, q: fx.Node, mean: fx.Node) -> fx.Node:
        """(B, Hq, Sq): each query with the mean of its kv head's keys."""
        grouped = self._call(torch.unflatten, q, 1, (self._heads_kv, -1))
        products = self._call(torch.mul, grouped, self._call(torch.unsqueeze, mean, 2))
        return self._packed(self._call(torch.flatten, self._call(torch.sum, products, -1), 1, 2))

    @property
    def _heads_kv(self) -> int:
        heads = self.spec.num_heads_kv
        if not isinstance(heads, int):
            raise TypeError(f"why_not refuses unknown numbers of heads, got {heads!r}")
        return heads

    def _turned(self, x: fx.Node) -> fx.Node:
        """x H / √D in float32."""
        product, factor = self._product_with_signs(x)
        return self._call(torch.mul, self._wide(product), factor)

    def _product_with_signs(self, x: fx.Node) -> tuple[fx.Node, float]:
        """x H / √D, but for a factor; in x's dtype: a rounding far below FP8's, on tensor cores."""
        size = self.emitter.value(x).shape[3]
        # A power of two near 1 / √D, which is exact, keeps float16 in its range.
        factor = 2.0 ** -math.ceil(math.log2(size) / 2)
        value = self.emitter.value(x)
        signs = self.emitter.once(
            ("fp8 hadamard", size, value.dtype, value.device), lambda: self._hadamard(size, factor, value)
        )
        return self._call(torch.matmul, x, signs), size**-0.5 / factor

    def _hadamard(self, size: int, factor: float, like: torch.Tensor) -> fx.Node:
        """(D, D): ±factor, by the parity of the bits that row and column share."""
        at = self._call(torch.arange, size, device=like.device)
        bits = self._call(torch.bitwise_and, self._call(torch.unsqueeze, at, 1), at)
        for shift in (4, 2, 1):
            bits = self._call(torch.bitwise_xor, bits, self._call(torch.bitwise_right_shift, bits, shift))
        parity = self._call(torch.bitwise_and, bits, 1)
        signs = self._call(torch.sub, factor, self._call(torch.mul, parity, 2 * factor))
        return self._call(torch.Tensor.to, signs, like.dtype)

    # ---- scales -----------------------------------------------------------------------------------------------------

    def _scale(self, name: str, x: fx.Node) -> fx.Node:
        """float32 (B|1, H|1, 1)"""
        match self._recipe.scaling:
            case CurrentScaling(granularity=granularity, margin=margin):
                return self._from_amax(name, self._amax(x, granularity), margin)
            case StaticScaling() as given:
                number = self._recipe.largest_of(name) / getattr(given, name)
                return self._call(torch.full, (1, 1, 1), number, device=self.emitter.value(x).device)
            case DelayedScaling() as delayed:
                return self._delayed(name, x, delayed)

    def _from_amax(self, name: str, amax: fx.Node, margin: int) -> fx.Node:
        scale = self._call(torch.div, self._recipe.largest_of(name) / 2**margin, amax)
        # An amax of 0, or one so small that the quotient overflows: any scale does.
        usable = self._call(torch.logical_and, self._call(torch.gt, amax, 0.0), self._call(torch.isfinite, scale))
        return self._call(torch.where, usable, scale, 1.0)

    def _amax(self, x: fx.Node, granularity: str) -> fx.Node:
        """(B|1, H|1, 1)"""
        size = self._finite(x, self._call(torch.abs, x))
        if granularity == "head":
            return self._call(torch.unsqueeze, self._call(torch.amax, size, (2, 3)), 2)
        return self._call(torch.reshape, self._call(torch.amax, size), (1, 1, 1))

    def _delayed(self, name: str, x: fx.Node, scaling: DelayedScaling) -> fx.Node:
        """(1, H|1, 1), from what the buffer (amax_history_len, H|1) held; and the buffer moves on by one step."""
        size = self._finite(x, self._call(torch.abs, x))
        if scaling.granularity == "head":
            newest = self._call(torch.amax, size, (0, 2, 3))
        else:
            newest = self._call(torch.reshape, self._call(torch.amax, size), (1,))
        heads = self.emitter.value(newest).shape[0]
        history, before = self.emitter.buffer(f"amax_{name}", (scaling.amax_history_len, heads))
        newest_first = self._call(aten.slice.Tensor, before, 0, 0, 1) if scaling.amax_compute_algo != "max" else before
        amax = self._call(torch.amax, newest_first, 0)
        kept = self._call(aten.slice.Tensor, before, 0, 0, scaling.amax_history_len - 1)
        moved_on = self._call(torch.cat, [self._call(torch.unsqueeze, newest, 0), kept])
        self._call(operator.setitem, history, ..., moved_on)
        return self._call(torch.reshape, self._from_amax(name, amax, scaling.margin), (1, -1, 1))

    # ---- casts ------------------------------------------------------------------------------------------------------

    def _scaled(self, name: str, x: fx.Node, scale: fx.Node) -> fx.Node:
        """x in the format's range, in float32."""
        largest = self._recipe.largest_of(name)
        inside = self._call(torch.clamp, self._call(torch.mul, x, self._spread(scale)), -largest, largest)
        if self._recipe.format_of(name) == "int8":
            return self._call(torch.round, self._call(torch.where, self._call(torch.isfinite, x), inside, 0.0))
        # Clamping alone would make a number of what has overflowed.
        return self._call(torch.where, self._call(torch.isfinite, x), inside, float("nan"))

    def _spread(self, scale: fx.Node) -> fx.Node:
        """(B|1, H|1, 1, 1)"""
        return self._call(torch.unsqueeze, scale, 3)

    def _cast(self, name: str, x: fx.Node) -> fx.Node:
        return self._call(torch.Tensor.to, x, getattr(torch, DTYPES[self._recipe.format_of(name)]))

    def _packed(self, x: fx.Node) -> fx.Node:
        return self._call(torch.Tensor.contiguous, x)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(function, *args, **kwargs)
