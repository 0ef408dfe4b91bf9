"""Attention over the latent of k and v, as plain nodes, on any device. `shared/parts/latents.py` says when that costs less.

q is multiplied by the weight that makes k of the latent, and the result by the weight that makes v of it. So all heads of queries share one
head of keys and values, the latent itself. The latent is read twice, once for each product; neither k nor v is made.

All of it is float32 (float64 for float64), as in plain_math.py.
"""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.lowerings.base import Anywhere, Emitter, Operands
from attn_compiler.lowerings.plain import plain_math
from attn_compiler.lowerings.plain.takes import ABSORBED
from attn_compiler.lowerings.shared.limits import mask_limits
from attn_compiler.lowerings.shared.limits.takes import refused
from attn_compiler.lowerings.shared.parts import latents, unused
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.spec.target import Target


class Absorbed(Anywhere):
    """The sites that plain math takes, with few queries over a latent, without gradients."""

    name = "absorbed"

    def cannot_package(self) -> list[Reason]:
        return []

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        reasons = latents.check_latent(spec)
        return (
            reasons
            if spec.latent is None
            else [*reasons, *refused(ABSORBED, spec), *mask_limits.check_one_tensor(spec)]
        )

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        latent = spec.latent
        if latent is None:
            raise ValueError("the site has no latent")
        given, dtype = latents.given(operands), emitter.value(operands.q).dtype
        emitter.note(latents.note(spec, latent))

        def wide(node: fx.Node) -> fx.Node:
            return plain_math.cast(emitter, node, computed_in(dtype))

        c = _rows(emitter, wide(unused.without_unseen(emitter, spec, operands, given.latent)))
        nope, of_rope = latents.parts_of_q(emitter, latent, emitter.call(torch.mul, wide(operands.q), spec.score.scale))
        q = latents.by_heads(emitter, nope, wide(given.weight_k))
        scores = emitter.call(torch.bmm, _heads_as_rows(emitter, q), emitter.call(torch.transpose, c, 1, 2))
        if of_rope is not None and given.rope is not None:
            rope = _rows(emitter, wide(unused.without_unseen(emitter, spec, operands, given.rope, of_scores=True)))
            rows = _heads_as_rows(emitter, of_rope)
            scores = emitter.call(torch.baddbmm, scores, rows, emitter.call(torch.transpose, rope, 1, 2))
        scores = emitter.call(torch.unflatten, scores, 1, (spec.num_heads_q, -1))
        weights = plain_math.attention_weights(emitter, spec, operands, scores)
        out = emitter.call(
            torch.bmm, _heads_as_rows(emitter, plain_math.cast(emitter, weights, emitter.value(c).dtype)), c
        )
        out = emitter.call(torch.unflatten, out, 1, (spec.num_heads_q, -1))
        made = latents.by_heads(emitter, out, emitter.call(torch.transpose, wide(given.weight_v), 1, 2))
        return plain_math.cast(emitter, made, dtype)


def _rows(emitter: Emitter, node: fx.Node) -> fx.Node:
    """(B, 1, Skv, X) to (B, Skv, X)"""
    return emitter.call(torch.squeeze, node, 1)


def _heads_as_rows(emitter: Emitter, node: fx.Node) -> fx.Node:
    """(B, H, Sq, X) to (B, H · Sq, X)"""
    return emitter.call(torch.flatten, node, 1, 2)
