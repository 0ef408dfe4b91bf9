"""Calls for which one rank has to compile and the others do not: what each rank raises, and after how many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.reasons.errors import AttnCompilerError

WIDTH, BATCH, LENGTH = 32, 2, 16

Call = Callable[[Any, Tensor, Tensor], Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, position_ids: Tensor, shift: int = 0) -> Tensor:
        turned = x * torch.cos(position_ids + shift)[..., None]
        q, k, v = self.qkv(turned).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _without_gradients(m: Any, x: Tensor, p: Tensor) -> Any:
    with torch.no_grad():
        return m(x, p)


def _in_inference(m: Any, x: Tensor, p: Tensor) -> Any:
    with torch.inference_mode():
        return m(x, p)


def _in_autocast(m: Any, x: Tensor, p: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m(x, p)


def _without_grad_of_a_parameter(m: Any, x: Tensor, p: Tensor) -> Any:
    m.qkv.weight.requires_grad_(False)
    try:
        return m(x, p)
    finally:
        m.qkv.weight.requires_grad_(True)


#: what one rank does while the other calls as before -> what the error names
OTHERS: Mapping[str, tuple[Call, str]] = {
    "strides": (lambda m, x, p: m(x.transpose(0, 1).contiguous().transpose(0, 1), p), "stride"),
    "strides of positions": (lambda m, x, p: m(x, p[:1].expand(BATCH, -1)), "l_position_ids_"),
    "int32 positions": (lambda m, x, p: m(x, p.int()), "torch.int32"),
    "no_grad": (_without_gradients, "grad_mode"),
    "inference mode": (_in_inference, "with gradients: False"),
    "autocast": (_in_autocast, "autocast"),
    "batch size": (lambda m, x, p: m(x[:1], p[:1]), "l_x_"),
    "larger batch": (lambda m, x, p: m(torch.cat((x, x)), torch.cat((p, p))), "l_x_"),
    "length": (lambda m, x, p: m(x[:, :8].contiguous(), p[:, :8].contiguous()), "could not compile|dynamic=False"),
    "number": (lambda m, x, p: m(x, p, 3), "shift == 0"),
    "positions in float32": (lambda m, x, p: m(x, p.float()), "l_position_ids_: torch.float32"),
    "gradient of the input": (lambda m, x, p: m(x.clone().requires_grad_(), p), "requires a gradient"),
    "frozen parameter": (_without_grad_of_a_parameter, "requires_grad"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """error: what was raised. seconds: until then. after: whether the next call, the same on all ranks, ran."""

    error: str | None
    seconds: float
    after: bool


def measured(dynamic: bool | None, asked: list[tuple[str, int]]) -> dict[tuple[str, int], Outcome]:
    """By what differs, and on which rank. On every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {(name, who): _measured(mesh, OTHERS[name][0], who, dynamic) for name, who in asked}


def _measured(mesh: Any, other: Call, who: int, dynamic: bool | None) -> Outcome:
    torch._dynamo.reset()
    attn_compiler.reset()
    cp = ContextParallel(mesh)
    model = Layer()
    model.compile(backend="attn_compiler", options={"context_parallel": cp, "inner": "eager"}, dynamic=dynamic)
    x, p = torch.randn(BATCH, LENGTH, WIDTH), cp.positions(LENGTH).expand(BATCH, -1).contiguous()
    model(x, p)
    model(x, p)
    began, error = time.monotonic(), None
    try:
        other(model, x, p) if dist.get_rank() == who else model(x, p)
    except AttnCompilerError as raised:
        error = str(raised)
    seconds = time.monotonic() - began
    return Outcome(error=error, seconds=seconds, after=model(x, p).shape == x.shape)


#: what ranks may give otherwise
OPTIONS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "load_balance": ({"load_balance": None}, {"load_balance": "head_tail"}),
    "method": ({"method": "all_gather"}, {"method": "all_to_all"}),
    "method that comes to the same": ({"method": "auto"}, {"method": "all_to_all"}),
    "replicated": ({"replicated": ("lengths",)}, {}),
    "allow": ({"allow": ("aten.cumsum.default",)}, {}),
    "gather_limit": ({"gather_limit": 0}, {}),
    "verify": ({"verify": True}, {}),
    "lowerings": ({"lowerings": ["math", "reference"]}, {}),
    "inner": ({"inner": "aot_eager"}, {"inner": "eager"}),
    "lowering": ({"lowering": "math"}, {}),
}


def with_other_options(names: list[str]) -> dict[str, Outcome]:
    """By which option rank 1 gives otherwise. On every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name in names:
        given = OPTIONS[name]
        torch._dynamo.reset()
        attn_compiler.reset()
        own = {"inner": "eager", **given[min(dist.get_rank(), 1)]}
        of_cp = {key: own.pop(key) for key in list(own) if key in ContextParallel.__dataclass_fields__}
        cp = ContextParallel(mesh, **of_cp)
        model = torch.compile(Layer(), backend="attn_compiler", options={"context_parallel": cp, **own})
        x, p = torch.randn(BATCH, LENGTH, WIDTH), cp.positions(LENGTH).expand(BATCH, -1).contiguous()
        began, error = time.monotonic(), None
        try:
            model(x, p)
        except AttnCompilerError as raised:
            error = str(raised)
        found[name] = Outcome(error=error, seconds=time.monotonic() - began, after=True)
    return found
