"""The sites that each of PyTorch's kernels takes, but for cuDNN's (shared/limits/takes.py). None of them takes a softcap or sinks."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.shared.limits.takes import OWN, PYTORCH_HALF, HeadDims, Takes, since

FLASH = Takes(
    sms=since(80),
    dtypes=PYTORCH_HALF,
    tensors=(),
    head_dims=HeadDims(multiple=8, in_full=8, most=256),
    unequal_head_dims=False,
)

EFFICIENT = Takes(
    sms=since(50),
    dtypes=(*PYTORCH_HALF, "float32"),
    tensors=(OWN,),
    head_dims=HeadDims(multiple=8, in_full=4),
    # Only dropout makes a grid of batch and heads.
    many_blocks=True,
)
EFFICIENT_BEFORE_SM80 = dataclasses.replace(
    EFFICIENT, dtypes=("float16", "float32"), head_dims=HeadDims(multiple=8, in_full=1)
)

CPU_FLASH = Takes(
    sms=None,
    dtypes=("float32", "float64", *PYTORCH_HALF),
    tensors=(OWN, "float32"),
    head_dims=HeadDims(multiple=1, in_full=1),
    unequal_head_dims=False,
    many_blocks=True,
    dropout=False,
)
