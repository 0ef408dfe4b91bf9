"""The decode kernel's view of one attention: pure data, made from the spec and the machine alone.

Masks and score changes become the parts of shared/parts/site_parts.py, with two differences. Every interval of keys, bands included, is a
pair of bounds for each query, since a band over few queries is nothing more. And no lists of tiles are made.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

from attn_compiler import index_expr as ix
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.intervals import Q
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.codec import Coded

#: rows of a tile of queries: a tensor core instruction's; the most that registers hold, and of wide heads; wide heads
_FEWEST_ROWS, _MOST_ROWS, _MOST_ROWS_WIDE, _WIDE = 16, 64, 32, 128

#: least busy share of the machine, and most rounds of programs to reach it
_LITTLE_IDLE, _MOST_TIMES = 0.9, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Division of the work. keys: of a tile. warps, stages: compile options. slices: of a tile's keys, one for each warp; 1: warps share
    it.

    programs: number that the machine runs at once at full speed. least_keys: a split has no fewer: a shorter one costs more than it saves.
    early: the kernel is launched while the one before it ends, and waits for that.
    rows: of a tile over a latent; None where the head dims decide.
    hopper: the kernel for Hopper reads the latent (latent_hopper.py).
    splits: of each kv head's keys, at most; None where sizes are only known at the launch, which then calls `splits` itself.
    """

    keys: int
    warps: int
    stages: int
    slices: int = 1
    rows: int | None = None
    programs: int
    least_keys: int
    early: bool = False
    hopper: bool = False
    splits: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Parts that mask and change the scores. A part that reads tensors names its operands, in this order:

    count: int32, contiguous, zero, at least one element for each batch row, kv head and block of rows: the number of splits that have
        arrived. The kernel leaves it zero, so that all sites of a graph share one.
    bounds: int32 (2, B|1, Sq), contiguous: the first key that each query may use, and the one after the last. (2, B|1, Hq · Sq) where
        heads differ in that.
    keys: bool (B|1, Skv), contiguous: keys that may be used at all.
    mask: bool (B|1, Hq|1, Sq|1, Skv|1), any strides: allowed pairs.
    bias: a float tensor (B|1, Hq|1, Sq|1, Skv|1), any strides, is added to the scores. There is no mask then.
    distances, slopes, sinks: as in `kernel_plan.Plan`.
    k_scale, v_scale: (), float32: factors of keys and values in FP8.
    rope: (B, 1, Skv, p): the part of keys beside a latent.

    bounds_of: the unit with its own bounds: a batch row, a query of it, or a query of a head.
    begin_alike: the intervals of a batch row's queries begin with the same key, so every key between their ends is in one of them.
    means: keys that count in a row without keys, whose bounds are empty: "all", or "finite", those that only very low numbers
        leave out. None: such a row is 0.
    """

    count: bool = False
    bounds: bool = False
    keys: bool = False
    mask: bool = False
    bias: bool = False
    distances: bool = False
    slopes: bool = False
    sinks: bool = False
    k_scale: bool = False
    v_scale: bool = False
    rope: bool = False
    bounds_of: Literal["batch", "query", "row"] = "batch"
    begin_alike: Literal["yes", "unknown"] = "unknown"
    means: Literal["all", "finite"] | None = None

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the run-time tensors in the order in which the leaf op takes them."""
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) is True)

    def place(self, *names: str) -> int | None:
        """Return the position of the operand with one of these names, if there is one."""
        return next((i for i, name in enumerate(self.operands) if name in names), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCall(Coded):
    """A call's compile-time decisions, which the leaf op's text holds. of_latent: k and v are a latent. one_kv: they are one tensor, which
    is read once. by_head: heads differ in which queries have keys."""

    spec: AttentionSpec
    schedule: Schedule
    of_latent: bool = False
    one_kv: bool = False
    by_head: bool = False


DecodeCall.codec = AttentionSpec.codec.extended(DecodeCall, Schedule, brief=True)


@functools.lru_cache(maxsize=1024)
def parts(spec: AttentionSpec) -> Parts:
    """Return the mask's parts as for the other Triton kernels, with the band as an interval of each query."""
    found = site_parts.parts(spec)
    if found.band is None:
        return found
    band = found.band
    # The single query is at the last key's position, and sees all keys.
    sees_all = spec.seqlen_q == 1 and band.from_end and band.left is None and (band.right or 0) >= 0
    return dataclasses.replace(found, band=None) if sees_all else site_parts.with_band_as_rows(found)


def plan_of(call: DecodeCall) -> DecodePlan:
    """Return the plan of a call whose spec the decode lowering does not refuse."""
    found = parts(call.spec)
    keys = found.keys is not None or found.keys_given
    means = call.spec.mask.means
    lower = None if found.rows is None else found.rows.lower
    bounds = found.rows is not None or keys or found.mask or masks_by_bias(call.spec, found) or means
    return DecodePlan(
        # Over a latent a second kernel adds up the partial results of splits.
        count=call.schedule.splits != 1 and not call.of_latent,
        bounds=bounds,
        keys=keys,
        mask=found.mask,
        bias=found.bias,
        distances=bool(found.distances),
        slopes=found.slopes is not None,
        sinks=call.spec.score.sinks is not None,
        k_scale=call.spec.stored is not None and call.spec.stored.k_scaled,
        v_scale=call.spec.stored is not None and call.spec.stored.v_scaled,
        rope=call.of_latent and call.spec.latent is not None and call.spec.latent.rope is not None,
        bounds_of="batch" if not bounds else "row" if call.by_head else "batch" if call.spec.seqlen_q == 1 else "query",
        begin_alike="unknown" if lower is not None and ix.mentions(lower, Q) else "yes",
        means=None if not means else "finite" if call.spec.adds_unread else "all",
    )


def masks_by_bias(spec: AttentionSpec, found: Parts) -> bool:
    """Return whether an added tensor may mask keys by lowest numbers: it is the model's mask and no learned bias, or nothing else tells
    which queries have keys."""
    return found.bias and (spec.mask.dense is not None or (spec.mask.means and spec.adds_unread))


def rows_of(spec: AttentionSpec) -> tuple[int, int]:
    """Return the rows of a tile, a power of two, and the number of tiles for all queries of a group of heads."""
    total = known(spec.num_heads_q) // known(spec.num_heads_kv) * known(spec.seqlen_q)
    most = _MOST_ROWS_WIDE if max(known(spec.head_dim_qk), known(spec.head_dim_v)) > _WIDE else _MOST_ROWS
    # Products in float32 take no tensor core, and many more registers.
    rows = max(_FEWEST_ROWS, min(_power_of_two(total), _FEWEST_ROWS if spec.dtype == "float32" else most))
    return rows, -(-total // rows)


def rows_of_latent(spec: AttentionSpec, most: int) -> tuple[int, int]:
    """Return the same for all heads, which are one group. most: rows that a machine's registers and shared memory have room for."""
    total = known(spec.num_heads_q) * known(spec.seqlen_q)
    rows = max(_FEWEST_ROWS, min(_power_of_two(total), most))
    return rows, -(-total // rows)


def known(size: int | str) -> int:
    """Return a size that why_not has checked. Raises TypeError for a symbolic one."""
    if isinstance(size, int):
        return size
    raise TypeError(f"why_not refuses unknown sizes here, got {size!r}")


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def splits(schedule: Schedule, *, tiles: int, seqlen_kv: int) -> int:
    """Return the number of splits of each tile's keys: `most_splits`, none of them too short."""
    return none_too_short(schedule, most_splits(schedule, tiles=tiles), seqlen_kv=seqlen_kv)


def none_too_short(schedule: Schedule, most: int, *, seqlen_kv: int) -> int:
    """Reduce the number of splits until none is too short."""
    return max(min(most, -(-seqlen_kv // schedule.least_keys)), 1)


def most_splits(schedule: Schedule, *, tiles: int) -> int:
    """Return the number of splits for sequences that are long enough.

    As many as the machine runs at once. With more tiles than that: one, if the last round of programs leaves little of the machine idle;
    else as many as fill it twice, or a few times more often.
    """
    room, tiles = max(schedule.programs, 1), max(tiles, 1)
    if tiles <= room:
        return room // tiles
    fills = []
    for times in range(1, _MOST_TIMES + 1):
        found = times * room // tiles
        if found:
            fills.append((found * tiles / (times * room), found))
        if found and fills[-1][0] >= _LITTLE_IDLE:
            break
    enough = fills[-1:] if fills and fills[-1][0] >= _LITTLE_IDLE else fills
    return max(enough, key=lambda fill: (fill[0], -fill[1]), default=(1.0, 1))[1]
