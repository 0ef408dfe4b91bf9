"""Limits of PyTorch's own attention kernels on masks and biases, as reasons (see common.py)."""

from __future__ import annotations

from collections.abc import Iterable

from attn_compiler.lowerings.base import OF_NUMBERS, OF_NUMBERS_FORWARD, UNTOUCHED
from attn_compiler.lowerings.shared.limits.common import static_if_symbolic
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import added_scores, dims
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.dtypes import BYTES, HALF
from attn_compiler.spec.masks import Alignment

#: dtype of a site -> the largest number beside which a float32 lse has enough binary digits after the point: 13 for a float32 site. A site
#: in half precision may have all numbers of float16, beside which 8 digits are left.
LARGEST_ADDED = {"float32": 2048.0} | dict.fromkeys(HALF, 65504.0)


def causal_flag(spec: AttentionSpec) -> bool:
    """Return `is_causal` for a kernel whose diagonal starts top left. Only valid where `check_causal` found nothing."""
    return spec.mask.is_causal and not _is_bottom_right_of_one_row(spec)


def bottom_right(spec: AttentionSpec) -> bool:
    """Return whether a causal mask starts bottom right and that makes a difference."""
    flagged = spec.mask.flagged
    aligned = flagged is not None and flagged.alignment is Alignment.BOTTOM_RIGHT
    return aligned and not dims.same(spec.seqlen_q, spec.seqlen_kv)


def check_causal(spec: AttentionSpec) -> list[Reason]:
    """Check the diagonal for a kernel whose diagonal starts top left."""
    if not bottom_right(spec) or _is_bottom_right_of_one_row(spec):
        return []
    remedy = static_if_symbolic(spec.seqlen_q, spec.seqlen_kv)
    return refuse(Code.DIAGONAL, "the causal diagonal starts top left", f"bottom right, {_lengths(spec)}", remedy)


def check_causal_alone(spec: AttentionSpec) -> list[Reason]:
    """Refuse a causal flag with a tensor, for a kernel that is not known to take both."""
    if not spec.mask.is_causal or spec.added_tensor is None:
        return []
    remedy = "put the diagonal into the mask tensor (mask & diagonal), and leave out is_causal=True"
    return refuse(Code.CAUSAL_AND_TENSOR, "a causal mask or a mask tensor, not both", spec.mask.words, remedy)


def check_masks(spec: AttentionSpec) -> list[Reason]:
    """Refuse a mask kind that neither a flag nor a tensor expresses: a kind that can't be applied must not be dropped."""
    return [
        Reason(code=Code.MASK_KIND, rule="the mask is causal, a tensor, or both", observed=kind.words)
        for kind in spec.mask.held
        if spec.added_tensor is None
    ]


def check_no_tensor(spec: AttentionSpec) -> list[Reason]:
    """Refuse mask tensors, for a kernel that reads none."""
    tensor = spec.added_tensor
    if tensor is None:
        return []
    is_unread = spec.mask.dense is not None and (spec.mask.is_partial or not spec.mask.read)
    remedy = (
        "make the mask inside of the compiled model (attn_compiler.integrations.transformers.compile_model does), or pass "
        "is_causal=True where it says only that"
    )
    return refuse(Code.MASK_TENSOR, "no mask tensor", tensor.words, remedy if is_unread else None)


def check_tensor(spec: AttentionSpec, *, dtypes: Iterable[str]) -> list[Reason]:
    """Require one tensor, of a broadcast shape, as bool or one of `dtypes`, or of a narrower dtype that q's holds exactly."""
    tensor = spec.added_tensor
    if tensor is None:
        return []
    both = check_one_tensor(spec)
    if both:
        return both
    reasons = check_no_large_numbers(spec)
    pairs = (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv)
    if not dims.broadcasts(tensor.shape, pairs):
        reasons += refuse(Code.MASK_SHAPE, f"the mask broadcasts to {_list(pairs)}", _list(tensor.shape))
    widens = BYTES.get(tensor.dtype, 8) < BYTES.get(spec.dtype, 0)
    if tensor.dtype not in ("bool", *dtypes) and not widens:
        remedy = f"cast the mask to {spec.dtype}, unless rounding harms it"
        rule = f"the mask is bool or {' or '.join(dict.fromkeys(dtypes))}"
        reasons += refuse(Code.MASK_DTYPE, rule, tensor.dtype, remedy)
    return reasons


def check_one_tensor(spec: AttentionSpec) -> list[Reason]:
    """Refuse a mask and a bias together: a site has one node for both (see Operands)."""
    if spec.mask.dense is None or spec.score.bias is None:
        return []
    observed = f"{spec.mask.dense.words} and {spec.score.bias.words}"
    remedy = "add the mask and the bias up in the model"
    return refuse(Code.TWO_TENSORS, "one tensor is added to the scores", observed, remedy)


def check_no_large_numbers(spec: AttentionSpec) -> list[Reason]:
    """Refuse large biases, for a kernel whose backward recomputes the weights from its lse, in float32.

    Beside 1e9 an lse can't hold the logarithm of a sum, so each key that got the number counts as the only one. In float64 it can.
    """
    largest = LARGEST_ADDED.get(spec.dtype)
    if largest is None or not spec.needs_grad:
        return []
    remedy = "mask by truth values in place of such numbers: scores.masked_fill(~mask, torch.finfo(scores.dtype).min)"
    rule = f"with gradients, numbers of at most {largest:g} are added to the scores of a {spec.dtype} site"
    large = [kind for kind in spec.score.proved if added_scores.largest(kind) > largest]
    reasons = [Reason(code=Code.LARGE_NUMBERS, rule=rule, observed=kind.words, remedy=remedy) for kind in large]
    change = spec.score.pointwise
    if change is not None and change.most > largest:
        rule = f"with gradients, scores of at most {largest:g} after a change of each by itself for a {spec.dtype} site"
        reasons += refuse(Code.LARGE_NUMBERS, rule, change.words, "lower the scale or the softcap in the model")
    return reasons


def check_no_keyless_rows(spec: AttentionSpec) -> list[Reason]:
    """Refuse rows without keys, for a kernel whose backward recomputes the weights from its lse, and gets a mask of finite numbers.

    Beside numbers such as -1e9 an lse can't hold the logarithm of how many keys there are. So each key of a query that has none counts as
    the only one. Passes complete masks that were recovered (passes/recovering/keyless.py).
    """
    tensor = spec.added_tensor
    # A call of SDPA keeps the kernel that PyTorch would run, with that kernel's gradients.
    if not (spec.needs_grad and spec.decomposed and spec.adds_unread) or tensor is None:
        return []
    rule = "with gradients, numbers that mask leave each query some key"
    remedy = "call scaled_dot_product_attention (transformers: attn_implementation='sdpa'), or mask by truth values (masked_fill)"
    return refuse(Code.KEYLESS_ROWS, rule, spec.mask.reason or spec.mask.words, remedy)


def check_numbers_read(spec: AttentionSpec) -> list[Reason]:
    """Refuse masks of numbers that were not recovered, for a kernel to which a dtype's lowest number is -inf, so that rows of it have no
    key."""
    if not spec.adds_unread:
        return []
    remedy = "give the mask as truth values (torch.bool)"
    return refuse(Code.KEYLESS_ROWS, "numbers that mask were read", spec.mask.reason or spec.mask.words, remedy)


def check_own_rows(spec: AttentionSpec, lowering: str) -> list[Reason]:
    """Require the model's own result in rows without a key, from any lowering. Only those that add the model's own numbers give it."""
    own = spec.mask.own_rows
    adding = OF_NUMBERS if spec.needs_grad else (*OF_NUMBERS, *OF_NUMBERS_FORWARD)
    if own is None or lowering == UNTOUCHED or (own == "numbers" and lowering in adding):
        return []
    rule = "a query without keys gets what the model gives it"
    remedy = "mask by one number: torch.finfo(scores.dtype).min"
    return refuse(Code.KEYLESS_ROWS, rule, "several numbers mask, or scores count beside one that does", remedy)


def check_no_bias_gradient(spec: AttentionSpec) -> list[Reason]:
    bias = spec.score.bias
    if bias is None or not (bias.requires_grad and spec.needs_grad):
        return []
    return refuse(Code.BIAS_GRADIENT, "the bias needs no gradient", bias.words)


def lengths_reason(spec: AttentionSpec, rule: str) -> Reason:
    """Return a refusal for the two lengths; where they are symbolic, the remedy is to make them static."""
    remedy = static_if_symbolic(spec.seqlen_q, spec.seqlen_kv)
    return Reason(code=Code.DIAGONAL, rule=rule, observed=_lengths(spec), remedy=remedy)


def _is_bottom_right_of_one_row(spec: AttentionSpec) -> bool:
    """Return whether a single query is on the last row, and so sees every key."""
    return bottom_right(spec) and spec.seqlen_q == 1


def _lengths(spec: AttentionSpec) -> str:
    return f"seqlen_q {spec.seqlen_q}, seqlen_kv {spec.seqlen_kv}"


def _list(shape: tuple[Dim, ...]) -> str:
    return f"({', '.join(str(size) for size in shape)})"
