"""Tile sizes of the Triton kernels, by machine, dtype, head dim, length and the parts that a kernel evaluates beside its products.

Rows are tried in order. sm90, half precision: the best of 5 to 8 tiles each on an H200, torch 2.11, Triton 3.6, 2026-11-21, causal,
S 8192, B·S·H·D = 32M, in TFLOP/s (cuDNN 9.19 and FlexAttention beside them in the same run):

    head dim      forward                    dq                    dk, dv                cuDNN       Flex
    64            64x64 w4 s3 r128: 443      64x64 w4 s3: 596      64x64 w4 s3: 454      457, 425    368, 282
    128           64x64 w4 s3: 486           128x64 w8 s3: 590     64x128 w8 s3: 527     604, 532    372, 373
    256           128x64 w8 s2: 421          128x32 w8 s2: 433     32x128 w8 s2 *: 339   630, 387
    192/128       128x64 w8 s3: 494          128x64 w8 s1: 386     32x64 w4 s2 *: 281
    72            64x64 w4 s2 r128: 294      64x64 w4 s3: 433      64x64 w4 s3: 373
    80            64x64 w4 s3 r168: 398      64x64 w4 s3: 499      64x64 w4 s3: 443
    96            64x64 w4 s2 r168: 395      64x64 w4 s3: 548      64x64 w4 s2: 455
    112           64x64 w4 s3: 377           128x64 w8 s3: 495     64x128 w8 s3: 453
    with a bias of all heads, D 128: 128x64 w8 s3: 370, 64x64 w4 s3: 282; D 64: 64x64 w4 s3: 304, 128x64 w8 s3: 226

* apart: dk and dv in a pass each (together 228 and 191 at best). With learned biases, which store the scores' gradients, B 8, S 2048, µs, a
bias / T5's table. dk and dv: D 64 64x64 w4 s3: 1521 / 1644 (32x64: 1742 / 1713), D 128 32x64 w4 s3: 1367 / 1370 (64x128 w8 s2: 1723 /
1787). dq and the other gradient: D 64 64x64 w4 s3: 905 / 866 (128x64 w4 s3: 974 / 926), D 128 64x64 w4 s3: 572 / 568, of spans of 64 / 256
queries. 128x64 w8 s3, whose registers leave room for one program, took 987 / 847.

Registers are capped (r) where the compiler's own choice is just above the number that lets one more program run on a multiprocessor (128
threads: 168 for three, 128 for four) and nothing inside loops is spilled for it. TFLOP/s without and with a cap:

    forward, D 64: causal S 8192 418, 443; S 2048 315, 332; window 331, 359; ALiBi 311, 334; no mask 467, 417 (so not capped)
        right padding 281, 349 (s2; 335 with s3 r168); left 239, 302 (281); documents 370, 354 (365) (so not)
    dq, D 64: left padding 332, 389; documents 446, 526
    D 72: causal 284, 294. D 80: causal 338, 398; left padding 220, 262, dq 292, 357. D 96: causal 388, 395; left padding 262, 286

dk and dv at D 128, 64x128 w8 s3 and 32x64 w4 s3: left padding (grouped heads) 342, 404; softcap 399, 457; window 391, 425. But causal
527, 491 (518 with 4 stages); no mask 583, 536; documents 471, 444; ALiBi 407, 406.

Head dims above 256: an H200, 2026-11-27 and 28 (benchmarks/results/wide_h200.csv, docs/kernels.md): forward 64x32 w8 s2: 198, of keys that
are the values 64x64 w8 s2: 309 (64x32: 214); dq 32x32 w4 s1: 151; dk and dv 32x32 w4 s2: 125. At 320, where more fits: 195, 174 and 139.

Other machines and float32 were compiled, not measured: their tiles are those that spill little (tests/lowerings/triton/kernels).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import BYTES
from attn_compiler.spec.target import Target

#: Parts that a kernel evaluates beside its products, which take registers: parts of a plan, and softcap. learned: a bias has a gradient, so
#: the scores' gradients are stored (without a pointwise change, and up to the size that triton/launch.py sets).
Part = Literal["bias", "distances", "rows", "keys", "documents", "mask", "band", "window", "softcap", "learned"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRow:
    """Tiles of every spec whose element size is at most `bytes`, whose head dims are at most `head_dim`, on a GPU from `first_sm` on. It
    has at most `seqlen_q` queries (None: any), and one of the parts in `holds` (if any are given).

    small: for machines with little shared memory alone (`is_small`).
    listed_grad_q: for dq where it visits the forward's lists. So it has the forward's keys, and all or a part of its queries.
    """

    bytes: int
    head_dim: int
    seqlen_q: int | None = None
    first_sm: int = 0
    small: bool = False
    holds: tuple[Part, ...] = ()
    tiles: Tiles
    listed_grad_q: Tile


def _row(
    bytes: int,
    head_dim: int,
    words: str,
    *,
    seqlen_q: int | None = None,
    first_sm: int = 0,
    small: bool = False,
    holds: tuple[Part, ...] = (),
) -> TileRow:
    """Return a row. words: of the forward, dq, dk and dv, and `listed_grad_q`."""
    forward, grad_q, grad_kv, listed = map(Tile.read, words.split(" | "))
    return TileRow(
        bytes=bytes,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        first_sm=first_sm,
        small=small,
        holds=holds,
        tiles=Tiles(forward=forward, grad_q=grad_q, grad_kv=grad_kv),
        listed_grad_q=listed,
    )


ROWS: tuple[TileRow, ...] = (
    # few queries
    _row(2, 128, "32x64 w4 s3 | 32x64 w4 s2 | 32x64 w4 s2 | 32x64 w4 s2", seqlen_q=32),
    _row(2, 256, "32x32 w4 s2 | 32x32 w4 s2 | 32x32 w8 s1 | 32x32 w4 s2", seqlen_q=32, small=True),
    _row(2, 256, "32x32 w4 s2 | 32x32 w4 s2 | 32x64 w8 s1 | 32x32 w4 s2", seqlen_q=32),
    _row(4, 256, "32x32 w8 s1 | 32x32 w8 s1 | 32x32 w8 s1 | 32x32 w8 s1", seqlen_q=32),
    # half precision
    _row(2, 64, "64x64 w4 s3 | 64x64 w4 s3 | 64x64 w8 s2 | 64x64 w4 s3", first_sm=100),
    _row(2, 64, "64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3", first_sm=90, holds=("bias", "distances")),
    _row(
        2,
        64,
        "64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3 r168",
        first_sm=90,
        holds=("documents", "rows", "mask"),
    ),
    _row(2, 64, "64x64 w4 s2 r128 | 64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3 r168", first_sm=90, holds=("keys",)),
    _row(2, 64, "64x64 w4 s3 r128 | 64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3", first_sm=90, holds=("band",)),
    _row(2, 64, "64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s3", first_sm=90),
    _row(2, 64, "64x64 w4 s3 | 64x64 w4 s3 | 32x128 w8 s2 | 64x64 w4 s3"),
    _row(2, 128, "128x64 w8 s3 | 128x64 w8 s2 | 32x64 w8 s2 | 128x64 w8 s2", first_sm=100, holds=("bias", "distances")),
    _row(2, 128, "64x64 w4 s3 | 128x64 w8 s3 | 32x64 w8 s2 | 64x64 w4 s2", first_sm=100),
    _row(2, 128, "128x64 w8 s3 | 64x64 w4 s3 | 32x64 w4 s3 | 128x64 w8 s2", first_sm=90, holds=("learned",)),
    _row(2, 128, "128x64 w8 s3 | 128x64 w8 s3 | 32x64 w4 s3 | 128x64 w8 s2", first_sm=90, holds=("bias", "distances")),
    _row(2, 72, "64x64 w4 s2 r128 | 64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s2 r168", first_sm=90),
    _row(2, 80, "64x64 w4 s3 r168 | 64x64 w4 s3 | 64x64 w4 s3 | 64x64 w4 s2 r168", first_sm=90),
    _row(2, 96, "64x64 w4 s2 r168 | 64x64 w4 s3 | 64x64 w4 s2 | 64x64 w4 s2", first_sm=90),
    _row(
        2,
        128,
        "64x64 w4 s3 | 128x64 w8 s3 | 32x64 w4 s3 | 64x64 w4 s2",
        first_sm=90,
        holds=("keys", "window", "softcap"),
    ),
    _row(2, 128, "64x64 w4 s3 | 128x64 w8 s3 | 64x128 w8 s3 | 64x64 w4 s2", first_sm=90),
    _row(2, 128, "64x32 w4 s3 | 64x64 w4 s2 | 64x64 w8 s1 | 64x32 w4 s2"),
    _row(2, 192, "128x64 w8 s3 | 128x64 w8 s1 | 32x64 w4 s2 apart | 128x64 w8 s1", first_sm=90),
    _row(2, 256, "128x64 w8 s2 | 128x32 w8 s2 | 32x128 w8 s2 apart | 128x64 w8 s1", first_sm=90),
    _row(2, 256, "64x32 w8 s2 | 32x32 w8 s1 | 32x32 w8 s1 | 32x32 w8 s1", small=True),
    _row(2, 256, "64x32 w8 s2 | 64x32 w4 s1 | 32x32 w8 s2 | 64x32 w8 s1"),
    # sums of 512 head dims leave room for few queries, or few keys, and dk and dv have a pass each
    _row(
        2,
        512,
        "32x32 w8 s1 | 16x32 w8 s1 | 32x16 w8 s1 apart | 16x32 w8 s1",
        small=True,
        holds=("mask", "bias", "distances"),
    ),
    _row(2, 512, "32x32 w8 s2 | 16x32 w8 s1 | 16x32 w8 s1 apart | 16x32 w8 s1", small=True),
    # tensor memory has no room for 512 columns of sums beside the scores: instructions of Ampere
    _row(2, 512, "32x32 w8 s2 | 32x32 w8 s1 | 32x32 w8 s2 apart | 32x32 w8 s1", first_sm=100),
    _row(2, 384, "64x32 w8 s3 | 64x32 w8 s2 | 32x64 w8 s2 apart | 64x32 w8 s2", first_sm=90),
    _row(2, 512, "64x32 w8 s2 | 32x32 w4 s1 | 32x32 w4 s2 apart | 32x32 w4 s1", first_sm=90),
    _row(2, 512, "64x32 w8 s2 | 32x32 w8 s1 | 32x32 w8 s2 apart | 32x32 w8 s1"),
    # float32
    _row(4, 64, "64x32 w8 s2 | 32x32 w8 s1 | 32x64 w8 s1 | 64x32 w8 s1"),
    _row(4, 256, "32x32 w8 s1 | 32x32 w8 s1 | 32x32 w8 s1 | 32x32 w8 s1"),
)

#: the forward over keys that are the values, whose one tile leaves room for more keys; head dims above 256 on Hopper, without gradients
_ONE_KV = Tile.read("64x64 w8 s2")
_ONE_KV_HEAD_DIMS, _ONE_KV_SM = range(385, 513), 90

_FIRST_SM_LIKE_AMPERE = 120


def generation(target: Target) -> int:
    """Return the sm whose rows a machine takes: GeForce and workstation Blackwell have the tensor core instructions of Ampere, and less
    shared memory than Hopper."""
    return 80 if target.sm >= _FIRST_SM_LIKE_AMPERE else target.sm


def is_small(target: Target) -> bool:
    """Return whether a block has 99 KB of shared memory at most, where others have 163 or more."""
    return target.sm in (86, 87, 89) or target.sm >= _FIRST_SM_LIKE_AMPERE


def tiles_of_one(spec: AttentionSpec, target: Target) -> Tiles:
    """Return the tiles where keys are the values. With gradients they are those of `tiles`: the backward shares the lists of tiles."""
    found = tiles(spec, target)
    if spec.needs_grad or target.sm != _ONE_KV_SM or spec.head_dim_qk not in _ONE_KV_HEAD_DIMS:
        return found
    return dataclasses.replace(found, forward=_ONE_KV)


def tiles(spec: AttentionSpec, target: Target) -> Tiles:
    """Return the tiles of a spec that the Triton lowering takes. Raises LookupError where there is no row for it."""
    plan = parts.make_plan(spec)
    for row in ROWS:
        if _applies(row, spec, plan, target):
            grad_q = row.listed_grad_q if plan.tiles else row.tiles.grad_q
            return Tiles(forward=row.tiles.forward, grad_q=grad_q, grad_kv=row.tiles.grad_kv)
    raise LookupError(f"no tiles for {spec.dtype} with head dims {spec.head_dim_qk} and {spec.head_dim_v}")


def _applies(row: TileRow, spec: AttentionSpec, plan: Plan, target: Target) -> bool:
    head_dims, most = (spec.head_dim_qk, spec.head_dim_v), dims.range_of(spec, spec.seqlen_q)[1]
    fits = all(isinstance(size, int) and size <= row.head_dim for size in head_dims)
    few = row.seqlen_q is None or (most is not None and most <= row.seqlen_q)
    holds = not row.holds or not parts_of(spec, plan).isdisjoint(row.holds)
    machine = generation(target) >= row.first_sm and (is_small(target) or not row.small)
    return fits and few and holds and BYTES.get(spec.dtype, 8) <= row.bytes and machine


def parts_of(spec: AttentionSpec, plan: Plan) -> frozenset[Part]:
    """Return the parts that rows may name."""
    band = plan.band
    here: dict[Part, bool] = {
        "bias": plan.bias,
        "distances": plan.distances,
        "rows": plan.rows,
        "keys": plan.keys,
        "documents": plan.documents,
        "mask": plan.mask,
        "band": band is not None,
        "window": band is not None and band.left is not None,
        "softcap": spec.score.softcap is not None,
        "learned": (plan.bias_grad or plan.distances_grad) and spec.score.pointwise is None,
    }
    return frozenset(part for part, held in here.items() if held)
