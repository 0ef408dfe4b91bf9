"""Choice of the sites that are timed when they are compiled, and of the lowerings that are timed there.

A site is timed unless a row was measured near it: at its head dim, at its class of lengths, with enough work to fill the GPU.

Of 216 sites in sites_h200.csv, before short_rows.py, the first lowering of the rows was within 3% of the fastest at 47%. One of those that
are timed here was at 92%.
"""

from __future__ import annotations

import math

from attn_compiler.lowerings.choice import priorities, shape_class
from attn_compiler.lowerings.choice.rows import MOST_QUERIES
from attn_compiler.spec import reads
from attn_compiler.spec.added_scores import Bias
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.mask_kinds import Document, KeyBound, KeyPadding
from attn_compiler.spec.target import Target

#: PyTorch's kernels need no compilation, and Triton's need little
_QUICK = ("triton", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
#: only for sites with much work: they take seconds to compile or build
_SLOW = ("hopper", "cudnn")
_MUCH_WORK = 1e10
#: sizes from which a measured row applies: its length, and a quarter of its elements of q (benchmarks/select_rows.py)
_LEAST_SEQLEN = 1024
_LEAST_ELEMENTS = 1 << 23
#: bytes of a site's tensors and of their gradients, at most
_MOST_BYTES = 1 << 30
#: pairs of one mask, at most
_MOST_PAIRS = 1 << 26


def lowerings_for(spec: AttentionSpec, target: Target, first: str) -> tuple[str, ...]:
    """Return the lowerings to time, `first` among them; none where the site is not timed. Some of them may not take the site."""
    if why_not(spec, target) is not None:
        return ()
    few = ("decode",) if isinstance(spec.seqlen_q, int) and spec.seqlen_q <= MOST_QUERIES else ()
    slow = _SLOW if _work(spec) >= _MUCH_WORK else ()
    return tuple(dict.fromkeys((first, *few, *_QUICK, *slow)))


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """Return why a site is not timed; None if it is."""
    if target.device != "cuda" or target.packaged or target.triton_interpreted:
        return "it runs on another machine, or without a GPU"
    if spec.dtype not in HALF or spec.fp8 is not None or spec.stored is not None or spec.latent is not None:
        return "its kernels are chosen by dtype, or read a cache"
    if spec.score.dropout_p or spec.lse != "unread" or spec.returns_weights or spec.mask.own_rows is not None:
        return "few lowerings take it"
    if not all(isinstance(size, int) for x in (spec.q, spec.k, spec.v) for size in (*x.shape, *x.strides)):
        return "a size is symbolic"
    return _why_not_values(spec) or ("a row was measured near it" if _is_near(spec, target) else None)


def _why_not_values(spec: AttentionSpec) -> str | None:
    """Return why no tensors can stand for those that the site reads."""
    mask = spec.mask
    if mask.is_partial or mask.chosen is not None or mask.out_of_reach or spec.score.out_of_reach:
        return "what its mask holds is not known in full"
    if any(
        reads.names(kind) - {"Sq", "Skv"} and not isinstance(kind, KeyPadding | KeyBound | Document)
        for kind in mask.kinds
    ):
        return "its mask reads numbers that only a run knows"
    if any(
        kind.requires_grad and not isinstance(kind, Bias)
        for kind in spec.score.proved
        if hasattr(kind, "requires_grad")
    ):
        return "a table has a gradient, which another kernel may compute"
    pairs = _product((spec.batch, spec.seqlen_q, spec.seqlen_kv)) if spec.added_tensor else 0
    if bytes_of(spec) > _MOST_BYTES or pairs > _MOST_PAIRS:
        return "it takes much memory"
    return None


def _is_near(spec: AttentionSpec, target: Target) -> bool:
    """Return whether a row's lowerings were timed together on such a shape. Rows of classes are measured at their largest head dim."""
    row, shape = priorities.row_of(spec, target), shape_class.classify(spec)
    return (
        row is not None
        and bool(row.times)
        and row.head_dims is not None
        and shape.head_dim == row.head_dims[1]
        and shape.seqlens[0] >= _LEAST_SEQLEN
        and (shape.elements or 0) >= _LEAST_ELEMENTS
    )


def _work(spec: AttentionSpec) -> float:
    """Return the operations of the matrix products for all pairs, with the backward's."""
    pairs = _product((spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv))
    widths = _number(spec.head_dim_qk) + _number(spec.head_dim_v)
    return 2.0 * pairs * widths * (3.5 if spec.needs_grad else 1.0)


def bytes_of(spec: AttentionSpec) -> int:
    """Return the bytes of a site's tensors and their gradients, in half precision."""
    elements = sum(_product(x.shape) for x in (spec.q, spec.q, spec.k, spec.v))
    bias = spec.score.bias
    added = 0 if bias is None else _product(bias.shape)
    return 2 * (elements + added) * (2 if spec.needs_grad else 1)


def _product(sizes: tuple[int | str, ...]) -> int:
    return math.prod(map(_number, sizes))


def _number(size: int | str) -> int:
    """Return 1 for a symbolic size, which `why_not` has refused."""
    return size if isinstance(size, int) else 1
