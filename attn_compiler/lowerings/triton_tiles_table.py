"""Tile sizes of the Triton kernels, by machine, dtype, head dim, length and what is added: data, which `tiles` looks up.

Rows are tried in order. sm90, half precision: the best of 5 to 8 tiles each on an H200, torch 2.11, Triton 3.6, 2026-11-21, causal,
S 8192, B·S·H·D = 32M, in TFLOP/s (cuDNN 9.19 and FlexAttention beside them in the same run):

    head dim      forward               dq                    dk, dv                cuDNN       Flex
    64            64x64 w4 s3: 417      64x64 w4 s3: 596      64x64 w4 s3: 454      457, 425    368, 282
    128           64x64 w4 s3: 473      128x64 w8 s3: 590     64x128 w8 s3: 525     604, 532    372, 373
    256           128x64 w8 s2: 421     128x32 w8 s2: 433     32x128 w8 s2 *: 339   630, 387
    192/128       128x64 w8 s3: 494     128x64 w8 s1: 386     32x64 w4 s2 *: 281
    80            64x64 w4 s3: 328      128x64 w8 s3: 393     64x64 w4 s3: 445
    with a bias of all heads, D 128: 128x64 w8 s3: 370, 64x64 w4 s3: 282; D 64: 64x64 w4 s3: 304, 128x64 w8 s3: 226

* apart: dk and dv in a pass each (together 228 and 191 at best). With learned biases the pass of dk and dv keeps the scores'
gradients; B 8, S 2048, µs of dk and dv / dq / the bias' own: D 64 2270 / 550 / 665 (64x64 w4 s3), D 128 2024 / 382 / 339
(dq 128x64 w8 s3; with 2 stages 573).

Other machines and float32 were compiled, not measured: their tiles are those that spill little (tests/lowerings/kernels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_compiler.lowerings import triton_planning
from attn_compiler.lowerings.triton_plan import Plan, Tile, Tiles
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

#: What takes registers beside the tiles, the first that holds: a tensor added to the scores, lists of tiles, a band, nothing.
Kind = Literal["added", "listed", "band", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Tiles of every spec whose element size is at most `bytes`, whose head dims are at most `head_dim`, with at most `seqlen_q`
    queries (None: any, or not known), on a GPU from `first_sm` on, and whose plan is of one of the `kinds` (none given: of any).

    listed_grad_q: for dq where it visits the forward's lists, and so has the forward's tile.
    """

    bytes: int
    head_dim: int
    seqlen_q: int | None = None
    first_sm: int = 0
    kinds: tuple[Kind, ...] = ()
    tiles: Tiles
    listed_grad_q: Tile


def _tile(
    queries: int, keys: int, warps: int, stages: int, *, apart: bool = False, registers: int | None = None
) -> Tile:
    return Tile(queries=queries, keys=keys, warps=warps, stages=stages, apart=apart, registers=registers)


_SMALL = Tiles(forward=_tile(32, 64, 4, 3), grad_q=_tile(32, 64, 4, 2), grad_kv=_tile(32, 64, 4, 2))
_SMALL_WIDE = Tiles(forward=_tile(32, 32, 4, 2), grad_q=_tile(32, 32, 4, 2), grad_kv=_tile(32, 64, 8, 1))
_FP32_NARROW = Tiles(forward=_tile(64, 32, 8, 2), grad_q=_tile(32, 32, 8, 1), grad_kv=_tile(32, 64, 8, 1))
_FP32 = Tiles(forward=_tile(32, 32, 8, 1), grad_q=_tile(32, 32, 8, 1), grad_kv=_tile(32, 32, 8, 1))

ROWS: tuple[Row, ...] = (
    # few queries
    Row(bytes=2, head_dim=128, seqlen_q=32, tiles=_SMALL, listed_grad_q=_SMALL.grad_q),
    Row(bytes=2, head_dim=256, seqlen_q=32, tiles=_SMALL_WIDE, listed_grad_q=_SMALL_WIDE.grad_q),
    Row(bytes=4, head_dim=256, seqlen_q=32, tiles=_FP32, listed_grad_q=_FP32.grad_q),
    # half precision
    Row(
        bytes=2,
        head_dim=64,
        first_sm=100,
        tiles=Tiles(forward=_tile(64, 64, 4, 3), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(64, 64, 8, 2)),
        listed_grad_q=_tile(64, 64, 4, 3),
    ),
    Row(
        bytes=2,
        head_dim=64,
        first_sm=90,
        kinds=("listed",),
        tiles=Tiles(
            forward=_tile(64, 64, 4, 2, registers=128), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(64, 64, 4, 3)
        ),
        listed_grad_q=_tile(64, 64, 4, 3, registers=168),
    ),
    Row(
        bytes=2,
        head_dim=64,
        first_sm=90,
        kinds=("band",),
        tiles=Tiles(
            forward=_tile(64, 64, 4, 3, registers=128), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(64, 64, 4, 3)
        ),
        listed_grad_q=_tile(64, 64, 4, 3),
    ),
    Row(
        bytes=2,
        head_dim=64,
        first_sm=90,
        tiles=Tiles(forward=_tile(64, 64, 4, 3), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(64, 64, 4, 3)),
        listed_grad_q=_tile(64, 64, 4, 3),
    ),
    Row(
        bytes=2,
        head_dim=64,
        tiles=Tiles(forward=_tile(64, 64, 4, 3), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(32, 128, 8, 2)),
        listed_grad_q=_tile(64, 64, 4, 3),
    ),
    Row(
        bytes=2,
        head_dim=128,
        first_sm=100,
        kinds=("added",),
        tiles=Tiles(forward=_tile(128, 64, 8, 3), grad_q=_tile(128, 64, 8, 2), grad_kv=_tile(32, 64, 8, 2)),
        listed_grad_q=_tile(128, 64, 8, 2),
    ),
    Row(
        bytes=2,
        head_dim=128,
        first_sm=100,
        tiles=Tiles(forward=_tile(64, 64, 4, 3), grad_q=_tile(128, 64, 8, 3), grad_kv=_tile(32, 64, 8, 2)),
        listed_grad_q=_tile(64, 64, 4, 2),
    ),
    Row(
        bytes=2,
        head_dim=128,
        first_sm=90,
        kinds=("added",),
        tiles=Tiles(forward=_tile(128, 64, 8, 3), grad_q=_tile(128, 64, 8, 3), grad_kv=_tile(64, 128, 8, 2)),
        listed_grad_q=_tile(128, 64, 8, 2),
    ),
    Row(
        bytes=2,
        head_dim=72,
        first_sm=90,
        tiles=Tiles(
            forward=_tile(64, 64, 4, 2, registers=128), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(64, 64, 4, 3)
        ),
        listed_grad_q=_tile(64, 64, 4, 2),
    ),
    Row(
        bytes=2,
        head_dim=80,
        first_sm=90,
        tiles=Tiles(
            forward=_tile(64, 64, 4, 3, registers=168), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(64, 64, 4, 3)
        ),
        listed_grad_q=_tile(64, 64, 4, 2),
    ),
    Row(
        bytes=2,
        head_dim=96,
        first_sm=90,
        tiles=Tiles(
            forward=_tile(64, 64, 4, 2, registers=168), grad_q=_tile(64, 64, 4, 3), grad_kv=_tile(64, 64, 4, 2)
        ),
        listed_grad_q=_tile(64, 64, 4, 2),
    ),
    Row(
        bytes=2,
        head_dim=128,
        first_sm=90,
        tiles=Tiles(forward=_tile(64, 64, 4, 3), grad_q=_tile(128, 64, 8, 3), grad_kv=_tile(64, 128, 8, 3)),
        listed_grad_q=_tile(64, 64, 4, 2),
    ),
    Row(
        bytes=2,
        head_dim=128,
        tiles=Tiles(forward=_tile(64, 32, 4, 3), grad_q=_tile(64, 64, 4, 2), grad_kv=_tile(64, 64, 8, 1)),
        listed_grad_q=_tile(64, 32, 4, 2),
    ),
    Row(
        bytes=2,
        head_dim=192,
        first_sm=90,
        tiles=Tiles(forward=_tile(128, 64, 8, 3), grad_q=_tile(128, 64, 8, 1), grad_kv=_tile(32, 64, 4, 2, apart=True)),
        listed_grad_q=_tile(128, 64, 8, 1),
    ),
    Row(
        bytes=2,
        head_dim=256,
        first_sm=90,
        tiles=Tiles(
            forward=_tile(128, 64, 8, 2), grad_q=_tile(128, 32, 8, 2), grad_kv=_tile(32, 128, 8, 2, apart=True)
        ),
        listed_grad_q=_tile(128, 64, 8, 1),
    ),
    Row(
        bytes=2,
        head_dim=256,
        tiles=Tiles(forward=_tile(64, 32, 8, 2), grad_q=_tile(64, 32, 4, 1), grad_kv=_tile(32, 32, 8, 2)),
        listed_grad_q=_tile(64, 32, 8, 1),
    ),
    # float32
    Row(bytes=4, head_dim=64, tiles=_FP32_NARROW, listed_grad_q=_tile(64, 32, 8, 1)),
    Row(bytes=4, head_dim=256, tiles=_FP32, listed_grad_q=_FP32.grad_q),
)

#: of an element
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


_FIRST_SM_LIKE_AMPERE = 120


def generation(target: Target) -> int:
    """The sm whose rows a machine takes: GeForce and workstation Blackwell have the tensor core instructions of Ampere, and less
    shared memory than Hopper."""
    return 80 if target.sm >= _FIRST_SM_LIKE_AMPERE else target.sm


def tiles(spec: AttentionSpec, target: Target) -> Tiles:
    """The tiles of a spec that the Triton lowering takes. Raises LookupError where there is no row for it."""
    plan = triton_planning.of(spec)
    for row in ROWS:
        if _applies(row, spec, plan, target):
            grad_q = row.listed_grad_q if plan.tiles else row.tiles.grad_q
            return Tiles(forward=row.tiles.forward, grad_q=grad_q, grad_kv=row.tiles.grad_kv)
    raise LookupError(f"no tiles for {spec.dtype} with head dims {spec.head_dim_qk} and {spec.head_dim_v}")


def _applies(row: Row, spec: AttentionSpec, plan: Plan, target: Target) -> bool:
    head_dims, seqlen_q = (spec.head_dim_qk, spec.head_dim_v), spec.seqlen_q
    fits = all(isinstance(size, int) and size <= row.head_dim for size in head_dims)
    few = row.seqlen_q is None or (isinstance(seqlen_q, int) and seqlen_q <= row.seqlen_q)
    kind = not row.kinds or kind_of(plan) in row.kinds
    return fits and few and kind and BYTES.get(spec.dtype, 8) <= row.bytes and generation(target) >= row.first_sm


def kind_of(plan: Plan) -> Kind:
    """Which rows a plan takes."""
    if plan.bias or plan.distances:
        return "added"
    if plan.tiles:
        return "listed"
    return "full" if plan.band is None else "band"
