"""Limits that several of PyTorch's own attention kernels share, as reasons.

They follow `sdp_utils.cpp` and `sdp_utils_cpp.h` of torch 2.11 to 2.15, which choose a kernel inside
`scaled_dot_product_attention`: a kernel called directly does not repeat them, and may return wrong numbers.

Every function returns reasons; none means that the check holds. A symbolic size passes only if the check is known to hold for all its
values.
"""

from __future__ import annotations

from collections.abc import Iterable

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec, Dim, LseUse
from attn_compiler.spec.dtypes import FULL
from attn_compiler.spec.scores import ScoreChange, Softcap
from attn_compiler.spec.target import Target
from attn_compiler.spec.tried import OLDEST

LAST_SM = 121
MAX_GRID = 65535
#: scores of 2^14 times this scale, in units of log 2, are one half apart from the next float32 number
LARGEST_SCALE = 256.0

LOWER_PRECISION = "call model.bfloat16(), or run the model under torch.autocast"
STATIC = "compile with dynamic=False, or call torch._dynamo.mark_static(tensor, dim)"


def torch_release(version: str) -> tuple[int, int]:
    """Parse "2.13.0+cpu" to (2, 13). "" gives the oldest supported release, which has the narrowest limits."""
    return release(version) if version else OLDEST["torch"]


def release(version: str) -> tuple[int, int]:
    """Parse "2.13.0+cpu" to (2, 13)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# ---- the machine --------------------------------------------------------------------------------------------------


def check_switch(kernel: str, target: Target) -> list[Reason]:
    """Refuse a kernel that is switched off. kernel: as in Target.disabled."""
    if kernel not in target.disabled:
        return []
    setter = {"efficient": "enable_mem_efficient_sdp"}.get(kernel, f"enable_{kernel}_sdp")
    remedy = f"call torch.backends.cuda.{setter}(True), or leave the sdpa_kernel context"
    return refuse(Code.SWITCHED_OFF, f"PyTorch's {kernel} attention is enabled", "switched off", remedy)


def check_gpu(target: Target, *, first_sm: int) -> list[Reason]:
    if target.device != "cuda":
        return refuse(Code.DEVICE, "runs on an NVIDIA GPU", f"device {target.device}", "call model.to('cuda')")
    if first_sm <= target.sm <= LAST_SM:
        return []
    observed = f"sm{target.sm}" if target.sm else "no GPU that CUDA can use"
    return refuse(Code.ARCHITECTURE, f"GPU architecture from sm{first_sm} to sm{LAST_SM}", observed)


def check_device(spec: AttentionSpec, device: str) -> list[Reason]:
    """Refuse tensors that are not where the kernel runs."""
    if spec.device == device:
        return []
    return refuse(Code.DEVICE, f"q, k and v are on {device}", f"device {spec.device}")


# ---- types and shapes ---------------------------------------------------------------------------------------------


def check_dtypes(spec: AttentionSpec, allowed: Iterable[str]) -> list[Reason]:
    found = (spec.q.dtype, spec.k.dtype, spec.v.dtype)
    if len(set(found)) > 1:
        observed = ", ".join(f"{name} {dtype}" for name, dtype in zip("qkv", found, strict=True))
        return refuse(
            Code.SEVERAL_DTYPES, "q, k and v have one dtype", observed, "cast q, k and v alike before the attention"
        )
    allowed = tuple(allowed)
    if spec.dtype in allowed:
        return []
    remedy = LOWER_PRECISION if spec.dtype in FULL else None
    return refuse(Code.DTYPE, f"q is {' or '.join(allowed)}", spec.dtype, remedy)


def check_softmax_dtype(spec: AttentionSpec) -> list[Reason]:
    """Refuse a softmax in float64: kernels keep scores and softmax in float32 for every dtype below float64."""
    if spec.score.softmax_dtype != "float64" or spec.dtype == "float64":
        return []
    return refuse(Code.SOFTMAX_DTYPE, "the softmax runs in at most float32", "float64", "drop the cast of the scores")


def check_shapes(spec: AttentionSpec) -> list[Reason]:
    """Require that k and v agree, nothing is empty, and the numbers of heads are known and divide."""
    reasons = []
    for axis, (in_k, in_v) in enumerate(zip(spec.k.shape[:3], spec.v.shape[:3], strict=True)):
        if not dims.same(in_k, in_v):
            name = ("batch", "num_heads_kv", "seqlen_kv")[axis]
            reasons += refuse(Code.SHAPES, f"k and v have one {name}", f"k {in_k}, v {in_v}")
    if not dims.same(spec.batch, spec.k.shape[0]):
        reasons += refuse(Code.SHAPES, "q and k have one batch", f"q {spec.batch}, k {spec.k.shape[0]}")
    if not dims.same(spec.head_dim_qk, spec.k.shape[3]):
        observed = f"q {spec.head_dim_qk}, k {spec.k.shape[3]}"
        reasons += refuse(Code.SHAPES, "q and k have one head_dim", observed)
    return reasons + check_not_empty(spec) + _check_heads(spec)


#: PyTorch's kernels that a lowering calls, or whose arithmetic it has
_SAME_AS = {
    "math": ("MATH",),
    "sdpa_efficient": ("EFFICIENT_ATTENTION",),
    "sdpa_flash": ("FLASH_ATTENTION",),
} | dict.fromkeys(("cudnn", "cudnn_fp8", "sdpa_cudnn"), ("CUDNN_ATTENTION",))
_FUSED = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION")


def check_scope(spec: AttentionSpec, lowering: str) -> list[Reason]:
    """Require, for any lowering, that the model's sdpa_kernel scope allows a kernel of PyTorch with the same arithmetic."""
    if spec.scope is None or lowering == UNTOUCHED or set(_SAME_AS.get(lowering, _FUSED)) & set(spec.scope):
        return []
    return refuse(
        Code.CHOSEN_BY_SCOPE,
        f"the sdpa_kernel scope leaves {' or '.join(_SAME_AS.get(lowering, _FUSED))}",
        ", ".join(spec.scope) or "kernels switched one by one",
        "remove torch.nn.attention.sdpa_kernel, or add the kernel to its list",
    )


def check_not_empty(spec: AttentionSpec) -> list[Reason]:
    """Require that every axis is known to have an element."""
    sizes = {"batch": spec.batch, "seqlen_q": spec.seqlen_q, "seqlen_kv": spec.seqlen_kv}
    empty = [f"{name} {size}" for name, size in sizes.items() if dims.range_of(spec, size)[0] < 1]
    if not empty:
        return []
    return refuse(Code.EMPTY, "no axis can be empty", ", ".join(empty), static_if_symbolic(*sizes.values()))


def _check_heads(spec: AttentionSpec) -> list[Reason]:
    heads_q, heads_kv = spec.num_heads_q, spec.num_heads_kv
    observed = f"num_heads_q {heads_q}, num_heads_kv {heads_kv}"
    if dims.same(heads_q, heads_kv) and dims.at_least(heads_q) >= 1:
        return []
    if not isinstance(heads_q, int) or not isinstance(heads_kv, int):
        return refuse(Code.SYMBOLIC, "the numbers of heads are known", observed)
    if heads_kv < 1 or heads_q % heads_kv:
        return refuse(Code.HEAD_GROUPS, "num_heads_q is a multiple of num_heads_kv", observed)
    return []


def check_grid(spec: AttentionSpec) -> list[Reason]:
    """Refuse batch or heads that exceed a grid's axes. A symbolic batch is taken to be below the limit, as PyTorch's own guard does."""
    sizes = {"batch": spec.batch, "num_heads_q": spec.num_heads_q}
    over = [f"{name} {size}" for name, size in sizes.items() if isinstance(size, int) and size > MAX_GRID]
    if not over:
        return []
    return refuse(Code.TOO_LARGE, f"batch and heads are at most {MAX_GRID}", ", ".join(over), "split the batch")


def check_head_dims(spec: AttentionSpec, *, multiple: int, limit: int | None = None) -> list[Reason]:
    """Check both head dims. multiple: they are multiples of it. limit: neither is larger."""
    reasons: list[Reason] = []
    for name, size in (("head_dim_qk", spec.head_dim_qk), ("head_dim_v", spec.head_dim_v)):
        if not isinstance(size, int):
            if multiple > 1 or limit is not None or dims.at_least(size) < 1:
                reasons += refuse(Code.SYMBOLIC, f"{name} is known", str(size))
        elif size < 1 or size % multiple:
            remedy = f"pad the heads with zeros to {-(-max(size, 1) // multiple) * multiple}, and keep the scale"
            reasons += refuse(Code.HEAD_DIM, f"{name} is a multiple of {multiple}", str(size), remedy)
        elif limit is not None and size > limit:
            reasons += refuse(Code.HEAD_DIM, f"{name} is at most {limit}", str(size))
    return reasons


def check_one_head_dim(spec: AttentionSpec) -> list[Reason]:
    if dims.same(spec.head_dim_qk, spec.head_dim_v):
        return []
    observed = f"head_dim_qk {spec.head_dim_qk}, head_dim_v {spec.head_dim_v}"
    return refuse(Code.HEAD_DIMS_DIFFER, "q, k and v have one head_dim", observed)


# ---- scores -------------------------------------------------------------------------------------------------------


def check_softcap(spec: AttentionSpec) -> list[Reason]:
    return [
        Reason(code=Code.SOFTCAP, rule="no softcap", observed=change.words)
        for change in spec.score.changes
        if isinstance(change, Softcap)
    ]


def check_known_changes(spec: AttentionSpec, understood: tuple[type[ScoreChange], ...]) -> list[Reason]:
    """Refuse score changes of unknown kinds. understood: the kinds that the kernel applies, and those that a check of their own refuses."""
    unknown = [change for change in spec.score.changes if not isinstance(change, understood)]
    rule = "score changes that this kernel applies"
    return [Reason(code=Code.SCORE_CHANGE, rule=rule, observed=change.words) for change in unknown]


def check_weights_unread(spec: AttentionSpec) -> list[Reason]:
    if not spec.returns_weights:
        return []
    remedy = "call the model with output_attentions=False (nn.MultiheadAttention: need_weights=False)"
    return refuse(Code.WEIGHTS_READ, "the attention weights have no other reader", "they are returned", remedy)


def check_lse(spec: AttentionSpec, most: LseUse) -> list[Reason]:
    """Refuse more than `most` that a site does with its logsumexp."""
    if spec.lse in ("unread", most) or most not in ("unread", "read"):
        return []
    is_read = "nothing reads the logsumexp of the scores"
    rule = is_read if most == "unread" else "the logsumexp of the scores has no gradient"
    return refuse(Code.LSE_READ, rule, f"it is {spec.lse}")


def check_scale(spec: AttentionSpec) -> list[Reason]:
    """Require a positive scale: masked scores are -inf before they are scaled, and the row maximum is taken before that too."""
    if spec.score.scale > 0:
        return check_largest_scale(spec)
    remedy = "negate q (-q), and give the positive scale" if spec.score.scale else None
    return refuse(Code.SCALE, "the scale is positive", f"{spec.score.scale:g}", remedy)


def check_largest_scale(spec: AttentionSpec) -> list[Reason]:
    """Refuse large scales. A kernel subtracts a row's rounded maximum from products that one instruction scales without rounding.

    Up to LARGEST_SCALE the two differ by less than one half for the scores that docs/numbers.md assumes. Far beyond, a weight overflows.
    """
    if abs(spec.score.scale) <= LARGEST_SCALE:
        return []
    return refuse(Code.SCALE, f"the scale is at most {LARGEST_SCALE:g}", f"{spec.score.scale:g}")


def static_if_symbolic(*sizes: Dim) -> str | None:
    """Return the remedy for sizes that are not known; None where all are."""
    return STATIC if any(isinstance(size, str) for size in sizes) else None
