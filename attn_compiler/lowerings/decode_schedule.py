"""How the decode kernel shares out its work, by machine, dtype and head dim: data, which `schedule` looks up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_compiler.lowerings import decode_plan
from attn_compiler.lowerings.decode_plan import Schedule
from attn_compiler.lowerings.triton_tiles_table import BYTES, generation
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Of every spec whose element size is at most `bytes`, with head dims up to `head_dim` and tiles of up to `rows` rows, on a GPU
    from `first_sm` on.

    keys, warps, stages, slices, least_keys: as in Schedule. programs: of one multiprocessor.
    """

    bytes: int
    head_dim: int
    rows: int
    first_sm: int = 0
    keys: int
    warps: int
    stages: int
    slices: int = 1
    programs: int = 1
    least_keys: int = 128


ROWS: tuple[Row, ...] = (
    Row(bytes=2, head_dim=64, rows=16, keys=128, warps=4, stages=3, slices=4),
    Row(bytes=2, head_dim=64, rows=64, keys=64, warps=4, stages=3),
    Row(bytes=2, head_dim=128, rows=16, first_sm=90, keys=64, warps=4, stages=4, slices=4),
    Row(bytes=2, head_dim=128, rows=16, keys=64, warps=4, stages=3, slices=4),
    Row(bytes=2, head_dim=128, rows=64, keys=64, warps=8, stages=2),
    Row(bytes=2, head_dim=256, rows=32, keys=32, warps=4, stages=3, programs=2),
    Row(bytes=4, head_dim=128, rows=16, keys=32, warps=4, stages=1, programs=2),
    Row(bytes=4, head_dim=256, rows=16, keys=16, warps=8, stages=1, programs=2),
)
#: of a machine that is not known: Triton's interpreter
_PROCESSORS = 1


def schedule(spec: AttentionSpec, target: Target) -> Schedule:
    """The schedule of a spec that the decode lowering takes, with its number of splits where sizes are known."""
    found = table(spec, target)
    if not isinstance(spec.batch, int) or not isinstance(spec.seqlen_kv, int):
        return found
    _, blocks = decode_plan.rows_of(spec)
    tiles = spec.batch * decode_plan.known(spec.num_heads_kv) * blocks
    return dataclasses.replace(found, splits=decode_plan.splits(found, tiles=tiles, seqlen_kv=spec.seqlen_kv))


def table(spec: AttentionSpec, target: Target) -> Schedule:
    """What the table says. Raises LookupError where there is no row for the spec."""
    rows, _ = decode_plan.rows_of(spec)
    head_dim = max(decode_plan.known(spec.head_dim_qk), decode_plan.known(spec.head_dim_v))
    for row in ROWS:
        fits = BYTES.get(spec.dtype, 8) <= row.bytes and head_dim <= row.head_dim and rows <= row.rows
        if fits and generation(target) >= row.first_sm:
            return Schedule(
                keys=row.keys,
                warps=row.warps,
                stages=row.stages,
                slices=row.slices,
                programs=max(target.processors, _PROCESSORS) * row.programs,
                least_keys=row.least_keys,
            )
    raise LookupError(f"no schedule for {spec.dtype} with head dims {spec.head_dim_qk} and {spec.head_dim_v}")
