"""How long kernels take by reasoning, where nothing was measured: the pairs that a kernel visits, and the bytes that it reads for each.

A call takes what its products take and what is read for each pair of a query and a key takes, one after the other. PyTorch's kernels get
a mask as a number in half precision for each pair and head, and visit every pair. Ours read what was proved by tiles, at no cost for a
pair, and visit the pairs that positions allow. What padding leaves out is not known before a call: nothing, here. Each head reads its
numbers from the L2 cache, which counts as memory does.

Speeds of machines are those of data sheets; `SHARES` has what part of that a kernel reaches. The figures compare kernels on one machine,
and estimate no times. They err to PyTorch's side: cuDNN's masks took longer on an H200 than they do here. Where the model says that
ours is faster with a mask, it was measured to be, in each case of select_h200.csv (tests/lowerings/choice/test_shape_class.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attn_compiler.lowerings.choice import fp8_speed, shape_class
from attn_compiler.lowerings.shared.parts import flags, site_parts
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import BYTES, HALF
from attn_compiler.spec.masks import Dense
from attn_compiler.spec.scores import DenseBias
from attn_compiler.spec.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Of a data sheet: dense products of half precision with sums in float32, and memory. card: whose."""

    teraflops: float
    gigabytes: float
    card: str


#: By architecture. Of several cards, the one whose memory is slowest beside its products.
#: Others count as the nearest older architecture.
MACHINES: Mapping[int, Machine] = {
    80: Machine(teraflops=312, gigabytes=2039, card="A100 80 GB"),
    86: Machine(teraflops=125, gigabytes=600, card="A10"),
    89: Machine(teraflops=121, gigabytes=300, card="L4"),
    90: Machine(teraflops=989, gigabytes=4800, card="H200"),
    100: Machine(teraflops=2250, gigabytes=8000, card="B200"),
    120: Machine(teraflops=209.5, gigabytes=1792, card="RTX 5090"),
}

#: the part of a data sheet's products that attention reaches at best: cuDNN on an H200, causal, S 8192, D 128 (612 of 989)
_BEST = 0.62
#: Times of the best kernel over a kernel's, by the largest head dim: of an H200, without a mask, S 8192, forward (select_h200.csv).
_OF_HOPPER: Mapping[str, Mapping[int, float]] = {
    "sdpa_cudnn": {64: 1.0, 128: 1.0, 256: 1.0},
    "sdpa_flash": {64: 0.63, 128: 0.56, 256: 0.45},
    "sdpa_efficient": {64: 0.29, 128: 0.28, 256: 0.22},
    "triton": {64: 0.98, 128: 0.76, 256: 0.57},
}
#: By the first architecture. Up to sm89 and from sm120 on all of these kernels use the same instructions, so they count as alike. Those of
#: sm100 were not measured, and count as on sm90: cuDNN and Triton know its instructions, PyTorch's other kernels do not.
SHARES: Mapping[int, Mapping[str, Mapping[int, float]]] = {
    80: {name: dict.fromkeys(by_head_dim, 1.0) for name, by_head_dim in _OF_HOPPER.items()},
    90: _OF_HOPPER,
    120: {name: dict.fromkeys(by_head_dim, 1.0) for name, by_head_dim in _OF_HOPPER.items()},
}

#: products of a forward, and of a forward with its backward
_FORWARD, _BOTH = 1.0, 3.5
#: bytes of a mask's number as PyTorch's kernels take it, and of a truth value
_NUMBER, _TRUTH = 2, 1
#: times that a backward reads what is added: PyTorch's kernels have one pass, ours one for dq and one for dk and dv
_READ_BY_PYTORCH, _READ_BY_OURS = 1, 2
_OURS = "triton"


def seconds(lowering: str, spec: AttentionSpec, target: Target) -> float | None:
    """Of one call, with its backward where the site needs gradients; None for a lowering or a site that the model says nothing of.

    Lengths that are not known are those that are chosen for (shape_class.py), and a batch that is not known is 1: it divides all alike.
    """
    machine, share = _machine(target.sm), _share(lowering, spec, target.sm)
    heads, head_dims = spec.num_heads_q, (spec.head_dim_qk, spec.head_dim_v)
    known = [size for size in head_dims if isinstance(size, int)]
    if (
        machine is None
        or share is None
        or spec.dtype not in HALF
        or not isinstance(heads, int)
        or len(known) < len(head_dims)
    ):
        return None
    batch = spec.batch if isinstance(spec.batch, int) else 1
    pairs = batch * heads * _pairs(lowering, spec)
    flops = 2.0 * sum(known) * (_BOTH if spec.needs_grad else _FORWARD)
    return pairs * (
        flops / (machine.teraflops * 1e12 * _BEST * share) + _read(lowering, spec) / (machine.gigabytes * 1e9)
    )


def _machine(sm: int) -> Machine | None:
    return MACHINES.get(max((known for known in MACHINES if known <= sm), default=0))


def _share(lowering: str, spec: AttentionSpec, sm: int) -> float | None:
    head_dim = shape_class.classify(spec).head_dim
    shares = SHARES.get(max((first for first in SHARES if first <= sm), default=0), {}).get(lowering)
    if shares is None or head_dim is None or head_dim > max(shares):
        return None
    return next(share for widest, share in sorted(shares.items()) if head_dim <= widest)


def _pairs(lowering: str, spec: AttentionSpec) -> float:
    """Of one head: those that positions allow, or all, if the kernel reads what is allowed from a tensor."""
    queries, keys = (shape_class.chosen_for(spec, size) for size in (spec.seqlen_q, spec.seqlen_kv))
    if lowering != _OURS and _tensor(lowering, spec) is not None:
        return float(queries * keys)
    return queries * fp8_speed.keys_in_band(site_parts.parts(spec).band, queries, keys)


def _tensor(lowering: str, spec: AttentionSpec) -> Dense | DenseBias | None:
    """What joins the scores, of a kernel that is told of a diagonal by a flag where that says all."""
    flagged = None if lowering == _OURS else flags.as_flag(spec)
    return (flagged or spec).added_tensor


def _read(lowering: str, spec: AttentionSpec) -> float:
    """Bytes for each pair and head, of what joins the scores."""
    tensor = _tensor(lowering, spec)
    if tensor is None:
        return 0.0
    if lowering != _OURS:
        return _NUMBER * (1 + (_READ_BY_PYTORCH if spec.needs_grad else 0))
    kinds = site_parts.parts(spec).kinds
    size = BYTES.get(tensor.dtype, _NUMBER) if "bias" in kinds else _TRUTH if "mask" in kinds else 0
    return size * (1 + (_READ_BY_OURS if spec.needs_grad else 0))


def cheapest(names: Iterable[str], spec: AttentionSpec, target: Target) -> str | None:
    """Of lowerings that take a site, the one that takes least; None where the model says nothing."""
    found = {name: cost for name in names if (cost := seconds(name, spec, target)) is not None}
    return min(found, key=found.__getitem__, default=None)
