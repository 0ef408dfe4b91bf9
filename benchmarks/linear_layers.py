"""Layers of linear attention: calls of models' own functions, whose operands are parameters, and of flash-linear-attention on the same.

Heads of q and k that several heads of v share are repeated by transformers before its functions of the delta rule up to 5.17, and within
them in 5.24.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Run = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Of a layer. function: "gated_delta", "channel_delta" or "state_space". module: of transformers; many, one: its functions."""

    function: str
    module: str
    many: str
    one: str
    groups: int
    heads: int
    dim_k: int
    dim_v: int


_GATED = {"function": "gated_delta", "many": "torch_chunk_gated_delta_rule", "one": "torch_recurrent_gated_delta_rule"}
_CHANNEL = {"function": "channel_delta", "many": "chunk_kimi_delta_attention", "one": "recurrent_kimi_delta_attention"}
_SPACE = {"function": "state_space", "many": "mamba2_chunk_scan", "one": "mamba2_selective_state_update"}
LAYERS = {
    "qwen3_next": Heads(**_GATED, module="qwen3_next", groups=16, heads=32, dim_k=128, dim_v=128),
    "olmo_hybrid": Heads(**_GATED, module="olmo_hybrid", groups=30, heads=30, dim_k=96, dim_v=192),
    "bamba": Heads(**_SPACE, module="bamba", groups=1, heads=128, dim_k=128, dim_v=64),
    "kimi_linear": Heads(**_CHANNEL, module="kimi_linear", groups=32, heads=32, dim_k=128, dim_v=128),
}


def has_groups(function: Callable[..., Any]) -> bool:
    """Whether a function of the delta rule repeats heads of q and k by itself."""
    return "repeat_interleave" in inspect.getsource(inspect.unwrap(function))


def for_each_head(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q and k (B, S, H, K) with a head for each one of v (B, S, H, V)."""
    heads = given["v"].shape[2]
    return {name: given[name].repeat_interleave(heads // given[name].shape[2], dim=2) for name in ("q", "k")}


class LinearLayer(nn.Module):
    """A call of a function. Given as a model gives them: q, k and v in its dtype, decays in float32. is_one: a token on a state."""

    def __init__(
        self, heads: Heads, batch: int, length: int, dtype: torch.dtype, device: str, *, is_one: bool, gives_state: bool
    ) -> None:
        super().__init__()
        module = importlib.import_module(f"transformers.models.{heads.module}.modeling_{heads.module}")
        self.run: Callable[..., Any] = getattr(module, heads.one if is_one else heads.many)
        self.heads, self.is_one, self.is_ssd = heads, is_one, heads.function == "state_space"
        self.has_groups, self.gives_state = has_groups(self.run), gives_state
        made = _operands(heads, (batch, length), dtype, device)
        self.given = nn.ParameterDict({name: nn.Parameter(x) for name, x in made.items()})
        state = (heads.dim_v, heads.dim_k) if self.is_ssd else (heads.dim_k, heads.dim_v)
        self.register_buffer("state", torch.zeros(batch, heads.heads, *state, device=device))

    def forward(self) -> Tensor:
        x = self.given
        if self.is_ssd:
            return self._state_space()
        state = {"initial_state": self.state if self.is_one else None, "output_final_state": self.gives_state}
        heads = {name: x[name] for name in ("q", "k", "v")}
        if not self.has_groups:
            heads |= for_each_head(heads)
        named = {"g": x["g"], "beta": x["beta"], "use_qk_l2norm_in_kernel": True}
        out, last = self.run(heads["q"], heads["k"], heads["v"], **named, **state)
        if last is not None:
            self.state.copy_(last)
        return out  # type: ignore[no-any-return]

    def _state_space(self) -> Tensor:
        x, dim, size = self.given, self.heads.dim_v, self.heads.dim_k
        more = {name: x[name] for name in ("D", "dt_bias") if name in x}
        if not self.is_one:
            return self.run(x["v"], x["beta"], x["A"], x["k"], x["q"], chunk_size=256, **more, dt_softplus=True)  # type: ignore[no-any-return]
        spread = x["beta"][:, 0, :, None].expand(-1, -1, dim), x["A"][:, None, None].expand(-1, dim, size)
        wide = {name: number[:, None].expand(-1, dim) for name, number in more.items()}
        return self.run(self.state, x["v"][:, 0], *spread, x["k"][:, 0], x["q"][:, 0], **wide, dt_softplus=True)  # type: ignore[no-any-return]


def _operands(heads: Heads, tokens: tuple[int, int], half: torch.dtype, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    made = {name: normal(*tokens, heads.groups, heads.dim_k).to(half) for name in ("q", "k")}
    made["v"] = normal(*tokens, heads.heads, heads.dim_v).to(half)
    if heads.function == "state_space":
        numbers = {name: normal(heads.heads) for name in ("A", "D", "dt_bias")}
        made |= {"A": -numbers["A"].exp(), "D": numbers["D"].to(half), "dt_bias": numbers["dt_bias"].to(half)}
        return made | {"beta": normal(*tokens, heads.heads).to(half)}
    decay = normal(*tokens, heads.heads, *((heads.dim_k,) if heads.function == "channel_delta" else ()))
    return made | {"g": -F.softplus(decay - 2), "beta": normal(*tokens, heads.heads).sigmoid().to(half)}


def by_fla(layer: LinearLayer) -> Run:
    """The same by flash-linear-attention. The state space: without what is added of x, and it knows no groups, so q and k are repeated."""
    x, state, is_one = layer.given, layer.state, layer.is_one
    rule = {"gated_delta": "gated_delta_rule", "channel_delta": "kda", "state_space": "simple_gla"}[
        layer.heads.function
    ]
    function = getattr(importlib.import_module(f"fla.ops.{rule}"), f"{'fused_recurrent' if is_one else 'chunk'}_{rule}")

    def delta() -> Tensor:
        settings = {"use_qk_l2norm_in_kernel": True, "output_final_state": layer.gives_state}
        settings |= {"initial_state": state} if is_one else {}
        out, last = function(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **settings)
        if is_one:
            state.copy_(last)
        return out  # type: ignore[no-any-return]

    def space() -> Tensor:
        dt = F.softplus(x["beta"].float() + x["dt_bias"].float())
        q, k = (x[name].expand(-1, -1, x["v"].shape[2], -1).contiguous() for name in ("q", "k"))
        settings: dict[str, Any] = {"initial_state": state.mT, "output_final_state": True} if is_one else {}
        out, last = function(q, k, (x["v"] * dt[..., None]).to(x["v"].dtype), g=x["A"] * dt, scale=1.0, **settings)
        if is_one:
            state.copy_(last.mT)
        return out  # type: ignore[no-any-return]

    return space if layer.is_ssd else delta


HAS_FLA = importlib.util.find_spec("fla") is not None
