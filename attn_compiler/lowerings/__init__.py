"""Every way to compute an attention site. To add one: its folder, its line in LOWERINGS, its row in choice, its tests.

base.py says what a lowering is. shared is the floor that every family stands on, choice the order in which lowerings are asked. A
family is a folder: plain, sdpa, rows, triton, decode, cudnn, fa4, fp8, hopper.
"""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Lowering, Operands
from attn_compiler.lowerings.choice.priorities import order
from attn_compiler.lowerings.cudnn.lowering import CudnnAttention
from attn_compiler.lowerings.decode.latent import DecodeLatent
from attn_compiler.lowerings.decode.lowering import Decode
from attn_compiler.lowerings.fa4.lowering import FlashAttention4
from attn_compiler.lowerings.fp8.cudnn import CudnnFp8
from attn_compiler.lowerings.fp8.hopper import HopperFp8
from attn_compiler.lowerings.fp8.reference import ReferenceFp8
from attn_compiler.lowerings.fp8.triton import TritonFp8
from attn_compiler.lowerings.hopper.lowering import HopperAttention
from attn_compiler.lowerings.plain.absorbed import Absorbed
from attn_compiler.lowerings.plain.plain_math import PlainMath
from attn_compiler.lowerings.plain.reference import Reference
from attn_compiler.lowerings.plain.untouched import Untouched
from attn_compiler.lowerings.rows.lowering import CpuRows
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash, SdpaCudnn, SdpaEfficient, SdpaFlash
from attn_compiler.lowerings.triton.lowering import TritonAttention

__all__ = ["LOWERINGS", "Emitter", "LayoutDemand", "Lowering", "Operands", "by_name", "order", "packaged_twin"]

LOWERINGS: tuple[Lowering, ...] = (
    Reference(),
    ReferenceFp8(),
    SdpaCudnn(),
    SdpaFlash(),
    SdpaEfficient(),
    SdpaCpuFlash(),
    CpuRows(),
    FlashAttention4(),
    HopperAttention(),
    TritonAttention(),
    HopperFp8(),
    TritonFp8(),
    CudnnAttention(),
    CudnnFp8(),
    Decode(),
    DecodeLatent(),
    PlainMath(),
    Absorbed(),
    Untouched(),
)

_BY_NAME = {lowering.name: lowering for lowering in LOWERINGS}


def by_name(name: str) -> Lowering:
    """The lowering of that name. Raises KeyError, naming those that there are."""
    if name not in _BY_NAME:
        raise KeyError(f"no lowering {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def packaged_twin(op: Any) -> Any:
    """The op that stands for one of ours in a program that is compiled ahead; None where there is none (shared/packaged_ops.py)."""
    from attn_compiler.lowerings.shared.packaged_ops import twin

    return twin(op)
