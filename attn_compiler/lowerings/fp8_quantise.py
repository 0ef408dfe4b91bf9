"""q, k and v in FP8: by one op for all three (fp8_rounding.py), or, where scales are known beforehand and nothing of the tensors has to be
found, as ordinary nodes of the graph, which Inductor fuses into whatever made them.

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

import dataclasses
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
    descale_q, one number, is what that is to be multiplied by; not with scales that are known beforehand."""
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
        return self._by_nodes(given) if isinstance(self._recipe.scaling, StaticScaling) else self._by_op(given)

    # ---- one op -----------------------------------------------------------------------------------------------------

    def _by_op(self, given: dict[str, fx.Node]) -> dict[str, fx.Node]:
        turned = {name: self._product_with_signs(given[name]) for name in ("q", "k") if self._recipe.hadamard}
        factors = {name: turned[name][1] if name in turned else 1.0 for name in given}
        x = {name: turned[name][0] if name in turned else node for name, node in given.items()}
        rounded = [name for name in given if name != "q" or self.rounds_q]
        read = {name: x[name] if self._writes_restored else self._detached(x[name]) for name in rounded}
        mean = self._packed(self._mean(self._exact(x["k"], factors["k"]))) if self._recipe.smooth_k else None
        how = self._how({name: factors[name] for name in rounded})
        history = self._history(read)
        largest = self._magnitudes(read, mean, how, history)
        outputs = self._round(read, mean, list(largest.values()), how)
        made: dict[str, fx.Node] = {} if self.rounds_q else self._q_as_it_is(given["q"], x["q"], factors["q"])
        for i, name in enumerate(read):
            made[f"{name}8"], made[f"descale_{name}"], back = (
                self._item(outputs, fp8_rounding.EACH * i + j) for j in range(fp8_rounding.EACH)
            )
            made[name] = back if self._writes_restored else self._in_its_place(given[name], x[name], factors[name])
            if name == "q" and mean is not None:
                made["shift"] = self._shift(self._wide(self._detached(back)), mean)
        if mean is not None and not self.rounds_q:
            made["shift"] = self._shift(self._exact(x["q"], factors["q"]), mean)
        if history is not None:
            self._move_on(history, self._item(outputs, fp8_rounding.EACH * len(read)))
        return made

    def _q_as_it_is(self, given: fx.Node, x: fx.Node, factor: float) -> dict[str, fx.Node]:
        times = self._call(torch.full, (1, 1, 1), factor, device=self.emitter.value(x).device)
        return {"q8": self._detached(x), "descale_q": times, "q": self._in_its_place(given, x, factor)}

    @property
    def _writes_restored(self) -> bool:
        return self.spec.needs_grad and self.restored

    def _how(self, factors: dict[str, float]) -> Rounding:
        scaling = self._recipe.scaling
        each = []
        for name, factor in factors.items():
            restore = self._writes_restored or (name == "q" and self._recipe.smooth_k)
            how = fp8_rounding.How(
                format=self._recipe.format_of(name),
                margin=0 if isinstance(scaling, StaticScaling) else scaling.margin,
                factor=factor,
                turned=name == "v" and self.positions_last,
                as_given=not self.positions_last,
                restore=self.spec.dtype if restore else "",
                has_mean=name == "k" and self._recipe.smooth_k,
            )
            each.append(how)
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

    def _in_its_place(self, given: fx.Node, x: fx.Node, factor: float) -> fx.Node:
        """Without a backward that reads it."""
        if not self.spec.needs_grad:
            return self._nothing_of(given)
        return x if factor == 1.0 else self._call(torch.mul, x, factor)

    def _exact(self, x: fx.Node, factor: float) -> fx.Node:
        return self._call(torch.mul, self._wide(self._detached(x)), factor)

    def _detached(self, x: fx.Node) -> fx.Node:
        return self._call(torch.Tensor.detach, x)

    def _item(self, outputs: fx.Node, i: int) -> fx.Node:
        return self._call(operator.getitem, outputs, i)

    # ---- nodes ------------------------------------------------------------------------------------------------------

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
                made |= self._v_by_op(given[name], scale)
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

    def _v_by_op(self, v: fx.Node, scale: fx.Node) -> dict[str, fx.Node]:
        """Turned, which nodes would write a byte at a time."""
        read = v if self._writes_restored else self._detached(v)
        largest = self._call(torch.div, self._recipe.largest_of("v"), scale)
        how = self._how({"v": 1.0})
        outputs = self._round({"v": read}, None, [largest], how)
        back = self._item(outputs, fp8_rounding.EACH - 1)
        restored = back if self._writes_restored else self._in_its_place(v, v, 1.0)
        return {"v8": self._item(outputs, 0), "v": restored}

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
        """float32 (1, 1, 1)"""
        number = self._recipe.largest_of(name) / getattr(self._recipe.scaling, name)
        return self._call(torch.full, (1, 1, 1), number, device=self.emitter.value(x).device)

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
