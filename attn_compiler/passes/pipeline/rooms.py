"""The modules that the steps on graphs call, all imported at once, before a step's time is taken: half of a start's imports."""

from attn_compiler.passes.context_parallel import agreeing, spreading
from attn_compiler.passes.graph import mirroring
from attn_compiler.passes.matching import match, unseen
from attn_compiler.passes.recovering import block_masks, body_inputs, recover
from attn_compiler.passes.spelling import checkpoints, plain_calls
from attn_compiler.passes.unpad import judging, packing
from attn_compiler.passes.writing import (
    buffers,
    fp8_sites,
    layout,
    lower,
    select,
    summary,
    time_kernels,
    unpacked_graph,
    verify,
)

__all__ = [
    "agreeing",
    "block_masks",
    "body_inputs",
    "buffers",
    "checkpoints",
    "fp8_sites",
    "judging",
    "layout",
    "lower",
    "match",
    "mirroring",
    "packing",
    "plain_calls",
    "recover",
    "select",
    "spreading",
    "summary",
    "time_kernels",
    "unpacked_graph",
    "unseen",
    "verify",
]
