"""What PyTorch's own attention kernels can't do, as reasons: the checks that several of them share.

They follow `sdp_utils.cpp` and `sdp_utils_cpp.h` of torch 2.11 to 2.15, which choose a kernel inside
`scaled_dot_product_attention`: a kernel called directly does not repeat them, and may return wrong numbers.
Every function returns reasons; none means that the check holds. A symbolic size passes only what is known of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from attn_compiler import dims, scores
from attn_compiler.codes import Code
from attn_compiler.decisions import Reason
from attn_compiler.dtypes import BYTES, HALF
from attn_compiler.masks import Alignment, Dense, KeyBound, KeyPadding
from attn_compiler.scores import DenseBias, ScoreChange, Softcap, Unusual
from attn_compiler.spec import AttentionSpec, Dim
from attn_compiler.target import Target

OLDEST_TORCH = (2, 11)
LAST_SM = 121
MAX_GRID = 65535
#: dtype of a site -> the largest number beside which a float32 lse has digits enough after the point: 13 bits for a float32 site. A site
#: in half precision gets all numbers of float16, beside which 8 bits are left.
LARGEST_ADDED = {"float32": 2048.0} | dict.fromkeys(HALF, 65504.0)
#: scores of 2^14 times this, in units of log 2, have a float32 neighbour one half away
LARGEST_SCALE = 256.0

LOWER_PRECISION = "call model.bfloat16(), or run it under torch.autocast"
STATIC = "compile with dynamic=False, or mark the length static"


def torch_release(version: str) -> tuple[int, int]:
    """(2, 13) for "2.13.0+cpu"; the oldest supported release, which has the narrowest limits, for ""."""
    return release(version) if version else OLDEST_TORCH


def release(version: str) -> tuple[int, int]:
    """(2, 13) for "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# ---- the machine --------------------------------------------------------------------------------------------------


def check_switch(kernel: str, target: Target) -> list[Reason]:
    """kernel: as in Target.disabled."""
    if kernel not in target.disabled:
        return []
    setter = {"efficient": "enable_mem_efficient_sdp"}.get(kernel, f"enable_{kernel}_sdp")
    remedy = f"torch.backends.cuda.{setter}(True), or leave the sdpa_kernel context"
    return [
        Reason(
            code=Code.SWITCHED_OFF,
            rule=f"PyTorch's {kernel} attention is enabled",
            observed="switched off",
            remedy=remedy,
        )
    ]


def check_gpu(target: Target, *, first_sm: int) -> list[Reason]:
    if target.device != "cuda":
        return [
            Reason(
                code=Code.DEVICE,
                rule="runs on an NVIDIA GPU",
                observed=f"device {target.device}",
                remedy="move the model to cuda",
            )
        ]
    if first_sm <= target.sm <= LAST_SM:
        return []
    observed = f"sm{target.sm}" if target.sm else "no GPU that CUDA can use"
    return [
        Reason(code=Code.ARCHITECTURE, rule=f"GPU architecture from sm{first_sm} to sm{LAST_SM}", observed=observed)
    ]


def check_device(spec: AttentionSpec, device: str) -> list[Reason]:
    """The site's tensors have to be where the kernel runs."""
    if spec.device == device:
        return []
    return [Reason(code=Code.DEVICE, rule=f"q, k and v are on {device}", observed=f"device {spec.device}")]


# ---- types and shapes ---------------------------------------------------------------------------------------------


def check_dtypes(spec: AttentionSpec, allowed: Iterable[str]) -> list[Reason]:
    found = (spec.q.dtype, spec.k.dtype, spec.v.dtype)
    if len(set(found)) > 1:
        observed = ", ".join(f"{name} {dtype}" for name, dtype in zip("qkv", found, strict=True))
        return [
            Reason(
                code=Code.SEVERAL_DTYPES,
                rule="q, k and v have one dtype",
                observed=observed,
                remedy="cast them alike before the attention",
            )
        ]
    allowed = tuple(allowed)
    if spec.dtype in allowed:
        return []
    remedy = LOWER_PRECISION if spec.dtype in ("float32", "float64") else None
    return [Reason(code=Code.DTYPE, rule=f"q is {' or '.join(allowed)}", observed=spec.dtype, remedy=remedy)]


def check_softmax_dtype(spec: AttentionSpec) -> list[Reason]:
    """Kernels keep scores and softmax in float32 for every dtype below float64."""
    if spec.score.softmax_dtype != "float64" or spec.dtype == "float64":
        return []
    return [
        Reason(
            code=Code.SOFTMAX_DTYPE,
            rule="the softmax runs in at most float32",
            observed="float64",
            remedy="drop the cast to float64",
        )
    ]


def check_shapes(spec: AttentionSpec) -> list[Reason]:
    """k and v agree, nothing is empty, and the numbers of heads are known and divide."""
    reasons = []
    for axis, (in_k, in_v) in enumerate(zip(spec.k.shape[:3], spec.v.shape[:3], strict=True)):
        if not dims.same(in_k, in_v):
            name = ("batch", "num_heads_kv", "seqlen_kv")[axis]
            reasons.append(Reason(code=Code.SHAPES, rule=f"k and v have one {name}", observed=f"k {in_k}, v {in_v}"))
    if not dims.same(spec.batch, spec.k.shape[0]):
        reasons.append(
            Reason(code=Code.SHAPES, rule="q and k have one batch", observed=f"q {spec.batch}, k {spec.k.shape[0]}")
        )
    if not dims.same(spec.head_dim_qk, spec.k.shape[3]):
        observed = f"q {spec.head_dim_qk}, k {spec.k.shape[3]}"
        reasons.append(Reason(code=Code.SHAPES, rule="q and k have one head_dim", observed=observed))
    return reasons + check_not_empty(spec) + _check_heads(spec)


def check_not_empty(spec: AttentionSpec) -> list[Reason]:
    """Every axis is known to have an element."""
    sizes = {"batch": spec.batch, "seqlen_q": spec.seqlen_q, "seqlen_kv": spec.seqlen_kv}
    empty = [f"{name} {size}" for name, size in sizes.items() if dims.at_least(size) < 1]
    if not empty:
        return []
    return [
        Reason(
            code=Code.EMPTY,
            rule="no axis can be empty",
            observed=", ".join(empty),
            remedy=_static_if_symbolic(*sizes.values()),
        )
    ]


def _check_heads(spec: AttentionSpec) -> list[Reason]:
    heads_q, heads_kv = spec.num_heads_q, spec.num_heads_kv
    observed = f"num_heads_q {heads_q}, num_heads_kv {heads_kv}"
    if dims.same(heads_q, heads_kv) and dims.at_least(heads_q) >= 1:
        return []
    if not isinstance(heads_q, int) or not isinstance(heads_kv, int):
        return [
            Reason(
                code=Code.SYMBOLIC, rule="the numbers of heads are known", observed=observed, remedy="mark them static"
            )
        ]
    if heads_kv < 1 or heads_q % heads_kv:
        return [Reason(code=Code.HEAD_GROUPS, rule="num_heads_q is a multiple of num_heads_kv", observed=observed)]
    return []


def check_grid(spec: AttentionSpec) -> list[Reason]:
    """Batch and heads become grid axes. A symbolic batch is taken to be below the limit, as PyTorch's own guard does."""
    sizes = {"batch": spec.batch, "num_heads_q": spec.num_heads_q}
    over = [f"{name} {size}" for name, size in sizes.items() if isinstance(size, int) and size > MAX_GRID]
    if not over:
        return []
    return [
        Reason(
            code=Code.TOO_LARGE,
            rule=f"batch and heads are at most {MAX_GRID}",
            observed=", ".join(over),
            remedy="split the batch",
        )
    ]


def check_head_dims(spec: AttentionSpec, *, multiple: int, limit: int | None = None) -> list[Reason]:
    """multiple: both head dims are multiples of it. limit: neither is larger."""
    reasons: list[Reason] = []
    for name, size in (("head_dim_qk", spec.head_dim_qk), ("head_dim_v", spec.head_dim_v)):
        if not isinstance(size, int):
            if multiple > 1 or limit is not None or dims.at_least(size) < 1:
                reasons.append(
                    Reason(code=Code.SYMBOLIC, rule=f"{name} is known", observed=str(size), remedy="mark it static")
                )
        elif size < 1 or size % multiple:
            remedy = f"pad it with zeros to {-(-max(size, 1) // multiple) * multiple} and keep the scale"
            reasons.append(
                Reason(
                    code=Code.HEAD_DIM, rule=f"{name} is a multiple of {multiple}", observed=str(size), remedy=remedy
                )
            )
        elif limit is not None and size > limit:
            reasons.append(Reason(code=Code.HEAD_DIM, rule=f"{name} is at most {limit}", observed=str(size)))
    return reasons


def check_one_head_dim(spec: AttentionSpec) -> list[Reason]:
    if dims.same(spec.head_dim_qk, spec.head_dim_v):
        return []
    observed = f"head_dim_qk {spec.head_dim_qk}, head_dim_v {spec.head_dim_v}"
    return [
        Reason(
            code=Code.HEAD_DIMS_DIFFER,
            rule="q, k and v have one head_dim",
            observed=observed,
            remedy="pad the smaller one with zeros",
        )
    ]


# ---- scores -------------------------------------------------------------------------------------------------------


def check_softcap(spec: AttentionSpec) -> list[Reason]:
    remedy = "if accuracy allows, switch it off in the model's config (Gemma 2: attn_logit_softcapping=None)"
    return [
        Reason(code=Code.SOFTCAP, rule="no softcap", observed=change.words, remedy=remedy)
        for change in spec.score.changes
        if isinstance(change, Softcap)
    ]


def check_known_changes(spec: AttentionSpec, understood: tuple[type[ScoreChange], ...]) -> list[Reason]:
    """understood: the kinds that the kernel applies, and those that a check of their own refuses. A kind that is new is in no such list."""
    unknown = [change for change in spec.score.changes if not isinstance(change, understood)]
    own = "score changes that have a kind of their own"
    return [
        Reason(
            code=Code.SCORE_CHANGE,
            rule=own if isinstance(change, Unusual) else "score changes that this kernel applies",
            observed=change.words,
        )
        for change in unknown
    ]


def check_weights_unread(spec: AttentionSpec) -> list[Reason]:
    if not spec.returns_weights:
        return []
    remedy = "call the model with output_attentions=False (nn.MultiheadAttention: need_weights=False)"
    return [
        Reason(
            code=Code.WEIGHTS_READ,
            rule="the attention weights have no other reader",
            observed="they are returned",
            remedy=remedy,
        )
    ]


def check_scale(spec: AttentionSpec) -> list[Reason]:
    """Masked scores are -inf before they are scaled, and a row's largest score is looked for before that too."""
    if spec.score.scale > 0:
        return check_largest_scale(spec)
    return [
        Reason(
            code=Code.SCALE,
            rule="the scale is positive",
            observed=f"{spec.score.scale:g}",
            remedy="put its sign into q",
        )
    ]


def check_largest_scale(spec: AttentionSpec) -> list[Reason]:
    """A kernel subtracts a row's largest score, which is rounded, from products that one instruction scales without rounding.

    Up to LARGEST_SCALE the two differ by less than one half for scores that are assumed (docs/numbers.md). Far beyond, a weight overflows.
    """
    if abs(spec.score.scale) <= LARGEST_SCALE:
        return []
    rule, remedy = f"the scale is at most {LARGEST_SCALE:g}", "scale q in the model, before the product"
    return [Reason(code=Code.SCALE, rule=rule, observed=f"{spec.score.scale:g}", remedy=remedy)]


# ---- masks --------------------------------------------------------------------------------------------------------


def additive(spec: AttentionSpec) -> Dense | DenseBias | None:
    """The one tensor that joins the scores: the dense mask, else the bias."""
    return spec.mask.dense or spec.score.bias


def causal_flag(spec: AttentionSpec) -> bool:
    """`is_causal` for a kernel whose diagonal starts top left. Only asked where `check_causal` found nothing."""
    return spec.mask.is_causal and not _is_bottom_right_of_one_row(spec)


def bottom_right(spec: AttentionSpec) -> bool:
    """Whether a causal mask starts bottom right and that makes a difference."""
    flagged = spec.mask.flagged
    aligned = flagged is not None and flagged.alignment is Alignment.BOTTOM_RIGHT
    return aligned and not dims.same(spec.seqlen_q, spec.seqlen_kv)


def check_causal(spec: AttentionSpec) -> list[Reason]:
    """For a kernel whose diagonal starts top left."""
    if not bottom_right(spec) or _is_bottom_right_of_one_row(spec):
        return []
    remedy = STATIC if _static_if_symbolic(spec.seqlen_q, spec.seqlen_kv) else "pass as many queries as keys"
    return [
        Reason(
            code=Code.DIAGONAL,
            rule="the causal diagonal starts top left",
            observed=f"bottom right, {_lengths(spec)}",
            remedy=remedy,
        )
    ]


def check_causal_alone(spec: AttentionSpec) -> list[Reason]:
    """For a kernel that is not known to take a causal flag and a tensor at once."""
    if not spec.mask.is_causal or additive(spec) is None:
        return []
    remedy = "put the diagonal into the mask tensor"
    return [
        Reason(
            code=Code.CAUSAL_AND_TENSOR,
            rule="a causal mask or a mask tensor, not both",
            observed=spec.mask.words,
            remedy=remedy,
        )
    ]


def check_masks(spec: AttentionSpec) -> list[Reason]:
    """A kind that neither a flag nor a tensor says is refused: what can't be applied must not be dropped."""
    remedy = "build the mask from comparisons of positions, or pass none"
    return [
        Reason(code=Code.MASK_KIND, rule="the mask is causal, a tensor, or both", observed=kind.words, remedy=remedy)
        for kind in spec.mask.held
        if additive(spec) is None
    ]


def check_no_tensor(spec: AttentionSpec) -> list[Reason]:
    """For a kernel that reads no mask tensor at all."""
    tensor = additive(spec)
    if tensor is None:
        return []
    remedy = "pass is_causal=True or no mask where the mask only says that"
    return [Reason(code=Code.MASK_TENSOR, rule="no mask tensor", observed=tensor.words, remedy=remedy)]


def check_tensor(spec: AttentionSpec, *, dtypes: Iterable[str]) -> list[Reason]:
    """One tensor, of a broadcast shape, as bool or one of `dtypes`, or of a narrower dtype that q's holds exactly."""
    tensor = additive(spec)
    if tensor is None:
        return []
    both = check_one_tensor(spec)
    if both:
        return both
    reasons = check_no_large_numbers(spec)
    pairs = (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv)
    if not dims.broadcasts(tensor.shape, pairs):
        reasons.append(
            Reason(code=Code.MASK_SHAPE, rule=f"the mask broadcasts to {_list(pairs)}", observed=_list(tensor.shape))
        )
    if tensor.dtype not in ("bool", *dtypes) and not _widens(tensor.dtype, spec.dtype):
        remedy = f"cast it to {spec.dtype} if rounding does it no harm (it does, to distances above 256)"
        rule = f"the mask is bool or {' or '.join(dict.fromkeys(dtypes))}"
        reasons.append(Reason(code=Code.MASK_DTYPE, rule=rule, observed=tensor.dtype, remedy=remedy))
    return reasons


def check_one_tensor(spec: AttentionSpec) -> list[Reason]:
    """A site has one node for what is added to its scores (see Operands)."""
    if spec.mask.dense is None or spec.score.bias is None:
        return []
    observed = f"{spec.mask.dense.words} and {spec.score.bias.words}"
    return [
        Reason(
            code=Code.TWO_TENSORS,
            rule="one tensor is added to the scores",
            observed=observed,
            remedy="add them up in the model",
        )
    ]


def check_no_large_numbers(spec: AttentionSpec) -> list[Reason]:
    """For a kernel whose backward makes the weights anew from its lse, in float32: beside 1e9 that can't hold the logarithm of a sum, so
    that each key that got the number counts as the only one. In float64 it can."""
    largest = LARGEST_ADDED.get(spec.dtype)
    if largest is None or not spec.needs_grad:
        return []
    remedy = "mask the other keys instead, by truth values or -inf; a number that all keys get changes no weight"
    rule = f"with gradients, numbers of at most {largest:g} are added to the scores of a {spec.dtype} site"
    large = [kind for kind in spec.score.proved if scores.largest(kind) > largest]
    reasons = [Reason(code=Code.LARGE_NUMBERS, rule=rule, observed=kind.words, remedy=remedy) for kind in large]
    if spec.score.softcap is not None and spec.score.softcap > largest:
        rule = f"with gradients, a softcap of at most {largest:g} for a {spec.dtype} site"
        reasons.append(
            Reason(
                code=Code.LARGE_NUMBERS, rule=rule, observed=f"{spec.score.softcap:g}", remedy="scale the scores less"
            )
        )
    return reasons


def check_no_keyless_rows(spec: AttentionSpec) -> list[Reason]:
    """For a kernel whose backward makes the weights anew from its lse, and gets a mask of finite numbers: beside numbers such as -1e9 an
    lse can't hold the logarithm of how many keys there are, so that each key of a query that has none counts as the only one."""
    tensor = additive(spec)
    if not spec.needs_grad or tensor is None or tensor.dtype == "bool" or not _may_lack_keys(spec):
        return []
    rule = "with gradients, numbers that mask leave each query some key"
    # Beside what is added, truth values would become numbers of the same tensor.
    remedy = None if spec.score.added else "give the mask as truth values"
    return [Reason(code=Code.KEYLESS_ROWS, rule=rule, observed=spec.mask.reason or spec.mask.words, remedy=remedy)]


def _may_lack_keys(spec: AttentionSpec) -> bool:
    """Whether a query may have no key while others of its sequence have some: one of a sequence that is all padding, nobody learns from."""
    if not spec.mask.held:
        # What a call of SDPA was given, its own kernel gets.
        return spec.decomposed and spec.mask.reason is not None
    padding = [isinstance(kind, KeyPadding | KeyBound) for kind in spec.mask.held]
    has_itself = all(kind.own_key for kind in spec.mask.held)
    return not has_itself or (any(padding) and not all(padding))


def check_no_bias_gradient(spec: AttentionSpec) -> list[Reason]:
    bias = spec.score.bias
    if bias is None or not (bias.requires_grad and spec.needs_grad):
        return []
    remedy = "freeze the bias, or run under torch.no_grad()"
    return [Reason(code=Code.BIAS_GRADIENT, rule="the bias needs no gradient", observed=bias.words, remedy=remedy)]


def lengths_reason(spec: AttentionSpec, rule: str) -> Reason:
    """A refusal for the two lengths; where they are symbolic, the remedy is to make them static."""
    remedy = _static_if_symbolic(spec.seqlen_q, spec.seqlen_kv)
    return Reason(code=Code.DIAGONAL, rule=rule, observed=_lengths(spec), remedy=remedy)


def _is_bottom_right_of_one_row(spec: AttentionSpec) -> bool:
    """A single query on the last row sees every key."""
    return bottom_right(spec) and spec.seqlen_q == 1


def _widens(dtype: str, to: str) -> bool:
    return BYTES.get(dtype, 8) < BYTES.get(to, 0)


def _static_if_symbolic(*sizes: Dim) -> str | None:
    return STATIC if any(isinstance(size, str) for size in sizes) else None


def _lengths(spec: AttentionSpec) -> str:
    return f"seqlen_q {spec.seqlen_q}, seqlen_kv {spec.seqlen_kv}"


def _list(shape: tuple[Dim, ...]) -> str:
    return f"({', '.join(str(size) for size in shape)})"
