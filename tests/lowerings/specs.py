"""Specs for tests of decisions: no tensors, sizes may be symbols."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.base import Lowering
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec, Dim, LseUse, TensorSpec
from attn_compiler.spec.masks import Alignment, Causal, Dense, Flag, MaskSpec
from attn_compiler.spec.scores import DenseBias, ScoreChange, ScoreSpec
from attn_compiler.spec.target import Target

CAUSAL = MaskSpec(kinds=(Causal(),), flag=Flag.CALLED)
BOTTOM_RIGHT = MaskSpec(kinds=(Causal(alignment=Alignment.BOTTOM_RIGHT),), flag=Flag.CALLED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NewKind:
    """A mask kind that no lowering has heard of."""

    words: str = "a new kind of mask"


UNLISTED = MaskSpec(kinds=(NewKind(),))  # type: ignore[arg-type]


def dense(*shape: Dim, dtype: str = "bool") -> MaskSpec:
    return MaskSpec(dense=Dense(shape=shape, dtype=dtype))


def bias(*shape: Dim, dtype: str = "bfloat16", requires_grad: bool = True) -> DenseBias:
    return DenseBias(shape=shape, dtype=dtype, requires_grad=requires_grad)


def make_spec(
    *,
    batch: Dim = 2,
    heads: Dim = 8,
    heads_kv: Dim = 8,
    seqlen_q: Dim = 128,
    seqlen_kv: Dim = 128,
    head_dim: Dim = 64,
    head_dim_v: Dim | None = None,
    dtype: str = "bfloat16",
    mask: MaskSpec = MaskSpec(),  # noqa: B008 - frozen
    changes: tuple[ScoreChange, ...] = (),
    scale: float = 0.125,
    dropout_p: float = 0.0,
    softmax_dtype: str = "float32",
    device: str = "cuda",
    needs_grad: bool = True,
    returns_weights: bool = False,
    decomposed: bool = False,
    lse: LseUse = "unread",
) -> AttentionSpec:
    """Contiguous bfloat16 on a GPU, without a mask and with gradients, unless told otherwise."""

    def tensor(*shape: Dim) -> TensorSpec:
        return TensorSpec(shape=shape, strides=("s9", "s8", head_dim, 1), dtype=dtype, requires_grad=needs_grad)

    return AttentionSpec(
        q=tensor(batch, heads, seqlen_q, head_dim),
        k=tensor(batch, heads_kv, seqlen_kv, head_dim),
        v=tensor(batch, heads_kv, seqlen_kv, head_dim if head_dim_v is None else head_dim_v),
        mask=mask,
        score=ScoreSpec(scale=scale, changes=changes, dropout_p=dropout_p, softmax_dtype=softmax_dtype),
        device=device,
        out_dtype=dtype,
        needs_grad=needs_grad,
        returns_weights=returns_weights,
        decomposed=decomposed,
        lse=lse,
    )


def words(reasons: list[Reason]) -> str:
    return " | ".join(map(str, reasons))


def refusal(lowering: Lowering, spec: AttentionSpec, target: Target) -> list[Reason]:
    """All that a lowering has against a spec, as the choice asks for it: its kernels are built if there is nothing else."""
    return lowering.why_not(spec, target) or lowering.cannot_build(spec, target)
