"""How the kernel over a latent shares out its work, by machine, dtype, rank and rows: data, which `schedule` looks up.

Compiled offline for sm90 with Triton 3.7.1 (rank 512 and 64 dims beside it, bfloat16), not measured: rows x keys, warps, stages: registers
of a thread, bytes spilled, shared memory.

    16 x 64, 8, 3:  103, 0, 164 KiB
    32 x 64, 8, 3:  135, 0, 184 KiB
    64 x 64, 8, 2:  253, 0, 216 KiB (wgmma; on sm100 345 KiB, which it has not)
    16 x 32, 4, 2:  128, 0,  55 KiB (sm80 and sm120)

A program's partial result is rows times 2 KiB, and what it reads of each key 1152 bytes: hence least_keys.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_compiler.dtypes import BYTES
from attn_compiler.lowerings.decode import plan
from attn_compiler.lowerings.decode.plan import Schedule
from attn_compiler.lowerings.shared.tile_table import generation
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

#: programmatic dependent launch (CUDA programming guide)
_EARLY_SINCE = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRow:
    """Of elements of at most `bytes` and ranks up to `rank`, with tiles of up to `rows` rows, on GPUs from `first_sm` to `last_sm`.

    keys, warps, stages, least_keys: as in Schedule.
    """

    bytes: int
    rank: int
    rows: int
    first_sm: int = 0
    last_sm: int = 999
    keys: int
    warps: int
    stages: int
    least_keys: int = 128


# The last row for a machine has as many rows as a tile may have there.
ROWS: tuple[LatentRow, ...] = (
    LatentRow(bytes=2, rank=512, rows=16, first_sm=90, last_sm=99, keys=64, warps=8, stages=3),
    LatentRow(bytes=2, rank=512, rows=32, first_sm=90, last_sm=99, keys=64, warps=8, stages=3),
    LatentRow(bytes=2, rank=512, rows=64, first_sm=90, last_sm=99, keys=64, warps=8, stages=2, least_keys=256),
    LatentRow(bytes=2, rank=512, rows=16, keys=32, warps=4, stages=2),
    LatentRow(bytes=4, rank=512, rows=16, keys=16, warps=8, stages=1),
)


def schedule(spec: AttentionSpec, target: Target) -> Schedule:
    """Of a spec with a latent, with its number of splits where sizes are known. Raises LookupError where there is no row for it."""
    if spec.latent is None:
        raise LookupError("the site has no latent")
    fitting = [row for row in ROWS if _fits(row, spec, plan.known(spec.latent.rank), target)]
    if not fitting:
        raise LookupError(f"no schedule for a latent of {spec.latent.rank} in {spec.dtype}")
    most = max(row.rows for row in fitting)
    rows, blocks = plan.rows_of_latent(spec, most)
    row = next(row for row in fitting if rows <= row.rows)
    found = Schedule(
        keys=row.keys,
        warps=row.warps,
        stages=row.stages,
        rows=rows,
        programs=max(target.processors, 1),
        least_keys=row.least_keys,
        early=generation(target) >= _EARLY_SINCE,
    )
    if not isinstance(spec.batch, int) or not isinstance(spec.seqlen_kv, int):
        return found
    return dataclasses.replace(found, splits=plan.splits(found, tiles=spec.batch * blocks, seqlen_kv=spec.seqlen_kv))


def _fits(row: LatentRow, spec: AttentionSpec, rank: int, target: Target) -> bool:
    return (
        BYTES.get(spec.dtype, 8) <= row.bytes and rank <= row.rank and row.first_sm <= generation(target) <= row.last_sm
    )
