"""What one attention is, as frozen data: imports neither FX nor CUDA.

Logical axis order is BHSD everywhere (batch, heads, sequence, head dim); `TensorSpec.strides` say how that is laid out.
A `Dim` is an int, or the name of a symbolic size ("s0"): equal names are equal sizes, and of the batch and the lengths a spec holds what
guards say (`SizeRange`). Nothing else is known of them.
The same `AttentionSpec` always gets the same decision, so layers that agree share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec import added_scores, fp8_recipe, masks, scores
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.codec import UNSAID, Codec
from attn_compiler.spec.fp8_recipe import Fp8Recipe

Dim = int | str

#: What becomes of a site's logsumexp, one number for each query. "merged": the site is a part of an attention, and what comes back for its
#: lse is minus delta (merging.py).
LseUse = Literal["unread", "read", "differentiated", "merged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One operand in logical BHSD order.

    shape: sizes, one for each logical axis.
    strides: in elements, one for each logical axis.
    dtype: torch's name without the prefix ("bfloat16").
    requires_grad: the tensor wants a gradient.
    """

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: str
    requires_grad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRange:
    """What guards ask of a symbolic size in every call, so it is never this call's size.

    size: the symbolic size.
    least, most: it is from `least` to `most`, both included; None is no end.
    """

    size: str
    least: int
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSpec:
    """What a cache in FP8 holds of k and v, in logical BHSD order.

    k, v: the tensors of the cache.
    k_scaled: the model multiplies k by a number that is a tensor.
    v_scaled: the model multiplies v by a number that is a tensor.
    """

    k: TensorSpec
    v: TensorSpec
    k_scaled: bool = False
    v_scaled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """What k and v are made of where both are linear maps of one tensor, the latent, as in multi-head latent attention (MLA).

    Of head h, k is [latent · W_UK[h]ᵀ, rope] and v is latent · W_UV[h]ᵀ. The rope part is one for all heads.

    latent: (B, 1, Skv, rank).
    rope: (B, 1, Skv, Dqk - nope); None where all of k is made of the latent.
    nope: how many of k's dims are made of the latent.
    nope_first: these come before those of the rope part.
    """

    latent: TensorSpec
    rope: TensorSpec | None
    nope: int
    nope_first: bool = True

    @property
    def rank(self) -> Dim:
        return self.latent.shape[3]

    @property
    def kept(self) -> int:
        """Numbers that a key is made of: the latent's and the rope part's."""
        sizes = (self.rank, 0 if self.rope is None else self.rope.shape[3])
        return sum(size for size in sizes if isinstance(size, int))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """softmax(score(q kᵀ)) v, with everything that a lowering may decide on.

    Query head h reads kv head h // (Hq // Hkv); Hkv divides Hq.

    q: (B, Hq, Sq, Dqk).
    k: (B, Hkv, Skv, Dqk).
    v: (B, Hkv, Skv, Dv).
    mask: which pairs of a query and a key take part.
    score: how the scores are scaled, changed and added to.
    device: "cpu" or "cuda".
    out_dtype: the dtype that the model goes on with.
    needs_grad: the output of the site is differentiated.
    returns_weights: something besides the product with v reads the attention weights.
    decomposed: the model spells out the products and the softmax. A site that is left alone gets Inductor's own code then, and not the
        kernel that SDPA picks.
    fp8: the user's recipe without its patterns, if the recipe applies to the site.
    stored: the cache in FP8 that k and v come from. A kernel may read the cache in their place.
    latent: what k and v are linear maps of. A lowering may read that in their place.
    no_latent: why k and v are not, where they are nearly.
    lse: the logarithm of each query's sum of exponentiated scores, (B, Hq, Sq), is read besides the output, and has a gradient.
    ranges: of a symbolic batch and symbolic lengths, where guards say more than the name does. Ask `dims.range_of`.
    of_bfloat16: q, k, v and the gradient of the output are numbers of bfloat16, which a model that trains holds in float32.
    scope: the kernels of PyTorch that the model's sdpa_kernel scope leaves, by their names; None: all.
    """

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    mask: masks.MaskSpec
    score: scores.ScoreSpec
    device: str
    out_dtype: str
    needs_grad: bool = False
    returns_weights: bool = False
    decomposed: bool = False
    fp8: Fp8Recipe | None = None
    stored: StoredSpec | None = None
    latent: LatentSpec | None = None
    no_latent: Reason | None = None
    lse: LseUse = field(default="unread", metadata=UNSAID)
    ranges: tuple[SizeRange, ...] = field(default=(), metadata=UNSAID)
    of_bfloat16: bool = field(default=False, metadata=UNSAID)
    scope: tuple[str, ...] | None = field(default=None, metadata=UNSAID)

    @property
    def batch(self) -> Dim:
        return self.q.shape[0]

    @property
    def num_heads_q(self) -> Dim:
        return self.q.shape[1]

    @property
    def num_heads_kv(self) -> Dim:
        return self.k.shape[1]

    @property
    def seqlen_q(self) -> Dim:
        return self.q.shape[2]

    @property
    def seqlen_kv(self) -> Dim:
        return self.k.shape[2]

    @property
    def head_dim_qk(self) -> Dim:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> Dim:
        return self.v.shape[3]

    @property
    def dtype(self) -> str:
        return self.q.dtype

    @property
    def is_gqa(self) -> bool:
        return self.num_heads_q != self.num_heads_kv

    @property
    def added_tensor(self) -> masks.Dense | scores.DenseBias | None:
        """The one tensor that joins the scores: the dense mask, else the bias."""
        return self.mask.dense or self.score.bias

    @property
    def adds_unread(self) -> bool:
        """Whether numbers are added that only run time knows: a query may get nothing but low ones, and then has no keys. Of a mask that
        was read in part it is known which numbers mask, and passes complete its rows."""
        tensor = self.mask.dense or self.score.bias
        formulas = [] if self.score.by_highest else self.score.proved
        is_low = any(isinstance(kind, added_scores.BiasFormula) and kind.may_shut_out for kind in formulas)
        is_unread = is_low or (self.mask.reason is not None and not self.mask.is_partial)
        return is_unread and tensor is not None and tensor.dtype != "bool"

    def to_text(self) -> str:
        """Canonical JSON: the same spec always gives the same text, and `from_text` gives the spec back."""
        return CODEC.text(self)

    @staticmethod
    def from_text(text: str) -> AttentionSpec:
        """Inverse of `to_text`, parsed once per text."""
        return CODEC.value(text, AttentionSpec)


#: the texts of specs, and what those of decisions on them build on
CODEC = Codec(
    (
        *masks.KINDS,
        *(masks.Dense, masks.Alignment, masks.Flag, Chosen),
        *scores.KINDS,
        *added_scores.PROVED_KINDS,
        *added_scores.PARTS,
        *fp8_recipe.PARTS,
        *(TensorSpec, SizeRange, StoredSpec, LatentSpec, Reason, Code, AttentionSpec, masks.MaskSpec, scores.ScoreSpec),
    )
)
