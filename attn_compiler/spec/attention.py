"""The spec of one attention, as frozen data: imports neither FX nor CUDA.

Logical axis order is BHSD everywhere (batch, heads, sequence, head dim); `TensorSpec.strides` give the physical layout. A `Dim` is an int,
or the name of a symbolic size ("s0"): equal names are equal sizes. Of the batch and the lengths a spec also holds the guards' bounds
(`SizeRange`). Nothing else is known of symbolic sizes.

The same `AttentionSpec` always gets the same decision, so equal layers share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec import added_scores, fp8_recipe, masks, reads, scores
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.codec import UNSAID, Codec, Coded
from attn_compiler.spec.fp8_recipe import Fp8Recipe

Dim = int | str

#: Use of a site's logsumexp, one number for each query. "merged": the site is a part of an attention, and its lse gets minus delta as its
#: gradient (merging.py).
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

    def with_zeros(self, multiple: int) -> TensorSpec:
        """Return a copy with zeros behind each head's numbers, up to a multiple of so many; the tensor itself where none are missing."""
        *others, width = self.shape
        if not isinstance(width, int) or width % multiple == 0:
            return self
        shape = (*others, -(-width // multiple) * multiple)
        strides: list[Dim] = [1]
        for size in shape[:0:-1]:
            step = strides[0]
            both = isinstance(size, int) and isinstance(step, int)
            strides.insert(0, size * step if both else f"({size})*({step})")  # type: ignore[operator]
        return replace(self, shape=shape, strides=tuple(strides))


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRange:
    """Bounds of a symbolic size by guards, valid in every call; never this call's size.

    size: the symbolic size.
    least, most: both included; None is no end.
    """

    size: str
    least: int
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSpec:
    """An FP8 cache of k and v, in logical BHSD order.

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
    """The source of k and v if both are linear maps of one tensor, the latent, as in multi-head latent attention (MLA).

    For head h, k is [latent · W_UK[h]ᵀ, rope] and v is latent · W_UV[h]ᵀ. All heads share the rope part.

    latent: (B, 1, Skv, rank).
    rope: (B, 1, Skv, Dqk - nope); None if all of k comes from the latent.
    nope: the number of k's dims that come from the latent.
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
        """Numbers stored for a key: the latent's and the rope part's."""
        sizes = (self.rank, 0 if self.rope is None else self.rope.shape[3])
        return sum(size for size in sizes if isinstance(size, int))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec(Coded):
    """softmax(score(q kᵀ)) v, with everything that a lowering may decide on.

    Query head h reads kv head h // (Hq // Hkv); Hkv divides Hq.

    q: (B, Hq, Sq, Dqk).
    k: (B, Hkv, Skv, Dqk).
    v: (B, Hkv, Skv, Dv).
    mask: the allowed pairs of a query and a key.
    score: scaling, changes and additions of the scores.
    device: "cpu" or "cuda".
    out_dtype: the dtype that the model goes on with.
    needs_grad: the output of the site is differentiated.
    returns_weights: something besides the product with v reads the attention weights.
    decomposed: the model spells out the products and the softmax. An untouched site then gets Inductor's own code, and not the kernel that
        SDPA picks.
    fp8: the user's recipe without its patterns, if the recipe applies to the site.
    stored: the cache in FP8 that k and v come from. A kernel may read the cache instead of k and v.
    latent: the source of k and v as linear maps. A lowering may read it instead of k and v.
    no_latent: why k and v have no latent, if they nearly do.
    lse: use of the logarithm of each query's sum of exponentiated scores, (B, Hq, Sq): read besides the output, or differentiated.
    ranges: of a symbolic batch and symbolic lengths, if guards say more than the name does. Ask `dims.range_of`.
    of_bfloat16: q, k, v and the gradient of the output hold numbers of bfloat16, though a training model stores them in float32.
    scope: names of PyTorch's kernels that the model's sdpa_kernel scope allows; None: all.
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
        """The one tensor added to the scores: the dense mask, else the bias."""
        return self.mask.dense or self.score.bias

    @property
    def has_pairs(self) -> bool:
        """True if the tensor that is added has an element for each pair of a query and a key."""
        tensor = self.added_tensor
        return tensor is not None and len(tensor.shape) > 1 and 1 not in tensor.shape[-2:]

    @property
    def is_proved(self) -> bool:
        """True if every condition and number of the tensor that is added is known, and none is itself an element for each pair."""
        held, added = self.mask.held, self.score.proved
        known = (*(kind.condition for kind in held), *(kind.summand for kind in added))
        is_whole = self.mask.reason is None and (self.score.bias is None or bool(added))
        return is_whole and bool(known) and not any(map(reads.is_over_pairs, known))

    def with_zeros(self, multiple: int) -> AttentionSpec:
        """Return the spec of the same attention with zeros behind each head's numbers; the spec itself where none are missing."""
        q, k, v = (x.with_zeros(multiple) for x in (self.q, self.k, self.v))
        return self if (q, k, v) == (self.q, self.k, self.v) else replace(self, q=q, k=k, v=v)

    @property
    def adds_unread(self) -> bool:
        """True if only run time knows the added numbers: a query may get low ones alone, and then has no keys. In a mask that was read in
        part, it is known which numbers mask, and passes complete its rows."""
        tensor = self.mask.dense or self.score.bias
        added = [] if self.score.by_highest else self.score.proved
        unknown = (added_scores.Bias, added_scores.BiasFormula)
        is_low = any(isinstance(kind, unknown) and kind.may_shut_out for kind in added)
        is_unread = is_low or (self.mask.reason is not None and not self.mask.is_partial)
        return is_unread and tensor is not None and tensor.dtype != "bool"


#: texts of specs, and the base of the texts of decisions
AttentionSpec.codec = Codec(
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
