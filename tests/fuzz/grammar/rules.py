"""One generator for each rule of the passes: `RULES`, by name. Each writes whole programs, with what its rule is about in most of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.grammar import (
    keyless_rules,
    linear_rules,
    mask_rules,
    operand_rules,
    padded_rules,
    region_rules,
    score_rules,
    size_rules,
)
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.program import Program

Rule = Callable[[Draft], None]

#: rules of which much shows only where what was proved is used: by Triton's kernels, or by the check of the first call
PROOFS = frozenset(
    {
        "mask kinds",
        "masks made",
        "masks as algebra",
        "masks partly written",
        "masks written",
        "mask tensors",
        "several masks",
        "integers",
        "rounding",
        "score kinds",
        "fills",
    }
)

#: rules of what Triton's kernels apply themselves
TILES = frozenset({"tiles", "intervals"})

#: rules of which much shows only where one axis is as long as another
AXES = frozenset({"views", "arrange", "contractions", "near misses", "two sites"})

#: what a program is compiled with, each as often as it stands here
LOWERINGS: tuple[tuple[str, ...] | None, ...] = (
    ("sdpa_cpu_flash", "reference", "math"),
    ("reference",),
    ("math",),
    ("reference",),
    None,
    ("triton", "math"),
    ("triton", "reference"),
)
#: the same on a GPU, where most of a half's programs are large enough for every kernel
CUDA_LOWERINGS: tuple[tuple[str, ...] | None, ...] = (
    None,
    ("triton", "reference"),
    ("triton", "math"),
    ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
    ("cudnn", "decode", "sdpa_efficient", "triton"),
    ("math",),
    ("triton", "reference"),
)
#: lowerings that padding is left out by, with others behind them
PADDED_LOWERINGS: tuple[tuple[str, ...] | None, ...] = (None, None, ("rows", "math"), ("triton", "reference"))
_DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
#: Triton's interpreter computes in float32 and float16
_INTERPRETED = (*[torch.float32] * 6, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


RULES: dict[str, Rule] = {
    "anything": operand_rules.anything,
    "views": operand_rules.views,
    "arrange": operand_rules.arrange,
    "contractions": operand_rules.contractions,
    "score steps": score_rules.score_steps,
    "sinks": score_rules.sinks,
    "roots": region_rules.roots,
    "masks written": mask_rules.masks_written,
    "mask kinds": mask_rules.mask_kinds,
    "masks known": mask_rules.masks_known,
    "rows without keys": keyless_rules.rows_without_keys,
    "padded batches": padded_rules.padded_batches,
    "shared prompts": padded_rules.shared_prompts,
    "masks made": mask_rules.masks_made,
    "masks as algebra": mask_rules.masks_as_algebra,
    "masks partly written": mask_rules.masks_partly_written,
    "mask tensors": mask_rules.mask_tensors,
    "several masks": mask_rules.several_masks,
    "weights masked": mask_rules.weights_masked,
    "integers": mask_rules.integers,
    "rounding": mask_rules.rounding,
    "fills": score_rules.fills,
    "score kinds": score_rules.score_kinds,
    "tiles": score_rules.tiles,
    "intervals": score_rules.intervals,
    "gradients": region_rules.gradients,
    "strides": operand_rules.strides,
    "caller writes": region_rules.caller_writes,
    "symbolic": operand_rules.symbolic,
    "sizes": size_rules.sizes_as_expressions,
    "checkpoints": region_rules.checkpoints,
    "autocast": region_rules.autocast,
    "halves": operand_rules.halves,
    "sdpa calls": operand_rules.sdpa_calls,
    "two sites": region_rules.two_sites,
    "cross": operand_rules.cross,
    "near misses": score_rules.near_misses,
    "boundaries": operand_rules.boundaries,
    "linear attention": linear_rules.linear_attention,
}


def _sizes(draw: Any, rule: str, *, large: bool, is_interpreted: bool) -> dict[str, int]:
    kv = draw(st.sampled_from((1, 2)))
    lengths = (1, 3, 4, 6) if not large else (17, 32, 65, 128)
    # Of other head dims than multiples of eight Triton's kernels know nothing.
    dims = (16, 32, 64) if large else (8, 8, 8, 8, 16, 4) if is_interpreted else (4, 1, 8)
    sizes = {
        "b": draw(st.sampled_from((2, 1, 2, 3))),
        "kv": kv,
        "h": kv * draw(st.sampled_from((1, 1, 2, 3))),
        "q": draw(st.sampled_from(lengths[1:] + lengths)),
        "k": draw(st.sampled_from(lengths[1:] + lengths)),
        "d": draw(st.sampled_from(dims)),
    }
    if draw(st.booleans()):
        sizes["k"] = sizes["q"]
    other = 32 if large else draw(st.sampled_from((8, 8, 5))) if is_interpreted else 5
    sizes["e"] = draw(st.sampled_from((sizes["d"], sizes["d"], other)))
    if not large and draw(st.integers(0, 1 if rule in AXES else 4)) == 1:
        # No check of sizes tells one axis from another.
        alike = 8 if is_interpreted and draw(st.booleans()) else draw(st.sampled_from((2, 4)))
        sizes.update(b=2, kv=2, h=2, q=alike, k=alike, d=max(alike, 8) if is_interpreted else alike)
        sizes["e"] = sizes["d"]
    return sizes


@st.composite
def programs(
    draw: Any,
    rule: str,
    lowerings: tuple[tuple[str, ...] | None, ...] = LOWERINGS,
    device: str = "cpu",
    large: bool = False,
    inner: str | None = None,
) -> Program:
    """One random program of a rule. large: sizes that a GPU's kernels take. inner: what compiles the rest, without it one of several."""
    # The last of the lowerings is Triton's, unless one alone was asked for.
    possible = lowerings[-1:] if rule in TILES else lowerings + lowerings[-1:] * 3 if rule in PROOFS else lowerings
    if rule in ("padded batches", "shared prompts") and len(lowerings) > 1:
        possible = PADDED_LOWERINGS
    if rule == "linear attention" and len(lowerings) > 1:
        possible = linear_rules.LINEAR_LOWERINGS
    if rule == "rows without keys" and len(lowerings) > 1:
        possible = (*lowerings, *[("decode", "triton", "math")] * 2)
    chosen = draw(st.sampled_from(possible))
    is_interpreted = device == "cpu" and chosen is not None and chosen[0] in ("triton", "linear_triton", "decode")
    sizes = _sizes(draw, rule, large=large, is_interpreted=is_interpreted)
    draft = Draft(draw=draw, sizes=sizes, grads=draw(st.booleans()), writes=draw(st.integers(0, 2)) == 2)
    draft.dtype = draw(
        st.sampled_from(_CUDA_DTYPES if device != "cpu" else _INTERPRETED if is_interpreted else _DTYPES)
    )
    draft.widest = torch.float32 if is_interpreted else torch.float64
    if rule == "fills" and device == "cpu" and not is_interpreted and draw(st.booleans()):
        draft.dtype = torch.float64
    RULES[rule](draft)
    dynamic = rule in ("symbolic", "sizes") or draw(st.integers(0, 7)) == 7
    others: dict[str, int] = dict(draft.others)
    if rule == "symbolic" or (dynamic and rule != "sizes" and draw(st.booleans())):
        others = dict(sizes)
        for name in draw(st.sampled_from((("b",), ("q", "k"), ("b", "q", "k"), ("k",)))):
            more = (5, 2, 7, 1, 0) if not large else (33, 64, 96, 1)
            others[name] = draw(st.sampled_from(more if name != "b" else (3, 2, 1, 0)))
        if sizes["q"] == sizes["k"] and draw(st.booleans()):
            others["k"] = others["q"]
    return Program(
        rule=rule,
        inputs=tuple(draft.inputs),
        lines=tuple(line for line in (*draft.lines, *draft.last) if line.strip()),
        outputs=tuple(dict.fromkeys(draft.outputs)),
        reads=tuple(draft.reads),
        after=tuple(draft.after),
        dtype=draft.dtype,
        sizes=tuple(sizes.items()),
        others=tuple(others.items()),
        third=tuple(draft.third.items()),
        dynamic=dynamic,
        lowerings=chosen,
        inner=inner or draw(st.sampled_from(("eager", "eager", "eager", "eager", "aot_eager"))),
        verify=draw(st.integers(1, 2 if rule in PROOFS else 16)) == 2,
        device=device,
        unpad=draft.unpad,
        share=draft.share,
    )
