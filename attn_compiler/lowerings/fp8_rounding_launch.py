"""Calls the kernel that rounds one tensor. Imports triton, so it comes late."""

from __future__ import annotations

import functools

import torch
import triton

from attn_compiler.lowerings.fp8_rounding import VECTOR, How, Outputs, empty_outputs
from attn_compiler.lowerings.kernels import round_fp8 as kernels
from attn_compiler.lowerings.launching import Arguments, alike, launch
from attn_compiler.lowerings.on_device import on
from attn_compiler.lowerings.triton_arguments import along
from attn_compiler.lowerings.triton_plan import Tile

#: positions that a program rounds at once
PART = 128
_WARPS = 8


def round_fp8(x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor | None, text: str) -> Outputs:
    """As `fp8_rounding.round_fp8`."""
    how = How.from_text(text)
    given = [tensor for tensor in (x, mean, scale) if tensor is not None]
    same = alike(f"round_fp8 {text} {mean is not None} {scale is not None}", given)
    with on(x.device):
        outputs = empty_outputs(x, scale is not None, how)
        named = {"x": x, "mean": mean, "scale": scale, "rounded": outputs[0], "descale": outputs[1]}
        named["restored"] = outputs[2] if how.restore else None
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        if x.numel():
            launch(kernels.round_fp8, same, tensors, functools.partial(_arguments, tensors, how))
    return outputs


def _arguments(tensors: dict[str, torch.Tensor], how: How) -> Arguments:
    x, restored, scale = tensors["x"], tensors.get("restored"), tensors.get("scale")
    batch, heads, length, head_dim = x.shape
    block = how.block if scale is None else PART
    names = ("x", "mean", "scale", "rounded", "descale", "restored")
    return Arguments(
        grid=(triton.cdiv(length, block), heads, batch),
        tensors={name.capitalize(): name if name in tensors else None for name in names},
        numbers={
            "stride_xb": x.stride(0),
            "stride_xh": x.stride(1),
            "stride_xs": x.stride(2),
            "stride_rb": 0 if restored is None else restored.stride(0),
            "stride_rh": 0 if restored is None else restored.stride(1),
            "stride_rs": 0 if restored is None else restored.stride(2),
            "scale_b": 0 if scale is None else along(scale, 0),
            "scale_h": 0 if scale is None else along(scale, 1),
            "heads": heads,
            "length": length,
            "padded": length + -length % VECTOR,
            "blocks": triton.cdiv(length, block),
            "factor": how.factor,
            "largest": how.largest,
            "fits": how.fits,
            "BLOCK": block,
            "PART": PART,
            "HEAD_DIM": head_dim,
            "WIDTH": triton.next_power_of_2(head_dim),
            "TURNED": how.turned,
            "WHOLE": how.dtype == torch.int8,
        },
        tile=Tile(queries=block, keys=head_dim, warps=_WARPS, stages=1),
    )
