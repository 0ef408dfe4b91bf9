"""Evidence of a choice, for the report: the row that gave the order, and an estimate of the time of a site. It decides nothing.

An estimate is computed from the speeds that fp8_speed.py holds. There is none where a part of it would be a guess.
"""

from __future__ import annotations

import math

from attn_compiler.lowerings.choice import fp8_speed, priorities, shape_class
from attn_compiler.reasons.decisions import Estimate, Evidence
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.target import Target

#: the kernel that PyTorch runs on the measured machine, with the model's own mask
_PYTORCHS = "sdpa_cudnn"
_SM = 90
#: products of a backward for each two of a forward
_BACKWARD = 2.5
#: queries of one tile. With fewer tiles than multiprocessors the GPU is not full, and measured speeds don't apply.
_TILE = 128
#: largest ratio between a site's number of keys or length and the measured one
_NEAR = 2.0


def evidence(spec: AttentionSpec, target: Target) -> Evidence | None:
    """Return the row of the machine and the site; None for a machine that no row knows."""
    row = priorities.row_of(spec, target)
    if row is None:
        return None
    length = None if row.sms is None else shape_class.words_of_any(spec)
    return Evidence(order=row.order, why=row.why, since=row.since, measured=row.measured, length=length)


def estimate(spec: AttentionSpec, target: Target, lowering: str) -> Estimate | None:
    """Estimate a site's time. None if nothing like it was measured: another GPU, mask or lowering, unknown or small sizes, dropout."""
    mine = fp8_speed.estimate(lowering, spec) if _was_measured(spec, target) else None
    work = _teraflop(spec)
    if mine is None or work is None or not _is_near(spec, mine):
        return None
    its = fp8_speed.estimate(_PYTORCHS, spec, mine)
    # An attention that the model writes out itself would run as Inductor's own code, which was not measured.
    is_comparable = its is not None and (its.keys, its.seqlen) == (mine.keys, mine.seqlen) and not spec.decomposed
    other = its if is_comparable and lowering != _PYTORCHS else None
    return Estimate(
        milliseconds=1000 * work / mine.tflops,
        other=None if other is None else _PYTORCHS,
        other_milliseconds=None if other is None else 1000 * work / other.tflops * _left_out(spec, other),
        like=f"{spec.dtype} and {mine.words}, H200",
        since=mine.since,
    )


def _was_measured(spec: AttentionSpec, target: Target) -> bool:
    tiles = [size for size in (spec.batch, spec.num_heads_q, spec.seqlen_q) if isinstance(size, int)]
    fills = len(tiles) == 3 and tiles[0] * tiles[1] * math.ceil(tiles[2] / _TILE) >= target.processors
    plain = shape_class.classify(spec).mask in ("window", "causal", "full")
    return target.sm == _SM and spec.dtype in HALF and spec.score.dropout_p == 0 and plain and fills


def _is_near(spec: AttentionSpec, row: fp8_speed.SpeedRow) -> bool:
    sizes = fp8_speed.sizes_of(spec)
    if sizes is None:
        return False
    pairs = zip(sizes, (row.keys, row.seqlen), strict=True)
    return all(0 < own <= _NEAR * measured and measured <= _NEAR * own for own, measured in pairs)


def _left_out(spec: AttentionSpec, row: fp8_speed.SpeedRow) -> float:
    """Return the ratio of PyTorch's work per allowed pair to that at the row's sizes: beside a window it computes all pairs."""
    sizes = fp8_speed.sizes_of(spec)
    if row.mask != "window" or sizes is None:
        return 1.0
    keys, seqlen = sizes
    return (seqlen / keys) / (row.seqlen / row.keys)


def _teraflop(spec: AttentionSpec) -> float | None:
    """Return 1e-12 times the operations of the matrix products, for the pairs that positions allow."""
    sizes = fp8_speed.sizes_of(spec)
    known = (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.head_dim_qk, spec.head_dim_v)
    numbers = [size for size in known if isinstance(size, int)]
    if sizes is None or len(numbers) < len(known):
        return None
    batch, heads, queries, dim_qk, dim_v = numbers
    forward = 2.0 * batch * heads * queries * sizes[0] * (dim_qk + dim_v)
    return forward * (1 + _BACKWARD if spec.needs_grad else 1) / 1e12
