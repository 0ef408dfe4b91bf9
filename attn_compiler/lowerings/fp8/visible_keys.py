"""The keys that some query may see, as far as the mask tells them cheaply. Other keys are rounded to 0, and count for no scale.

Kernels in FP8 multiply a tile of v by weights of 0 where pairs are not allowed, and 0 · NaN is NaN. The kernels that round read k and v
anyway, so they write 0 for invisible keys, for every reader: the forward, and the backward that restores k and v. A magnitude of an
invisible key would also cost visible ones bits.

Numbers of keys and bands give such keys; no kernel in FP8 takes other masks, but for the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts as parts
from attn_compiler.lowerings.shared.parts.intervals import K, Q
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q


def emit(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node | None:
    """Return bool (B|1, Skv), contiguous: False only for keys that no query of the batch row sees. None: True for all keys."""
    known = keys(spec)
    if known is None:
        return None
    # Sinks hide no keys.
    return part_tensors.emit_parts(emitter, spec, dataclasses.replace(operands, sinks=None), known)["keys"]


def keys(spec: AttentionSpec) -> Parts | None:
    """Return the same as a part of a mask. It shares the node of the mask's own part where they are equal."""
    found = parts.parts(spec)
    if found.keys_given:
        return Parts(keys_given=True)
    conditions = [*([] if found.keys is None else [found.keys]), *_row_bounds(found), *_band_bounds(found.band, spec)]
    if not conditions:
        return None
    return Parts(keys=ix.apply("and", *conditions) if len(conditions) > 1 else conditions[0])


def _row_bounds(found: Parts) -> Iterator[Expr]:
    """Yield an interval's sides that are the same for all queries."""
    if found.rows is None:
        return
    lower, upper = found.rows.lower, found.rows.upper
    if lower is not None and not ix.mentions(lower, Q):
        yield ix.compare(">=", K, lower)
    if upper is not None and not ix.mentions(upper, Q):
        yield ix.compare("<", K, upper)


def _band_bounds(band: Band | None, spec: AttentionSpec) -> Iterator[Expr]:
    """Yield the bounds at the first query's first key and at the last query's last key."""
    if band is None:
        return
    queries, keys = spec.seqlen_q, spec.seqlen_kv
    if band.right is not None:
        last = SEQLEN_KV if band.from_end else SEQLEN_Q
        beyond = 0 if band.from_end else _difference(queries, keys)
        if beyond is None or beyond + band.right < 0:
            yield ix.compare("<", K, ix.add(last, Const(band.right)))
    if band.left is not None:
        first = ix.add(SEQLEN_KV, SEQLEN_Q, -1) if band.from_end else ix.ZERO
        before = 0 if not band.from_end else _difference(keys, queries)
        if before is None or before - band.left > 0:
            yield ix.compare(">=", K, ix.add(first, Const(-band.left)))


def _difference(a: Dim, b: Dim) -> int | None:
    """Return a - b; None where that is not known."""
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return 0 if dims.same(a, b) else None
