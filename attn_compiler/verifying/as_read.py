"""An attention as it was recovered from the model, computed pair by pair in any dtype: products and a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index
from attn_compiler.lowerings import score_changes
from attn_compiler.passes.graph.site import Site
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.verifying import pairs
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.pairs import Slice
from attn_compiler.verifying.values import NoValueError, Values


def allowed(site: Site, spec: AttentionSpec) -> Expr:
    """Return the condition that allows a pair."""
    causal = ix.compare("<=", Index("k"), Index("q")) if spec.mask.is_causal else ix.TRUE
    return ix.apply("and", site.condition or ix.TRUE, causal)


@dataclass(frozen=True, kw_only=True, eq=False)
class AsRead:
    """q (B, H, Q, D), k and v (B, Hkv, N, ·), sinks (H,). positions: of the queries, (Q,). loads, score_loads: tensors read by the mask and
    the biases."""

    site: Site
    spec: AttentionSpec
    values: Values
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    positions: torch.Tensor
    loads: Mapping[str, torch.Tensor]
    score_loads: Mapping[str, torch.Tensor]

    def run(self, dtype: torch.dtype | None = None, noise: Noise | None = None) -> torch.Tensor:
        """Return (B, H, Q, Dv). dtype: of every step; None: the model's own. noise: on every step."""
        batch, heads, queries, _ = self.q.shape
        wide = dtype or torch.promote_types(self.q.dtype, self.v.dtype)
        out = self.q.new_empty((batch, heads, queries, self.v.shape[3]), dtype=wide)
        with torch.no_grad(), torch.autocast(self.q.device.type, enabled=False):
            for at in self._slices():
                out[at.b, at.h, at.first : at.end] = self._slice(at, dtype, noise)
        return out

    def rows(self) -> torch.Tensor:
        """Return the rows that have any key: (B, H, Q, 1)."""
        found = self.q.new_ones((*self.q.shape[:3], 1), dtype=torch.bool)
        if allowed(self.site, self.spec) != ix.TRUE:
            for at in self._slices():
                found[at.b, at.h, at.first : at.end] = self._kept(at).any(-1, keepdim=True)
        return found

    def _slices(self) -> list[Slice]:
        return list(pairs.slices((*self.q.shape[:3], self.k.shape[2])))

    def _kept(self, at: Slice) -> torch.Tensor:
        size = (at.end - at.first, self.k.shape[2])
        return self._evaluated(allowed(self.site, self.spec), at, self.loads).expand(size)

    def _evaluated(self, x: Expr, at: Slice, loads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        device = self.q.device
        try:
            return pairs.evaluated(x, at, self.k.shape[2], self.values, loads, device, positions=self.positions)
        except (IndexError, ZeroDivisionError) as error:
            raise NoValueError(f"{ix.text(x, 80)} has no value for the whole sequence: {error}") from error

    def _slice(self, at: Slice, dtype: torch.dtype | None, noise: Noise | None) -> torch.Tensor:
        own, of_v = self.q.dtype, self.v.dtype
        narrow, last = dtype or own, dtype or torch.promote_types(own, of_v)

        def step(x: torch.Tensor, rounded: torch.dtype = own) -> torch.Tensor:
            return x if noise is None else noise.on(x, rounded)

        of_head = at.h // (self.q.shape[1] // self.k.shape[1])
        q = self.q[at.b, at.h, at.first : at.end].to(narrow)
        scores = step(step(q @ self.k[at.b, of_head].to(narrow).T) * self.spec.score.scale)
        change = self.spec.score.pointwise
        scores = score_changes.applied(lambda function, *given: step(function(*given)), scores, change)
        for kind in self.spec.score.proved:
            scores = step(scores + step(self._evaluated(kind.summand, at, self.score_loads).to(narrow)))
        kept = self._kept(at)
        scores = scores.masked_fill(~kept, -torch.inf).to(dtype or torch.promote_types(own, torch.float32))
        if self.sinks is not None:
            column = self.sinks[at.h].to(own).to(scores.dtype).expand(scores.shape[0], 1)
            scores = torch.cat((scores, column), -1)
        weights = step(scores.softmax(-1)[:, : kept.shape[1]])
        weights = torch.where(kept.any(-1, keepdim=True), weights, 0.0).to(last)
        return step(weights @ self.v[at.b, of_head].to(last), last if dtype is None else of_v)
