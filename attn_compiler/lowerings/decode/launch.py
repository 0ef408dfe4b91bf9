"""Launch of the decode kernel: its arguments and its grid. Imports triton, so it is imported late.

A kernel is compiled for its text, for a device and for whether vectors of q, k and v are aligned; never for a length, a stride or an
address. A cache that grows has another shape each time: so nothing is cached by shapes, unlike launching.py, and a call costs the host
little more than the launch itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import triton
from triton.runtime import driver

from attn_compiler.lowerings.decode import definition, plan as decode_plan, replaying
from attn_compiler.lowerings.decode.kernels.decode import attention_decode
from attn_compiler.lowerings.decode.kernels.tuples import DecodeSwitches
from attn_compiler.lowerings.decode.plan import DecodeCall, none_too_short
from attn_compiler.lowerings.decode.replaying import DecodeSite, Launched, PreparedCall, empty
from attn_compiler.lowerings.shared.calls import by_definition
from attn_compiler.lowerings.shared.calls.arguments import alignment, along, kernel_constants, readable
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.launching.dry_run import noter
from attn_compiler.lowerings.shared.launching.launch import check_grid
from attn_compiler.lowerings.shared.launching.on_device import Empty, new_outputs
from attn_compiler.lowerings.shared.launching.replaying import VECTOR
from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.spec.dtypes import BYTES

Tensors = Sequence[torch.Tensor]

#: elements of partial results that a program holds at a time while it adds them up, and the most partial results
_HELD, _MOST_PARTS = 8192, 64

#: for each parameter from Bounds on, its operand, or either of two
_PARAMETERS = (
    ("bounds",),
    ("keys",),
    ("mask", "bias"),
    ("distances",),
    ("slopes",),
    ("sinks",),
    ("k_scale",),
    ("v_scale",),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """Values that follow from the number of sequences: most_splits, and allocators of the outputs."""

    most_splits: int
    make_out: Callable[[], torch.Tensor]
    make_lse: Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PreparedDecode(PreparedCall):
    """A call in the kernel's terms.

    kept: rows of a split's partial result.
    places: tiles of rows of a batch row.
    sized: by the number of sequences and whether they are on a GPU.
    """

    kept: int
    places: int
    sized: dict[tuple[int, bool], Sized] = field(default_factory=dict)


@functools.lru_cache(maxsize=1024)
def prepare(text: str) -> PreparedDecode:
    """Derive everything that follows from the leaf op's text."""
    call = DecodeCall.from_text(text)
    spec, plan = call.spec, decode_plan.plan_of(call)
    heads_kv, seqlen_q = decode_plan.known(spec.num_heads_kv), decode_plan.known(spec.seqlen_q)
    group = decode_plan.known(spec.num_heads_q) // heads_kv
    rows, blocks = decode_plan.rows_of(spec)
    # A scale that is a tensor may be negative.
    shared = kernel_constants(spec, added=plan.bias or plan.distances or plan.slopes or plan.k_scale)
    kept = rows if blocks > 1 else group * seqlen_q
    kept_all = triton.next_power_of_2(kept)
    most_parts = triton.next_power_of_2(call.schedule.splits or _MOST_PARTS)
    constants = {
        "SPLITS": call.schedule.splits or 0,
        "BLOCK_M": rows,
        "BLOCK_N": call.schedule.keys,
        "SLICES": call.schedule.slices,
        "PARTS": min(max(_HELD // (kept_all * shared["V_0"]), 1), most_parts, _MOST_PARTS),
        "KEPT": kept,
        "KEPT_ALL": kept_all,
        "HEADS_KV": heads_kv,
        "GROUP": group,
        "SEQLEN_Q": seqlen_q,
        "BOUNDS": plan.bounds_of,
        "BY_ROWS": plan.mask or plan.bias or not (plan.bounds_of == "batch" or plan.begin_alike == "yes"),
        "MEANS": plan.means,
        "PAIRS_MASK": plan.mask,
        "ONE_KV": call.one_kv,
        "NARROWER": 1 if spec.stored is None else BYTES[spec.dtype],
        "EARLY": call.schedule.early and not triton.knobs.runtime.interpret,
        "COMPILED": not triton.knobs.runtime.interpret,
        **shared,
    }
    return PreparedDecode(
        schedule=call.schedule,
        plan=plan,
        scale=spec.score.scale,
        changed_by=score_changes.number(spec.score.pointwise),
        constants=constants,
        kept=kept,
        places=heads_kv * blocks,
        given=tuple(plan.place(*names) for names in _PARAMETERS),
        typed=tuple(i for i, name in enumerate(plan.operands) if name in ("bias", "distances", "sinks")),
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    text: str,
    launched: list[Launched] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse, as `ops.LEAF_SCHEMA` describes. launched: see `DecodeSite`."""
    return or_else(
        "decode",
        text,
        lambda: _by_kernel(q, k, v, operands, text, launched),
        lambda: _by_definition(q, k, v, operands, text),
    )


def _by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = new_outputs(q, v)
    exact_out, exact_lse = by_definition.forward(definition.attention(q, k, v, operands, text))
    return out.copy_(exact_out), lse.copy_(exact_lse)


def _by_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str, launched: list[Launched] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    prepared = prepare(text)
    strides, align = _strides(q, k, v)
    if align == 1:
        launched = None
        q, k, v = map(readable, (q, k, v))
        strides, _ = _strides(q, k, v)
        align = alignment(q, k, v) if k.dtype == q.dtype else 1
    if noter() is not None:
        # Stand-in tensors leave nothing in the caches.
        prepared = dataclasses.replace(prepared, sized={}, compiled={})
    if not q.is_cuda or q.get_device() == driver.active.get_current_device():
        return _forward(prepared, q, k, v, operands, strides, align, launched)
    with torch.cuda.device(q.device):
        return _forward(prepared, q, k, v, operands, strides, align, launched)


#: `forward` for one place in compiled code
ForwardSite = functools.partial(DecodeSite, forward, lambda q, k, v, operands: (q, k, v, *operands))


def _forward(
    prepared: PreparedDecode,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    strides: tuple[int, ...],
    align: int,
    launched: list[Launched] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on the current device."""
    batch, seqlen_kv = q.shape[0], k.shape[2]
    sized = prepared.sized.get((batch, q.is_cuda)) or _size(prepared, q, v)
    out, lse = sized.make_out(), sized.make_lse()
    if batch == 0:
        return out, lse
    schedule = prepared.schedule
    splits = schedule.splits or none_too_short(schedule, sized.most_splits, seqlen_kv=seqlen_kv)
    partial, count, lse_at = None, None, 0
    if splits > 1:
        rows = batch * prepared.places * splits * prepared.kept
        lse_at = rows * v.shape[3]
        partial = empty((lse_at + rows,), (1,), q)
        count = operands[0]
    given = [None if place is None else operands[place] for place in prepared.given]
    numbers = (*strides, *_operand_strides(*given[:4]), lse_at, seqlen_kv, prepared.scale, prepared.changed_by)
    key = (q.get_device(), align, partial is None, *[operands[place].dtype for place in prepared.typed])
    grid, tensors = (splits, prepared.places, batch), (q, k, v, out, lse, partial, count, *given)

    def how() -> DecodeSwitches:
        return DecodeSwitches(**prepared.constants, ALIGN=align)

    options = {"num_warps": schedule.warps, "num_stages": schedule.stages}
    replaying.launch(prepared.compiled, attention_decode, key, grid, tensors, numbers, how, launched, **options)
    return out, lse


def _size(prepared: PreparedDecode, q: torch.Tensor, v: torch.Tensor) -> Sized:
    """Compute the values of a number of sequences and keep them in `prepared`."""
    batch = q.shape[0]
    check_grid((1, prepared.places, batch))
    out, lse = (Empty.like(output) for output in new_outputs(q, v))
    most = decode_plan.most_splits(prepared.schedule, tiles=batch * prepared.places)
    found = Sized(most_splits=most, make_out=out.make, make_lse=lse.make)
    prepared.sized[batch, q.is_cuda] = found
    return found


def _strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the nine strides of BHS, and a vector's elements if all vectors are aligned, else 1. Strides of axes of size one count."""
    qb, qh, qs, _ = q.stride()
    kb, kh, ks, _ = k.stride()
    vb, vh, vs, _ = v.stride()
    size, of_keys = q.element_size(), k.element_size()
    together = (
        (qb | qh | qs) * size | (kb | kh | ks | vb | vh | vs) * of_keys | q.data_ptr() | k.data_ptr() | v.data_ptr()
    )
    return (qb, qh, qs, kb, kh, ks, vb, vh, vs), 1 if together % VECTOR else VECTOR // size


def _operand_strides(
    bounds: torch.Tensor | None, keys: torch.Tensor | None, pairs: torch.Tensor | None, distances: torch.Tensor | None
) -> tuple[int, ...]:
    """Return the strides of operands, 0 where an axis broadcasts and where there is no tensor."""
    return (
        *(_NO_BOUNDS if bounds is None else (bounds.stride(0), along(bounds, 1))),
        0 if keys is None else along(keys, 0),
        *(_NO_PAIRS if pairs is None else [along(pairs, dim) for dim in range(4)]),
        0 if distances is None else along(distances, 0),
    )


_NO_BOUNDS, _NO_PAIRS = (0, 0), (0, 0, 0, 0)
