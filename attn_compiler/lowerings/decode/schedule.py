"""Schedules of the decode kernel by machine, dtype and head dim: data, which `schedule` looks up.

sm90, half precision: an H200, torch 2.11, Triton 3.6, 2026-11-22, CUDA graphs, caches that are not in the L2 cache, microseconds
(benchmarks/results/decode_h200.csv, which has the peers too). The rule's choice, and the time of reading the keys in use alone:

    B, Hq/Hkv, keys, D        rule: tile, splits           reading
    1, 32/8, 1024, 128        64 w4 s4, 16      5.4        3.2
    1, 32/8, 4096, 128        64 w4 s4, 16      8.8        6.8
    2, 32/8, 4096, 128        64 w4 s4, 8       12.3       11.2
    5, 32/8, 4096, 128        64 w4 s4, 3       25.0       23.3
    6, 32/8, 4096, 128        64 w4 s4, 2       29.9       26.8
    16, 32/8, 4096, 128       64 w4 s4, 1       64.7       64.6
    20, 32/8, 4096, 128       64 w4 s4, 3       85.4       79.4
    64, 32/8, 8192, 128       64 w4 s4, 1       481        479
    1, 32/8, 32768, 128       64 w4 s4, 16      36.3       35.9
    16, …, 16 queries         64 w4 s4, 1       71.1       65.7 (see below)
    1, 64/8, 4096, 64         128 w4 s4, 16     6.2        4.4
    16, 64/8, 4096, 64, sinks 128 w4 s4, 1      35.6       35.7
    1, 16/8, 4096, 256        64 w8 s3, 16      14.1       11.3
    16, 16/8, 4096, 256       64 w8 s3, 1       125        124
    FP8: 1, 32/8, 4096, 128   256 w8 s3, 16     9.0        4.5
    FP8: 1, 32/8, 32768, 128  256 w8 s3, 16     26.0       19.5
    FP8: 16, 32/8, 4096, 128  256 w8 s3, 1      38.4       34.1
    FP8: 64, 32/8, 8192, 128  256 w8 s3, 1      287        274
    FP8: 16, 64/8, 4096, 64   128 w4 s4, 1      25.1       19.8

Tiles and splits were tried with the kernel before (decode_tiles_h200.csv): the rule was within 5% of the best in all cases but one, head
dim 256 with one sequence (5.4%). With the present one, for one sequence and head dim 128: 8 warps that share a tile, and tiles of 128 keys,
are slower from 4096 keys on, and no faster at 1024. For FP8 seven tiles were tried. At head dim 128, 64 w4 s6 takes 8.3, 26.5, 42.1 and
249 us for the four sizes above, 128 w8 s4 9.3, 25.0, 37.9 and 281, 128 w4 s4 8.6, 27.6, 44.8 and 249.

Of 17 to 32 rows (docs/decode.md, decode_rows_h200.csv, 2026-11-29), the best of 18 others was 1.5 to 3% faster in two of four cases, and
slower in two. With 33 to 64 rows, 3 stages and two programs on a multiprocessor gain 11% with 64 sequences of head dim 128, and 19% with 16
of head dim 64. They lose 10 to 37% with one or four: hence the rows that are busy (decode_unused_keys_h200.csv).

Each warp has its own keys (slices) where there are no more than 16 rows, up to head dim 128, or since sm90 32 in half precision without a
tensor of pairs. FP8 caches of more rows or wider heads, other machines, float32, and more than 16 rows at other head dims than 64 and 128,
were compiled, not measured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_compiler.lowerings.decode import plan
from attn_compiler.lowerings.decode.plan import Schedule
from attn_compiler.lowerings.shared.parts.tile_table import generation
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import BYTES
from attn_compiler.spec.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRow:
    """A row for specs whose k and v have elements of at most `bytes`, head dims up to `head_dim` and tiles of up to `rows` rows, on GPUs
    from `first_sm` on. pairs: also for those with a mask or a bias that is a tensor, which is loaded for each pair. busy: for those alone
    whose tiles are known to fill nine tenths of the multiprocessors without splits.

    keys, warps, stages, slices, least_keys: as in Schedule. programs: of one multiprocessor.
    """

    bytes: int
    head_dim: int
    rows: int
    first_sm: int = 0
    pairs: bool = True
    busy: bool = False
    keys: int
    warps: int
    stages: int
    slices: int = 1
    programs: int = 1
    least_keys: int = 128


ROWS: tuple[ScheduleRow, ...] = (
    ScheduleRow(bytes=1, head_dim=64, rows=16, first_sm=90, keys=128, warps=4, stages=4, slices=4),
    ScheduleRow(bytes=1, head_dim=128, rows=16, first_sm=90, keys=256, warps=8, stages=3, slices=8, least_keys=256),
    ScheduleRow(bytes=2, head_dim=64, rows=16, first_sm=90, keys=128, warps=4, stages=4, slices=4),
    ScheduleRow(bytes=2, head_dim=64, rows=16, keys=64, warps=4, stages=4, slices=4),
    ScheduleRow(bytes=1, head_dim=64, rows=64, keys=64, warps=4, stages=3),
    ScheduleRow(bytes=2, head_dim=64, rows=32, first_sm=90, pairs=False, keys=128, warps=8, stages=4, slices=8),
    ScheduleRow(
        bytes=2, head_dim=64, rows=64, first_sm=90, pairs=False, busy=True, keys=64, warps=4, stages=3, programs=2
    ),
    ScheduleRow(bytes=2, head_dim=64, rows=64, keys=64, warps=4, stages=3),
    ScheduleRow(bytes=2, head_dim=128, rows=16, first_sm=90, keys=64, warps=4, stages=4, slices=4, least_keys=64),
    ScheduleRow(bytes=2, head_dim=128, rows=16, keys=64, warps=4, stages=3, slices=4),
    ScheduleRow(bytes=1, head_dim=128, rows=64, first_sm=90, keys=64, warps=4, stages=4),
    ScheduleRow(bytes=2, head_dim=128, rows=32, first_sm=90, pairs=False, keys=128, warps=8, stages=3, slices=8),
    ScheduleRow(
        bytes=2, head_dim=128, rows=64, first_sm=90, pairs=False, busy=True, keys=64, warps=4, stages=3, programs=2
    ),
    ScheduleRow(bytes=2, head_dim=128, rows=64, first_sm=90, keys=64, warps=4, stages=4),
    ScheduleRow(bytes=2, head_dim=128, rows=64, keys=64, warps=8, stages=2),
    ScheduleRow(bytes=2, head_dim=256, rows=32, first_sm=90, keys=64, warps=8, stages=3, least_keys=256),
    ScheduleRow(bytes=2, head_dim=256, rows=32, keys=32, warps=4, stages=3, programs=2, least_keys=256),
    ScheduleRow(bytes=2, head_dim=512, rows=32, first_sm=90, keys=32, warps=4, stages=3),
    ScheduleRow(bytes=2, head_dim=512, rows=32, keys=32, warps=8, stages=2, least_keys=256),
    ScheduleRow(bytes=4, head_dim=128, rows=16, keys=32, warps=4, stages=1, programs=2),
    ScheduleRow(bytes=4, head_dim=256, rows=16, keys=16, warps=8, stages=1, programs=2),
)
#: programmatic dependent launch (CUDA programming guide)
_EARLY_SINCE = 90
#: multiprocessors of an unknown machine: Triton's interpreter
_PROCESSORS = 1


def schedule(spec: AttentionSpec, target: Target) -> Schedule:
    """Return the schedule of a spec that the decode lowering takes, with its number of splits where sizes are known."""
    found, tiles = table(spec, target), _tiles(spec)
    if tiles is None or not isinstance(spec.seqlen_kv, int):
        return found
    return dataclasses.replace(found, splits=plan.splits(found, tiles=tiles, seqlen_kv=spec.seqlen_kv))


def _tiles(spec: AttentionSpec) -> int | None:
    """Count the programs of one split, where the batch is known."""
    return spec.batch * plan.known(spec.num_heads_kv) * plan.rows_of(spec)[1] if isinstance(spec.batch, int) else None


def table(spec: AttentionSpec, target: Target) -> Schedule:
    """Look up the schedule without splits. Raises LookupError where there is no row for the spec."""
    rows, _ = plan.rows_of(spec)
    head_dim = max(plan.known(spec.head_dim_qk), plan.known(spec.head_dim_v))
    size = BYTES.get(spec.dtype, 8) if spec.stored is None else 1
    parts = plan.parts(spec)
    is_busy = 10 * (_tiles(spec) or 0) >= 9 * max(target.processors, _PROCESSORS)
    for row in ROWS:
        fits = size <= row.bytes and head_dim <= row.head_dim and rows <= row.rows
        fits = fits and (row.pairs or not (parts.mask or parts.bias)) and (is_busy or not row.busy)
        if fits and generation(target) >= row.first_sm:
            return Schedule(
                keys=row.keys,
                warps=row.warps,
                stages=row.stages,
                slices=row.slices,
                programs=max(target.processors, _PROCESSORS) * row.programs,
                least_keys=row.least_keys,
                early=generation(target) >= _EARLY_SINCE,
            )
    raise LookupError(f"no schedule for {spec.dtype} with head dims {spec.head_dim_qk} and {spec.head_dim_v}")
