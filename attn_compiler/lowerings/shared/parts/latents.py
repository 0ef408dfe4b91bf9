"""Attention over the latent of k and v: the sizes for which it costs less than making k and v, and its products as nodes.

Products for each key and layer, with H heads, rank r, n dims of k and v of v made of the latent, and Sq queries. Making k and v takes r ·
H(n + v), and using them H · Sq(n + v) more. Over the latent it is H · Sq · 2r, and r · H(n + v) · Sq for all keys together. So it is less
work where 1 / Sq > (2r - n - v) / (r(n + v)) + 1 / Skv, whatever batch and heads. For DeepSeek (512, 128 and 128) that is up to 170
queries.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LatentNodes, Operands
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec, LatentSpec
from attn_compiler.spec.dtypes import BYTES

#: The most queries that are taken: far below the number where both ways cost the same, so no kernel of either has to be measured.
MOST_QUERIES = 16


def crossover(spec: AttentionSpec, latent: LatentSpec) -> float:
    """Return the number of queries up to which there is less to multiply over the latent; infinite where it always is."""
    rank, made = latent.rank, _size(spec.head_dim_v) + latent.nope
    if not isinstance(rank, int):
        return 0.0
    of_keys = 1.0 / spec.seqlen_kv if isinstance(spec.seqlen_kv, int) else 0.0
    share = (2 * rank - made) / (rank * made) + of_keys
    return 1.0 / share if share > 0 else math.inf


def check_latent(spec: AttentionSpec) -> list[Reason]:
    """Return the reasons against computing over the latent, whatever kernel does it."""
    if spec.latent is None:
        rule = "k and v are linear maps of one latent"
        return [
            spec.no_latent or Reason(code=Code.LATENT, rule=rule, observed="they are not made of one in this graph")
        ]
    most = crossover(spec, spec.latent)
    reasons = []
    if not isinstance(spec.seqlen_q, int) or spec.seqlen_q > MOST_QUERIES or spec.seqlen_q >= most:
        rule = f"at most {MOST_QUERIES} queries, which are known, and fewer than {_rounded(most)}: from there on making k and v costs less"
        reasons += refuse(Code.LENGTHS, rule, f"seqlen_q {spec.seqlen_q}")
    if not isinstance(spec.num_heads_q, int) or not isinstance(spec.latent.rank, int):
        rule = "the numbers of heads and the rank are known"
        reasons += refuse(Code.SYMBOLIC, rule, f"num_heads_q {spec.num_heads_q}, rank {spec.latent.rank}")
    return reasons


def note(spec: AttentionSpec, latent: LatentSpec) -> str:
    """Return the remark in the report for a site that is computed over the latent."""
    heads, element = _size(spec.num_heads_q), BYTES.get(spec.dtype, 8)
    made = heads * (_size(spec.head_dim_qk) + _size(spec.head_dim_v))
    rope = latent.kept - _size(latent.rank)
    return (
        f"k and v of {heads} heads are read as the latent that they are made of: {latent.rank} + {rope} numbers of each key, "
        f"{latent.kept * element} bytes, in place of {made}, {made * element} bytes; to make them costs less from "
        f"{_rounded(crossover(spec, latent))} queries on"
    )


def _rounded(most: float) -> str:
    return "any number of" if math.isinf(most) else f"{math.ceil(most)}"


def _size(size: int | str) -> int:
    return size if isinstance(size, int) else 0


def parts_of_q(emitter: Emitter, latent: LatentSpec, q: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Split q into (B, Hq, Sq, nope) and, for the part of k that heads share, (B, Hq, Sq, p)."""
    rope = _size(latent.rope.shape[3]) if latent.rope is not None else 0
    first, other = (0, latent.nope) if latent.nope_first else (rope, 0)
    nope = emitter.call(torch.narrow, q, 3, first, latent.nope)
    return nope, emitter.call(torch.narrow, q, 3, other, rope) if rope else None


def by_heads(emitter: Emitter, x: fx.Node, weight: fx.Node) -> fx.Node:
    """Multiply (B, H, Sq, a) by (H, a, b), a matrix for each head: (B, H, Sq, b)."""
    heads, inner, _ = emitter.value(weight).shape
    queries = emitter.value(x).shape[2]
    rows = emitter.call(torch.Tensor.reshape, emitter.call(torch.transpose, x, 0, 1), heads, -1, inner)
    product = emitter.call(torch.bmm, rows, weight)
    return emitter.call(torch.transpose, emitter.call(torch.unflatten, product, 1, (-1, queries)), 0, 1)


def given(operands: Operands) -> LatentNodes:
    """Return the latent's nodes. Raises ValueError where there is no latent."""
    if operands.latent is None:
        raise ValueError("the site has no latent")
    return operands.latent
