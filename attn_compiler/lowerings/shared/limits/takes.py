"""The sites that a family's kernels take, as data: one `Takes` a family. `refused` compares it with a site, and gives reasons.

A family's `limits.py` has the rules that no set difference can express: sizes that go together, versions, kernels with known bugs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_compiler.lowerings.shared.limits import common as limits, mask_limits
from attn_compiler.lowerings.shared.limits.common import LAST_SM
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.site_parts import ADDED, MASKING, PartKind
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec, LseUse
from attn_compiler.spec.dtypes import FULL
from attn_compiler.spec.scores import DenseBias, Pointwise, ScoreChange, Sinks, Softcap
from attn_compiler.spec.target import Target

#: the factor of q kᵀ. "positive": above 0 and not large. "moderate": of either sign, and not large.
Scales = Literal["positive", "moderate", "any"]

#: q's own dtype, in `Takes.tensors`
OWN = "q's own"


def since(sm: int) -> tuple[tuple[int, int], ...]:
    """Return the range of architectures from `sm` on."""
    return ((sm, LAST_SM),)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadDims:
    """Limits on head dims. multiple: of both, in half precision. in_full: the same in float32 and float64. most: None is no limit."""

    multiple: int
    in_full: int
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Takes:
    """Sites that a family takes.

    sms: architectures, from .. to, both included. None: it needs no GPU.
    dtypes: of q, k and v, in the order in which messages list them.
    changes: the kinds that it applies to the scores. A DenseBias is not among them: it is a part, or a tensor.
    parts: the parts that masks and biases may be made of. A family that applies the mask as the spec has it names all of them, too.
    tensors: dtypes of a mask or bias that it reads, besides bool. (): it reads none. None: its parts decide.
    head_dims: None: any.
    unequal_head_dims: that of v may be another than that of q and k.
    scales: see `Scales`.
    any_shape: an axis may be empty, and sizes of q, k and v need not be known to agree.
    many_blocks: batch and heads are no axes of a grid.
    symbolic_sizes: sizes and strides need not be known.
    float64_softmax: it keeps the softmax in float64 for a site in a narrower dtype.
    dropout, gradients: sites may have them.
    lse: the most that a site may do with its logsumexp. A family that differentiates it takes sites that are merged, too.
    """

    sms: tuple[tuple[int, int], ...] | None
    dtypes: tuple[str, ...]
    changes: tuple[type[ScoreChange], ...] = ()
    parts: frozenset[PartKind] = MASKING | ADDED
    tensors: tuple[str, ...] | None = None
    head_dims: HeadDims | None = None
    unequal_head_dims: bool = True
    scales: Scales = "positive"
    any_shape: bool = False
    many_blocks: bool = False
    symbolic_sizes: bool = True
    float64_softmax: bool = False
    dropout: bool = True
    gradients: bool = True
    lse: LseUse = "unread"

    def beyond(self, spec: AttentionSpec) -> frozenset[PartKind]:
        """Return the parts of a site that it does not take."""
        return parts.parts(spec).kinds - self.parts

    def check_parts(self, spec: AttentionSpec, rule: str) -> list[Reason]:
        """Refuse each of those parts. rule: with {} in place of its name."""
        kinds = sorted(self.beyond(spec))
        return [Reason(code=Code.MASK_KIND, rule=rule.format(kind), observed=spec.mask.words) for kind in kinds]


#: half precision in PyTorch's own kernels, which several families call
PYTORCH_HALF = ("float16", "bfloat16")

#: cuDNN's attention as PyTorch calls it. Head dims and tensors go by the versions of cuDNN and of PyTorch (cudnn_limits.py).
CUDNN = Takes(sms=since(80), dtypes=PYTORCH_HALF)


def check_gpu(takes: Takes, target: Target) -> list[Reason]:
    """Require a GPU of one of the architectures."""
    if takes.sms is None:
        return []
    reasons = limits.check_gpu(target, first_sm=takes.sms[0][0])
    if reasons or any(first <= target.sm <= last for first, last in takes.sms):
        return reasons
    ranges = (f"sm{first}" + (f" to sm{last}" if last != first else "") for first, last in takes.sms)
    return refuse(Code.ARCHITECTURE, f"GPU architecture {' or '.join(ranges)}", f"sm{target.sm}")


def refused(takes: Takes, spec: AttentionSpec) -> list[Reason]:
    """Return everything of a site that a family does not take, but for parts: each family has its own words for those."""
    return [
        *_check_changes(takes, spec),
        *limits.check_weights_unread(spec),
        *limits.check_lse(spec, takes.lse),
        *_check_scale(takes, spec),
        *mask_limits.check_masks(spec),
        *(() if takes.float64_softmax else limits.check_softmax_dtype(spec)),
        *(() if takes.any_shape else limits.check_shapes(spec)),
        *limits.check_dtypes(spec, takes.dtypes),
        *check_head_dims(takes, spec),
        *(() if takes.unequal_head_dims else limits.check_one_head_dim(spec)),
        *(() if takes.many_blocks else limits.check_grid(spec)),
        *(() if takes.gradients else _check_no_gradient(spec)),
        *(() if takes.dropout else _check_no_dropout(spec)),
        *(() if takes.symbolic_sizes else _check_known_sizes(spec)),
        *_check_tensors(takes, spec),
    ]


def _check_changes(takes: Takes, spec: AttentionSpec) -> list[Reason]:
    """Check score changes. A new kind is in no family's list, and gets the generic refusal."""
    return [
        *_check_one_pointwise(spec),
        *(() if Softcap in takes.changes else limits.check_softcap(spec)),
        *(() if Sinks in takes.changes else _check_no_sinks(spec)),
        *limits.check_known_changes(spec, (*takes.changes, Softcap, Sinks, DenseBias)),
    ]


def _check_one_pointwise(spec: AttentionSpec) -> list[Reason]:
    found = [change.words for change in spec.score.changes if isinstance(change, Pointwise)]
    if len(found) < 2:
        return []
    return refuse(Code.SCORE_CHANGE, "each score is changed once by itself", ", ".join(found))


def _check_no_sinks(spec: AttentionSpec) -> list[Reason]:
    if spec.score.sinks is None:
        return []
    return refuse(Code.SINKS, "no attention sinks", "one learned logit a head joins the softmax")


def _check_scale(takes: Takes, spec: AttentionSpec) -> list[Reason]:
    if takes.scales == "any":
        return []
    return limits.check_scale(spec) if takes.scales == "positive" else limits.check_largest_scale(spec)


def check_head_dims(takes: Takes, spec: AttentionSpec) -> list[Reason]:
    """Check each head dim by itself. The family's own limits check their combination."""
    taken = takes.head_dims
    if taken is None:
        return []
    multiple = taken.in_full if spec.dtype in FULL else taken.multiple
    return limits.check_head_dims(spec, multiple=multiple, limit=taken.most)


def _check_no_gradient(spec: AttentionSpec) -> list[Reason]:
    if not spec.needs_grad:
        return []
    remedy = "run inference under torch.no_grad() or torch.inference_mode(); training gets another kernel"
    return refuse(Code.GRADIENT, "no gradient is needed", "the output is differentiated", remedy)


def _check_no_dropout(spec: AttentionSpec) -> list[Reason]:
    if not spec.score.dropout_p:
        return []
    remedy = "set attention_dropout=0.0 in the model's config, or call model.eval()"
    return refuse(Code.DROPOUT, "no dropout", f"{spec.score.dropout_p:g}", remedy)


def _check_known_sizes(spec: AttentionSpec) -> list[Reason]:
    unknown = [
        f"{name} ({', '.join(map(str, of))})"
        for name, tensor in (("q", spec.q), ("k", spec.k), ("v", spec.v))
        for of in (tensor.shape, tensor.strides)
        if not all(isinstance(n, int) for n in of)
    ]
    if not unknown:
        return []
    rule = "every size and stride is known: a plan serves one shape, and none is built while a step runs"
    return refuse(Code.SYMBOLIC, rule, unknown[0], limits.STATIC)


def _check_tensors(takes: Takes, spec: AttentionSpec) -> list[Reason]:
    if takes.tensors is None:
        return []
    if not takes.tensors:
        return mask_limits.check_no_tensor(spec)
    return mask_limits.check_tensor(
        spec, dtypes=tuple(spec.dtype if dtype == OWN else dtype for dtype in takes.tensors)
    )
