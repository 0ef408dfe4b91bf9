"""Every way to compute an attention site. To add one: its file, its line in LOWERINGS, its row in priorities, its test."""

from __future__ import annotations

from attn_compiler.lowerings import cudnn_ops as cudnn_ops
from attn_compiler.lowerings import decode_ops as decode_ops
from attn_compiler.lowerings import fa4_ops as fa4_ops
from attn_compiler.lowerings import ops as ops  # defines the leaf ops that lowerings put into graphs
from attn_compiler.lowerings import triton_ops as triton_ops
from attn_compiler.lowerings.base import Emitter, LayoutDemand, Lowering, Operands
from attn_compiler.lowerings.cudnn import CudnnAttention
from attn_compiler.lowerings.cudnn_fp8 import CudnnFp8
from attn_compiler.lowerings.decode import Decode
from attn_compiler.lowerings.fa4 import FlashAttention4
from attn_compiler.lowerings.hopper_fp8 import HopperFp8
from attn_compiler.lowerings.plain_math import PlainMath
from attn_compiler.lowerings.priorities import order
from attn_compiler.lowerings.reference import Reference
from attn_compiler.lowerings.reference_fp8 import ReferenceFp8
from attn_compiler.lowerings.sdpa import SdpaCpuFlash, SdpaCudnn, SdpaEfficient, SdpaFlash
from attn_compiler.lowerings.triton import TritonAttention
from attn_compiler.lowerings.triton_fp8 import TritonFp8
from attn_compiler.lowerings.untouched import Untouched

__all__ = ["LOWERINGS", "Emitter", "LayoutDemand", "Lowering", "Operands", "by_name", "order"]

LOWERINGS: tuple[Lowering, ...] = (
    Reference(),
    ReferenceFp8(),
    SdpaCudnn(),
    SdpaFlash(),
    SdpaEfficient(),
    SdpaCpuFlash(),
    FlashAttention4(),
    TritonAttention(),
    HopperFp8(),
    TritonFp8(),
    CudnnAttention(),
    CudnnFp8(),
    Decode(),
    PlainMath(),
    Untouched(),
)

_BY_NAME = {lowering.name: lowering for lowering in LOWERINGS}


def by_name(name: str) -> Lowering:
    """The lowering of that name. Raises KeyError, naming those that there are."""
    if name not in _BY_NAME:
        raise KeyError(f"no lowering {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
