"""Attention by its definition, for a leaf op whose kernel can't be compiled or launched.

    s = scale · (q kᵀ);  s = change(s);  s = s + bias + slopes;  p = softmax([s, sinks])[..., :Skv];  out = dropout(p) v

In float32, or float64 for float64, with the scores of some queries at a time in memory. Imports torch alone, so that it works where
Triton does not.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.spec.scores import Pointwise

#: scores in memory at a time, at most, unless one query has more
_MOST_SCORES = 1 << 25
#: constants of Philox-4x32: rounds, multipliers, and the increments of the keys after each round
_ROUNDS, _MULTIPLIERS, _KEYS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
#: equals tile_parts.LOW
_LOW = -1e8
#: factor that scales an int32 to a float below 1, from Triton's `uint_to_uniform_float`
_UNIFORM = 4.6566127342e-10


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention with its tensors.

    q, k, v: logical BHSD, as the model has them.
    tensors: the operands that are read here, by the names and in the forms of `kernel_plan.Plan`: rows, keys, documents_q, documents_k,
        mask, bias, distances, slopes, sinks, seed.
    scale, change: as in ScoreSpec.
    band: of `kernel_plan.Plan`.
    dropout_p: the share of weights that is dropped.
    means: the lse of rows that are the mean of v; None if none are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tensors: Mapping[str, Tensor]
    scale: float
    band: Band | None = None
    change: Pointwise | None = None
    dropout_p: float = 0.0
    means: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients in the compute dtype. further: of bias, distances and sinks, by name, if present."""

    q: Tensor
    k: Tensor
    v: Tensor
    further: Mapping[str, Tensor]


def forward(given: Attention) -> tuple[Tensor, Tensor]:
    """Return out (B, Hq, Sq, Dv) and lse (B, Hq, Sq) in the compute dtype.

    A row without any allowed key (and without a sink) gives 0 and an lse of -inf; with `means` -inf it gives the mean of v. `means` inf is
    for rows whose keys all got one low number: their lse is inf.
    """
    outs, lses = [], []
    whole = _Whole(given)
    for part in whole.parts():
        logits, _, allowed = part.logits()
        sinks = given.tensors.get("sinks")
        terms = logits
        if sinks is not None:
            column = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
            terms = torch.cat((logits, column), -1)
        lse = torch.logsumexp(terms, -1)
        if given.means == torch.inf:
            is_one = terms.amin(-1) == terms.amax(-1)
            lse = torch.where(is_one & (lse < _LOW) & (lse > -torch.inf), torch.inf, lse)
        # Softmax, and not exp(terms - lse): beside -1e9 the lse can't hold how many keys share a row.
        weights = torch.where((lse == -torch.inf)[..., None], 0.0, torch.softmax(terms, -1))
        outs.append(part.dropped(weights[..., : logits.shape[-1]]) @ part.values(allowed))
        lses.append(lse)
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    if given.means is not None:
        mean = given.v.to(whole.dtype).mean(2, keepdim=True)
        out = torch.where((lse == given.means)[..., None], _of_heads(mean, given.q.shape[1]), out)
    return out, lse


def backward(given: Attention, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return the gradients. out, lse: of the forward, or of all parts of an attention that is merged."""
    whole = _Whole(given)
    dtype, heads_kv = whole.dtype, given.k.shape[1]
    grad_q, further = [], whole.empty_gradients()
    grad_k = grad_v = torch.zeros((), dtype=dtype, device=given.q.device)
    for part in whole.parts():
        rows = part.rows
        grad, row_lse = grad_out[:, :, rows].to(dtype), lse[:, :, rows].to(dtype)
        logits, changed, allowed = part.logits()
        weights, keys, values = part.weights(logits, row_lse), part.keys(allowed), part.values(allowed)
        delta = (out[:, :, rows].to(dtype) * grad).sum(-1) - grad_lse[:, :, rows].to(dtype)
        of_weights = part.dropped(grad @ values.transpose(-1, -2))
        # Gradients of rows without keys may be anything.
        of_logits = torch.where(weights > 0, weights * (of_weights - delta[..., None]), 0.0)
        of_scores = score_changes.through(of_logits, changed, given.change) * given.scale
        grad_q.append(of_scores @ keys)
        grad_k = grad_k + _folded(of_scores.transpose(-1, -2) @ part.queries(allowed), heads_kv)
        grad_v = grad_v + _folded(part.dropped(weights).transpose(-1, -2) @ grad, heads_kv)
        part.add_gradients(further, of_logits, row_lse, delta)
    found = Gradients(q=torch.cat(grad_q, 2), k=grad_k, v=grad_v, further=further)
    return found if given.means is None else _with_means(given, found, grad_out.to(dtype), lse == given.means)


def _with_means(given: Attention, found: Gradients, grad_out: Tensor, are_means: Tensor) -> Gradients:
    """Add the gradients that flow through the means of v (keyless_gradient.py has the formulas)."""
    heads_q, heads_kv, count = given.q.shape[1], given.k.shape[1], given.k.shape[2]
    q, k, v = (x.to(grad_out.dtype) for x in (given.q, given.k, given.v))
    grad = torch.where(are_means[..., None], grad_out / count, 0.0)
    of_v = found.v + _folded(grad, heads_kv).sum(2, keepdim=True)
    apart = v - v.mean(2, keepdim=True)
    of_pairs = given.scale * apart.transpose(2, 3) @ k
    of_rows = given.scale * _folded(grad.transpose(2, 3) @ q, heads_kv)
    return dataclasses.replace(
        found, q=found.q + grad @ _of_heads(of_pairs, heads_q), k=found.k + apart @ of_rows, v=of_v
    )


def _of_heads(x: Tensor, heads_q: int) -> Tensor:
    """Repeat (B, Hkv, ...) to (B, Hq, ...)."""
    return x.repeat_interleave(heads_q // x.shape[1], 1)


class _Whole:
    """An attention, and its split into parts that fit into memory."""

    def __init__(self, given: Attention) -> None:
        self.given = given
        self.dtype = computed_in(given.q.dtype)

    def parts(self) -> Iterator[_Part]:
        """Yield at least one part, so that outputs without queries have their shapes, too."""
        batch, heads, queries, _ = self.given.q.shape
        step = max(_MOST_SCORES // max(batch * heads * self.given.k.shape[2], 1), 1)
        for start in range(0, max(queries, 1), step):
            yield _Part(self, slice(start, min(start + step, queries)))

    def empty_gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros(x.shape, dtype=self.dtype, device=x.device)
            for name, x in self.given.tensors.items()
            if name in ("bias", "distances", "sinks")
        }


class _Part:
    """Some queries of an attention. rows: their slice."""

    def __init__(self, whole: _Whole, rows: slice) -> None:
        self.given, self.dtype, self.rows = whole.given, whole.dtype, rows
        self.seqlen_q, self.seqlen_kv = whole.given.q.shape[2], whole.given.k.shape[2]
        self.group = whole.given.q.shape[1] // max(whole.given.k.shape[1], 1)
        device = whole.given.q.device
        self.at_q = torch.arange(self.seqlen_q, device=device)[rows][:, None]
        self.at_k = torch.arange(self.seqlen_kv, device=device)

    def logits(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (B, Hq, rows, Skv) logits, -inf where a pair is not allowed, and changed scores; and which pairs are allowed,
        broadcastable."""
        allowed = self._allowed()
        raw = self.queries(allowed) @ self.keys(allowed).transpose(-1, -2) * self.given.scale
        changed = score_changes.applied(operator.call, raw, self.given.change)
        return torch.where(allowed, changed + self._added(), -torch.inf), changed, allowed

    def queries(self, allowed: Tensor) -> Tensor:
        """Return queries, with 0 in rows without any key: their values reach no result, even if they are NaN."""
        q = self.given.q[:, :, self.rows].to(self.dtype)
        return torch.where(allowed.any(-1, keepdim=True), q, 0.0)

    def keys(self, allowed: Tensor) -> Tensor:
        return self._seen(self.given.k, allowed)

    def values(self, allowed: Tensor) -> Tensor:
        return self._seen(self.given.v, allowed)

    def _seen(self, x: Tensor, allowed: Tensor) -> Tensor:
        """Repeat x for all query heads, with 0 at keys that none of these queries may use."""
        return torch.where(allowed.any(-2)[..., None], x.to(self.dtype).repeat_interleave(self.group, 1), 0.0)

    def weights(self, logits: Tensor, lse: Tensor) -> Tensor:
        """Return the weights; 0 in rows whose lse can't hold how many keys share them."""
        lost = lse.isinf() | ((lse < _LOW) & (lse.dtype == torch.float32))
        return torch.where(lost[..., None], 0.0, torch.exp(logits - lse[..., None]))

    def dropped(self, x: Tensor) -> Tensor:
        """Apply dropout to weights, or to their gradients."""
        p = self.given.dropout_p
        return torch.where(self._kept(p), x / (1.0 - p), 0.0) if p > 0 else x

    def _allowed(self) -> Tensor:
        """Return which pairs are allowed, bool (B|1, Hq|1, rows, Skv)."""
        given, band = self.given.tensors, self.given.band
        found = (self.at_k >= 0).expand(len(self.at_q), -1)[None, None]
        if band is not None:
            at = self.at_q + (self.seqlen_kv - self.seqlen_q if band.from_end else 0)
            found = found if band.left is None else found & (self.at_k >= at - band.left)
            found = found if band.right is None else found & (self.at_k <= at + band.right)
        if "rows" in given:
            first, end = given["rows"][:, :, None, self.rows, None]
            found = found & (self.at_k >= first) & (self.at_k < end)
        if "keys" in given:
            found = found & given["keys"][:, None, None, :]
        if "documents_q" in given:
            of_q, of_k = given["documents_q"][:, None, self.rows, None], given["documents_k"][:, None, None, :]
            found = found & (of_q == of_k)
        return found & self._of_rows(given["mask"]) if "mask" in given else found

    def _added(self) -> Tensor:
        given = self.given.tensors
        total = torch.zeros((), dtype=self.dtype, device=self.at_q.device)
        if "bias" in given:
            total = total + self._of_rows(given["bias"]).to(self.dtype)
        if "distances" in given:
            total = total + given["distances"][:, 0, self._places].to(self.dtype)
        if "slopes" in given:
            total = total + given["slopes"].to(self.dtype)[:, None, None] * (self.at_k - self.at_q)
        return total

    @property
    def _places(self) -> Tensor:
        """Index of each pair among numbers by distance."""
        return self.at_k - self.at_q + self.seqlen_q - 1

    def _of_rows(self, x: Tensor) -> Tensor:
        return x if x.shape[2] == 1 and self.seqlen_q != 1 else x[:, :, self.rows]

    def add_gradients(self, sums: dict[str, Tensor], of_logits: Tensor, lse: Tensor, delta: Tensor) -> None:
        """Add the gradients of bias, distances and sinks that these queries contribute."""
        if "bias" in sums:
            into = self._of_rows(sums["bias"])
            into += of_logits.sum_to_size(into.shape)
        if "distances" in sums:
            of_heads = of_logits.sum(0) if sums["distances"].shape[0] > 1 else of_logits.sum((0, 1))[None]
            sums["distances"][:, 0].index_add_(1, self._places.flatten(), of_heads.flatten(1))
        if "sinks" in sums:
            sinks = self.given.tensors["sinks"].to(self.dtype)[None, :, None]
            # A sink has no value to weigh: only the row's common term reaches it.
            sums["sinks"] -= (torch.exp(sinks - lse) * delta).sum((0, 2))

    def _kept(self, p: float) -> Tensor:
        """Return which weights dropout keeps, bool (B, Hq, rows, Skv), drawn as in kernels/tile_parts.py."""
        batch, heads = self.given.q.shape[:2]
        head = torch.arange(batch * heads, device=self.at_q.device).view(batch, heads, 1, 1)
        bits = philox(self.given.tensors["seed"], self.at_k, self.at_q, head)
        # Read as an int32, whose negative numbers are mirrored.
        signed = torch.where(bits > _WORD >> 1, _WORD - bits, bits)
        return signed.to(torch.float32) * _UNIFORM >= p


def philox(seed: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Return the first of the four numbers that Philox-4x32-10 gives for a counter whose fourth number is 0: int64, from 0 to 2³² − 1.

    seed: int64 of one element. first, second, third: int64, of shapes that broadcast.
    J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    a, b = _MULTIPLIERS
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1, c2, c3 = first, second, third, torch.zeros_like(third)
    for _ in range(_ROUNDS):
        # The product may wrap in int64; its lower 64 bits are right all the same.
        of_0, of_2 = a * c0, b * c2
        c0 = (of_2 >> 32 & _WORD) ^ c1 ^ key_0
        c2 = (of_0 >> 32 & _WORD) ^ c3 ^ key_1
        c1, c3 = of_2 & _WORD, of_0 & _WORD
        key_0, key_1 = key_0 + _KEYS[0] & _WORD, key_1 + _KEYS[1] & _WORD
    return c0


def _folded(grad: Tensor, heads: int) -> Tensor:
    """Sum query heads that read one kv head."""
    return torch.unflatten(grad, 1, (heads, -1)).sum(2) if heads else grad
