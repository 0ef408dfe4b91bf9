"""The attributes of a cuDNN plan besides its tensors' shapes and strides: pure data, made from a spec that cuDNN can serve.

cuDNN applies a band around one diagonal, a number of keys for each batch row, an additive tensor, sinks and dropout. `site_parts.parts`
finds these parts among the mask's proved kinds, as for all our kernels; the rest is refused here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attn_compiler.index_expr import Expr
from attn_compiler.lowerings.cudnn.takes import TAKES
from attn_compiler.lowerings.shared.limits import mask_limits
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.shared.parts.site_parts import PartKind, Parts
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.codec import Codec, Coded

#: cuDNN needs every tensor to begin at a multiple of this many bytes, a power of two
ALIGNMENT = 16
#: dtypes in FP8 of q, k, v and out, and of their gradients
FP8_DTYPE, FP8_GRADIENT_DTYPE = "float8_e4m3fn", "float8_e5m2"
_READ_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s")
#: every part that a graph can't express, its name in a refusal, and the remedy
_UNSERVED: tuple[tuple[tuple[PartKind, ...], str, str | None], ...] = (
    (
        ("keys",),
        "truth values of keys, which may be padded at the left or have holes",
        "make the mask of lengths (positions < length): a vector of truth values may have holes",
    ),
    (("rows",), "an interval of keys that differs by query, or begins after the first key", None),
    (("documents",), "documents", None),
    (("mask",), "a mask tensor of truth values", None),
    (("slopes", "distances"), "a bias by distance, as slopes or as a table", None),
)
#: operands by `CudnnCall.fp8`
SCALES: dict[str, tuple[str, ...]] = {
    "": (),
    "forward": (*_READ_SCALES, "scale_out"),
    "backward": (
        *_READ_SCALES,
        *("descale_out", "descale_grad_out", "descale_ds", "scale_ds", "scale_grad_q", "scale_grad_k", "scale_grad_v"),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CudnnCall(Coded):
    """Everything decided on a call at compile time. Equal calls on equal tensors share one plan.

    scale: the factor on q kᵀ.
    left: a query at position q uses keys from q - left on; None: from the first.
    right: a query at position q uses keys up to q + right; None: to the last.
    from_end: positions are counted so that the last query meets the last key.
    lengths: the keys of each batch row end at a length that is read at run time.
    counted: the lengths count all keys. They are given only so that cuDNN masks by them.
    bias: a tensor is added to the scores.
    bias_grad: the bias wants a gradient.
    sinks: one logit a head joins the scores.
    sinks_grad: the sinks want a gradient.
    dropout_p: the share of weights that is dropped.
    needs_grad: lse is written.
    deterministic: the backward adds up in a fixed order.
    fp8: "forward" or "backward" for a call in FP8, "" for any other. q, k, v and out are in FP8 then, the operands hold scales, and
        every row has a key.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    from_end: bool = False
    lengths: bool = False
    counted: bool = False
    bias: bool = False
    bias_grad: bool = False
    sinks: bool = False
    sinks_grad: bool = False
    dropout_p: float = 0.0
    needs_grad: bool = False
    deterministic: bool = False
    fp8: str = ""

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the run-time tensors in the order in which the leaf op takes them.

        bias: (B|1, Hq|1, Sq|1, Skv) in q's dtype. sinks: float32 (Hq,). lengths_q, lengths: int32 (B,), the numbers of queries and keys of
        a batch row. seed, offset: int64 (1,), of dropout. Scales: float32, one number each. Inputs were multiplied by 1 / descale, outputs
        are multiplied by scale; s are the softmax's weights, ds the gradients of the scores.
        """
        has = {
            "bias": self.bias,
            "sinks": self.sinks,
            "lengths_q": self.lengths,
            "lengths": self.lengths,
            "seed": self.dropout_p > 0,
            "offset": self.dropout_p > 0,
        }
        return (*(name for name, here in has.items() if here), *SCALES[self.fp8])

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the operands that get a gradient."""
        wants = {"bias": self.bias_grad, "sinks": self.sinks_grad}
        return tuple(name for name in self.operands if wants.get(name, False))

    @property
    def by_kernel(self) -> tuple[str, ...]:
        """Operands whose gradient cuDNN computes; the sinks' is left to the graph (cudnn_ops.in_graph)."""
        return tuple(name for name in self.differentiable if name != "sinks")

    @property
    def may_be_empty(self) -> bool:
        """True if a batch row may be without keys."""
        return self.lengths and not self.counted and not self.fp8


CudnnCall.codec = Codec((CudnnCall,), brief=True)


def call_of(spec: AttentionSpec, *, deterministic: bool) -> CudnnCall:
    """Return the call for a spec that `reasons` does not refuse."""
    found, band = parts(spec), band_of(spec)
    bias, sinks, dropout_p = spec.score.bias, spec.score.sinks, spec.score.dropout_p
    return CudnnCall(
        scale=spec.score.scale,
        left=band.left,
        right=band.right,
        from_end=band.from_end,
        lengths=found.rows is not None,
        bias=found.bias,
        bias_grad=found.bias and bias is not None and bias.requires_grad and spec.needs_grad,
        sinks=sinks is not None,
        sinks_grad=sinks is not None and sinks.requires_grad and spec.needs_grad,
        dropout_p=dropout_p,
        needs_grad=spec.needs_grad,
        deterministic=deterministic and spec.needs_grad,
    )


@functools.lru_cache(maxsize=1024)
def parts(spec: AttentionSpec) -> Parts:
    """Return the parts that cuDNN applies: the proved ones, or the model's own additive tensor where that adds more than a mask.

    A tensor that only masks is not added: cuDNN would compute the whole square then, and kernels that know the mask leave work out.
    """
    found = site_parts.parts(spec)
    tensor = spec.added_tensor
    if not TAKES.beyond(spec) or not found.kinds & site_parts.ADDED or tensor is None or tensor.dtype == "bool":
        return found
    # The tensor's mask may be proved and still be no part for cuDNN. The tensor holds the whole mask except the causal flag's.
    flagged = spec.mask.flagged
    right = None if flagged is None else Band(right=0, from_end=mask_limits.bottom_right(spec))
    return Parts(band=right, bias=True)


def reasons(spec: AttentionSpec) -> list[Reason]:
    """Return the reasons against the mask and the tensors that are added to the scores."""
    rule = "the mask is a band, a number of keys for each row, or a tensor that is added"
    beyond = parts(spec).kinds - TAKES.parts
    return [
        Reason(code=Code.MASK_KIND, rule=rule, observed=observed, remedy=remedy)
        for kinds, observed, remedy in _UNSERVED
        if not beyond.isdisjoint(kinds)
    ]


def length(spec: AttentionSpec) -> Expr | None:
    """Return the number of keys, over b, sizes and run-time tensors; None: all of them."""
    rows = parts(spec).rows
    return None if rows is None else rows.upper


def band_of(spec: AttentionSpec) -> Band:
    """Return the band without bounds that exclude no pair. `from_end` is False where both corners are the same, or no bound is left."""
    found = parts(spec).band or Band()
    left, right = found.left, found.right
    if not (isinstance(spec.seqlen_q, int) and isinstance(spec.seqlen_kv, int)):
        return found
    shift = spec.seqlen_kv - spec.seqlen_q if found.from_end else 0
    if right is not None and right + shift >= spec.seqlen_kv - 1:
        right = None
    if left is not None and spec.seqlen_q - 1 + shift <= left:
        left = None
    return Band(left=left, right=right, from_end=found.from_end and shift != 0 and (left, right) != (None, None))
