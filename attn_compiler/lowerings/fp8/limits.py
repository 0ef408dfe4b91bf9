"""Limits of all lowerings in FP8, each with its remedy."""

from __future__ import annotations

from attn_compiler.lowerings.fp8 import VECTOR
from attn_compiler.lowerings.shared.limits.common import check_lse
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec

#: So few queries read k and v once, and rounding these first costs as much again.
_FEW_QUERIES = 32


def check_recipe(spec: AttentionSpec, *, has_backward: bool = False) -> list[Reason]:
    """Require a recipe that can be carried out. has_backward: in FP8."""
    recipe = spec.fp8
    if recipe is None:
        remedy = "compile with options={'fp8_recipe': attn_compiler.Fp8Recipe()}"
        return refuse(Code.FP8_NOT_ASKED, "FP8 is used where a recipe asks for it", "no recipe for this site", remedy)
    # Rounding to FP8 changes the logsumexp.
    reasons = check_lse(spec, "unread")
    if not recipe.forward:
        remedy = "give Fp8Recipe(forward=True)"
        reasons += refuse(Code.FP8_RECIPE, "the recipe asks for a forward in FP8", "forward=False", remedy)
    if recipe.backward and spec.needs_grad and not has_backward:
        rule = "a lowering with a backward in FP8, which cudnn_fp8 alone has"
        reasons += refuse(Code.FP8_RECIPE, rule, "backward=True", "give Fp8Recipe(backward=False)")
    return reasons


def check_shapes(spec: AttentionSpec) -> list[Reason]:
    """Require head dims and lengths that the recipe and the rounding support."""
    recipe, reasons = spec.fp8, []
    for name, size in (("head_dim_qk", spec.head_dim_qk), ("head_dim_v", spec.head_dim_v)):
        if not isinstance(size, int) or size % VECTOR:
            reasons += refuse(Code.HEAD_DIM, f"in FP8 head dims are multiples of {VECTOR}", f"{name} {size}")
    size = spec.head_dim_qk
    if recipe is not None and recipe.hadamard and not (isinstance(size, int) and size & (size - 1) == 0):
        rule = "a Hadamard rotation needs a head dim that is a power of two"
        reasons += refuse(Code.FP8_RECIPE, rule, str(size), "give Fp8Recipe(hadamard=False)")
    if isinstance(spec.seqlen_q, int) and spec.seqlen_q <= _FEW_QUERIES:
        rule = f"more than {_FEW_QUERIES} queries: for fewer, rounding k and v takes longer than what it saves"
        reasons += refuse(Code.LENGTHS, rule, str(spec.seqlen_q))
    if not isinstance(spec.num_heads_kv, int):
        reasons += refuse(Code.SYMBOLIC, "the number of heads is known while compiling", str(spec.num_heads_kv))
    return reasons
