"""Limits of our Triton kernels, whichever family launches them: machines, dtypes, head dims, 32-bit counts."""

from __future__ import annotations

import math

from attn_compiler.lowerings.base import LayoutDemand
from attn_compiler.lowerings.shared.limits import common as limits, mask_limits, triton_releases
from attn_compiler.lowerings.shared.limits.takes import HeadDims, Takes, check_gpu, refused, since
from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED
from attn_compiler.lowerings.shared.parts import score_changes, site_parts as parts, tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import FARTHEST, MOST_BLOCKS, MOST_POSITIONS
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.scores import Sinks
from attn_compiler.spec.target import Target

_DTYPES = (*HALF, "float32")
#: the sites that the kernels take. A family may take fewer.
TAKES = Takes(
    sms=since(80),
    dtypes=_DTYPES,
    changes=(*score_changes.KINDS, Sinks),
    tensors=_DTYPES,
    # In half precision every head has to begin at a vector.
    head_dims=HeadDims(multiple=8, in_full=1, most=512),
    scales="moderate",
    lse="differentiated",
)

#: later releases are taken, too
_FIRST_TRITON = COMPILED["triton"][0]
#: head dims that leave shared memory for all other parts of a site, and those on machines with little of it
_ROOMY, _ROOMY_ON_SMALL = 256, 128
# Bytes that the kernels load at once along a head.
_ALIGNMENT = 16
#: queries, and keys, of the smallest tile that a bias' gradient takes
_LEAST_TILE = 32

#: layout of q, k and v that the kernels need
DEMAND = LayoutDemand(alignment=_ALIGNMENT, farthest=FARTHEST)


def check_machine(target: Target) -> list[Reason]:
    """Require a GPU since Ampere, or Triton's interpreter; and Triton."""
    gpu = [] if target.triton_interpreted else check_gpu(TAKES, target)
    return gpu or _check_triton(target)


def check_gluon(target: Target, takes: Takes, kernel: str) -> list[Reason]:
    """Check the machine for a kernel in Gluon: the architectures of `takes`, and a Triton whose Gluon is known. kernel: of `COMPILED`."""
    reasons = check_machine(target)
    if reasons:
        return reasons
    if target.triton_interpreted or check_gpu(takes, target):
        observed = "Triton's interpreter" if target.triton_interpreted else f"sm{target.sm}"
        return refuse(Code.ARCHITECTURE, "the kernel is made of the instructions of sm90", observed)
    known = COMPILED[kernel]
    if limits.release(target.triton) in known:
        return []
    rule = f"the kernel was compiled with Triton {triton_releases.words(known)}"
    remedy = triton_releases.remedy(known)
    return refuse(Code.LIBRARY_VERSION, rule, target.triton, remedy)


def check_site(spec: AttentionSpec, target: Target, takes: Takes = TAKES) -> list[Reason]:
    """Return why the kernels can't serve a site. takes: the family's own, where that is more than TAKES.

    The reasons of a machine that can't run them stand alone.
    """
    machine = check_machine(target) or limits.check_device(spec, target.device)
    return machine or [
        *refused(takes, spec),
        *_check_interpreter(spec, target),
        *_check_wide(spec, target),
        *_check_counted(spec),
        # Else later kernels give the gradients of queries without keys, where the mask's numbers were not recovered.
        *(mask_limits.check_no_keyless_rows(spec) if spec.score.pointwise is not None or spec.lse != "unread" else ()),
    ]


def _check_interpreter(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuse bfloat16 in the interpreter, which multiplies it as integers: https://github.com/triton-lang/triton/issues/11584."""
    if not target.triton_interpreted or spec.dtype != "bfloat16":
        return []
    rule = "Triton's interpreter computes in float16 or float32"
    return refuse(Code.INTERPRETER, rule, spec.dtype, "call model.float(), or unset TRITON_INTERPRET on a GPU")


def _check_wide(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuse parts of a site that shared memory has no room for beside wide heads."""
    widest = max(size for size in (spec.head_dim_qk, spec.head_dim_v, 0) if isinstance(size, int))
    is_small = tile_table.is_small(target)
    most = _ROOMY_ON_SMALL if is_small else _ROOMY
    if widest <= most:
        return []
    where, found = "on sm86 to sm89 and from sm120 on, " if is_small else "", parts.parts(spec)
    rooms = (
        (spec.dtype == "float32", most, "in float32"),
        (found.bias_grad or found.distances_grad, most, "where what is added to the scores is learned"),
        (is_small and found.mask and spec.needs_grad, _ROOMY, "with gradients beside a dense mask"),
    )
    return [
        Reason(
            code=Code.HEAD_DIM,
            rule=f"{where}head dims are at most {room} {what}",
            observed=f"{widest}, sm{target.sm}",
        )
        for is_asked, room, what in rooms
        if is_asked and widest > room
    ]


def _check_counted(spec: AttentionSpec) -> list[Reason]:
    """Refuse sizes that the kernels' 32-bit counts don't reach. The launch checks symbolic sizes."""
    lengths = {"seqlen_q": spec.seqlen_q, "seqlen_kv": spec.seqlen_kv}
    over = [f"{name} {size}" for name, size in lengths.items() if isinstance(size, int) and size > MOST_POSITIONS]
    reasons = (
        []
        if not over
        else [
            Reason(code=Code.TOO_LARGE, rule=f"there are at most {MOST_POSITIONS} positions", observed=", ".join(over))
        ]
    )
    if (
        isinstance(spec.batch, int)
        and isinstance(spec.num_heads_q, int)
        and spec.batch * spec.num_heads_q > MOST_BLOCKS
    ):
        observed = f"batch {spec.batch}, num_heads_q {spec.num_heads_q}"
        rule = f"batch · num_heads_q is at most {MOST_BLOCKS}"
        reasons += refuse(Code.TOO_LARGE, rule, observed, "split the batch")
    return reasons + _check_summed(spec)


def _check_summed(spec: AttentionSpec) -> list[Reason]:
    """Refuse a learned bias of too many tiles: one program sums each number of its gradient, over tiles of at least 32 queries and keys."""
    bias = spec.score.bias
    if bias is None or not (bias.requires_grad and spec.needs_grad):
        return []
    shape = (*(1,) * (4 - len(bias.shape)), *bias.shape)
    sizes = (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv)
    steps = (1, 1, _LEAST_TILE, _LEAST_TILE)
    summed = [
        -(-size // step)
        for size, step, of_bias in zip(sizes, steps, shape, strict=True)
        if of_bias == 1 and isinstance(size, int)
    ]
    if math.prod(summed) <= MOST_BLOCKS:
        return []
    rule = f"each number of a learned bias is added to the scores of at most {MOST_BLOCKS} tiles"
    return refuse(Code.TOO_LARGE, rule, f"{math.prod(summed)} tiles of {_LEAST_TILE} x {_LEAST_TILE}")


def _check_triton(target: Target) -> list[Reason]:
    rule = f"Triton {'.'.join(map(str, _FIRST_TRITON))} or newer is installed"
    if not target.triton:
        return refuse(Code.LIBRARY_MISSING, rule, "no Triton", "pip install triton")
    if limits.release(target.triton) >= _FIRST_TRITON:
        return []
    return refuse(Code.LIBRARY_VERSION, rule, target.triton, "pip install --upgrade triton")
