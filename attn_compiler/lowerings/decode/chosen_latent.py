"""A prompt whose queries each name their keys by indices, over the latent that k and v are made of. Forward only.

Time follows the chosen keys and not the length. Each product is of the latent's width, several times that of a head. So it pays for long
prompts alone: with DeepSeek's sizes (2048 keys, a latent of 512 + 64, heads of 192 and 128) it has as many products as a causal mask at
some 14,000 tokens. Imports no Triton.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.choice import chosen_rows
from attn_compiler.lowerings.decode import gathered
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule, known
from attn_compiler.lowerings.shared.parts import latents
from attn_compiler.spec.attention import AttentionSpec, LatentSpec
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.dtypes import BYTES
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.target import Target

#: Rows that tensor cores take at once; by bytes of an element: heads of a program at most, chosen keys of a tile, warps and stages.
#: Compiled offline, not measured.
_FEWEST_ROWS, _SCHEDULES = 16, {2: (64, 32, 8, 2), 4: (16, 16, 8, 1)}


def chosen_of(spec: AttentionSpec, target: Target) -> Chosen | None:
    """What the queries' keys are named by, where a prompt's queries are many; None where they are few, where all keys are faster, or
    something else is in the way."""
    latent, score = spec.latent, spec.score
    is_prompt = isinstance(spec.seqlen_q, int) and spec.seqlen_q > latents.MOST_QUERIES
    if latent is None or not is_prompt or spec.needs_grad or spec.dtype not in ("float32", "bfloat16", "float16"):
        return None
    if score.pointwise is not None or score.sinks is not None or score.scale <= 0:
        return None
    if not chosen_rows.is_faster(spec, target):
        return None
    chosen = gathered.named_by(spec)
    # Beside a number that stands in a row twice each is compared with each other, which are too many here.
    return chosen if chosen is not None and chosen.distinct else None


def emit(emitter: Emitter, spec: AttentionSpec, latent: LatentSpec, operands: Operands) -> fx.Node:
    """The attention of a site that `chosen_of` takes."""
    chosen = chosen_of(spec, emitter.target)
    if chosen is None:
        raise ValueError("the site's keys are not chosen by its queries")
    emitter.note(f"the {chosen.keys} keys of {chosen.words} are read, and no others of {spec.seqlen_kv}")
    given = latents.given(operands)
    keys, counts = gathered.keys_of(emitter, spec, operands, chosen)
    beside = () if given.rope is None else (given.rope,)
    further = [*beside, keys, *(() if counts is None else (counts,))]
    # Who computes reads neither the mask nor what was around it.
    call = DecodeCall(spec=dataclasses.replace(spec, mask=MaskSpec()), schedule=_schedule(spec), of_latent=True)
    leaf = torch.ops.attn_compiler.chosen_latent.default
    q = latents.as_latent(emitter, latent, operands)
    outputs = emitter.call(leaf, q, given.latent, given.latent, further, call.to_text())
    weight = emitter.call(torch.transpose, given.weight_v, 1, 2)
    return latents.by_heads(emitter, emitter.call(operator.getitem, outputs, 0), weight)


def _schedule(spec: AttentionSpec) -> Schedule:
    most, keys, warps, stages = _SCHEDULES[BYTES[spec.dtype]]
    rows = max(_FEWEST_ROWS, min(1 << (known(spec.num_heads_q) - 1).bit_length(), most))
    return Schedule(keys=keys, warps=warps, stages=stages, rows=rows, programs=1, least_keys=keys)
