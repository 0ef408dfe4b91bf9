"""flash-linear-attention's functions on the operands of benchmarks/bench_linear_gpu.py, where the package can be imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

Named = Mapping[str, Any]
Run = Callable[[], Tensor]


def _gated_delta(scenario: str, x: Named, state: Tensor) -> Run:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    return _delta(
        fused_recurrent_gated_delta_rule if scenario == "decode" else chunk_gated_delta_rule, scenario, x, state
    )


def _channel_delta(scenario: str, x: Named, state: Tensor) -> Run:
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    return _delta(fused_recurrent_kda if scenario == "decode" else chunk_kda, scenario, x, state)


def _delta(function: Callable[..., Any], scenario: str, x: Named, state: Tensor) -> Run:
    settings = {"use_qk_l2norm_in_kernel": True, "output_final_state": scenario != "training"}
    settings |= {"initial_state": state} if scenario == "decode" else {}

    def run() -> Tensor:
        out, last = function(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **settings)
        if scenario == "decode":
            state.copy_(last)
        return out  # type: ignore[no-any-return]

    return run


def _state_space(scenario: str, x: Named, state: Tensor) -> Run:
    """Without what is added of x. It knows no groups, so q and k are repeated."""
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    function = fused_recurrent_simple_gla if scenario == "decode" else chunk_simple_gla
    settings: dict[str, Any] = {"initial_state": state.mT, "output_final_state": True} if scenario == "decode" else {}

    def run() -> Tensor:
        dt = F.softplus(x["beta"].float() + x["dt_bias"].float())
        q, k = (x[name].expand(-1, -1, x["v"].shape[2], -1) for name in ("q", "k"))
        v = (x["v"] * dt[..., None]).to(x["v"].dtype)
        out, last = function(q.contiguous(), k.contiguous(), v, g=x["A"] * dt, scale=1.0, **settings)
        if scenario == "decode":
            state.copy_(last.mT)
        return out  # type: ignore[no-any-return]

    return run


#: by the function's name; none where the package is not there
PEERS: dict[str, Callable[[str, Named, Tensor], Run]] = (
    {}
    if importlib.util.find_spec("fla") is None
    else {"gated_delta": _gated_delta, "state_space": _state_space, "channel_delta": _channel_delta}
)
