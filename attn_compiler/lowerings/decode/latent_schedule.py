"""Schedules of the kernel over a latent by machine, dtype, rank and rows: data, which `schedule` looks up.

Compiled offline for sm90 with Triton 3.7.1 (rank 512 and 64 dims beside it, bfloat16), not measured: rows x keys, warps, stages: registers
of a thread, bytes spilled, shared memory.

    16 x 64, 8, 3:  103, 0, 164 KiB
    32 x 64, 8, 3:  135, 0, 184 KiB
    64 x 64, 8, 2:  253, 0, 216 KiB (wgmma; on sm100 345 KiB, which it has not)
    16 x 32, 4, 2:  128, 0,  55 KiB (sm80 and sm120)

A program's partial result is rows times 2 KiB, and it reads 1152 bytes a key: hence least_keys.

The kernel for Hopper has one program a multiprocessor. Measured on an H200 with so many splits (sequences x keys, heads: µs, and the Triton
kernel's; splits that are half and twice as many were slower each time, where there are such):

    16 x 4096, 128:   64 (4), 101      16 x 32768, 128: 262 (4), 572     64 x 4096, 128: 131 (1), 274    64 x 32768, 128: 938 (1), 2064
     1 x 4096, 128:   17 (32), 25       1 x 32768, 128:  36 (66), 60     16 x 4096, 64:   45 (8), 59     16 x 32768, 64:  168 (8), 305
    16 x 4096, 16:    33 (8), 29: so few heads stay with the Triton kernel
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_compiler.lowerings.decode import latent_hopper, plan
from attn_compiler.lowerings.decode.plan import Schedule
from attn_compiler.lowerings.shared.parts.tile_table import generation
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import BYTES
from attn_compiler.spec.target import Target

#: programmatic dependent launch (CUDA programming guide)
_EARLY_SINCE = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRow:
    """A row for elements of at most `bytes` and ranks up to `rank`, with tiles of up to `rows` rows, on GPUs from `first_sm` to `last_sm`.
    The other fields: as in Schedule."""

    bytes: int
    rank: int
    rows: int
    first_sm: int = 0
    last_sm: int = 999
    keys: int
    warps: int
    stages: int
    least_keys: int = 128


# The last entry for a machine has the most rows of a tile there.
ROWS: tuple[LatentRow, ...] = (
    LatentRow(bytes=2, rank=512, rows=16, first_sm=90, last_sm=99, keys=64, warps=8, stages=3),
    LatentRow(bytes=2, rank=512, rows=32, first_sm=90, last_sm=99, keys=64, warps=8, stages=3),
    LatentRow(bytes=2, rank=512, rows=64, first_sm=90, last_sm=99, keys=64, warps=8, stages=2, least_keys=256),
    LatentRow(bytes=2, rank=512, rows=16, keys=32, warps=4, stages=2),
    LatentRow(bytes=4, rank=512, rows=16, keys=16, warps=8, stages=1),
)

#: The kernel for Hopper. warps: of the Triton kernel, which takes calls whose tensors the copy engine can't read.
ON_HOPPER = LatentRow(bytes=2, rank=512, rows=64, first_sm=90, last_sm=90, keys=64, warps=8, stages=2)

#: numbers of a tile of partial results, and partial results that are added up at a time, at most
_MERGED, _MOST_PARTS = 4096, 64
#: dims that a program adds up, the widest first; wanted programs of each multiprocessor
_COLUMNS, _BUSY = (512, 128, 32), 4


def schedule(spec: AttentionSpec, target: Target) -> Schedule:
    """Return the schedule of a spec with a latent, with its number of splits where sizes are known. Raises LookupError without a row for
    it."""
    if spec.latent is None:
        raise LookupError("the site has no latent")
    if latent_hopper.refused(spec, target):
        return of_triton(spec, target)
    return _scheduled(spec, target, ON_HOPPER, ON_HOPPER.rows)


def of_triton(spec: AttentionSpec, target: Target) -> Schedule:
    """Return the Triton kernel's schedule, also where the kernel for Hopper takes the spec."""
    if spec.latent is None:
        raise LookupError("the site has no latent")
    fitting = [row for row in ROWS if _fits(row, spec, plan.known(spec.latent.rank), target)]
    if not fitting:
        raise LookupError(f"no schedule for a latent of {spec.latent.rank} in {spec.dtype}")
    most = max(row.rows for row in fitting)
    rows, _ = plan.rows_of_latent(spec, most)
    return _scheduled(spec, target, next(row for row in fitting if rows <= row.rows), most)


def _scheduled(spec: AttentionSpec, target: Target, row: LatentRow, most: int) -> Schedule:
    """Build the schedule of a row. most: rows of a tile."""
    rows, blocks = plan.rows_of_latent(spec, most)
    found = Schedule(
        keys=row.keys,
        warps=row.warps,
        stages=row.stages,
        rows=rows,
        programs=max(target.processors, 1),
        least_keys=row.least_keys,
        early=generation(target) >= _EARLY_SINCE,
        hopper=row is ON_HOPPER,
    )
    if not isinstance(spec.batch, int) or not isinstance(spec.seqlen_kv, int):
        return found
    return dataclasses.replace(found, splits=plan.splits(found, tiles=spec.batch * blocks, seqlen_kv=spec.seqlen_kv))


def merging(schedule: Schedule, *, rows: int, splits: int, width: int) -> tuple[int, int]:
    """Return the second kernel's partial results at a time, and the dims of a program. rows: of all sequences. splits: at most. width: of
    the latent's tile, a power of two.

    A program mostly waits for its loads, one after the other: few programs of many dims are best, if those keep the machine busy. With
    2048 rows, four programs a row and tiles of 16 splits took 19 µs to add up 2, 4 or 8 splits, on an H200.
    """
    fitting = [columns for columns in _COLUMNS if rows * -(-width // columns) >= _BUSY * schedule.programs]
    columns = min(fitting[0] if fitting else _COLUMNS[-1], width)
    return min(max(1 << max(splits - 1, 0).bit_length(), 4), _MERGED // columns, _MOST_PARTS), columns


def _fits(row: LatentRow, spec: AttentionSpec, rank: int, target: Target) -> bool:
    return (
        BYTES.get(spec.dtype, 8) <= row.bytes and rank <= row.rank and row.first_sm <= generation(target) <= row.last_sm
    )
