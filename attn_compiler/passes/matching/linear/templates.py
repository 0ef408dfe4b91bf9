"""Parameter lists of functions of linear attention, as data: one row each. To add one, add a row to TEMPLATES.

Parameter names only propose a function; its computation is proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_compiler.spec.linear import LinearKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """One list of parameters.

    recurrence: its name. by_token: the function goes token by token.
    operands: role -> parameter, in the order of `LinearForm.roles`. optional: roles that may be None.
    settings: parameters that are numbers or flags. fixed: parameters always set to this value when a recurrence is run.
    state_flag: the parameter that asks for the last state.
    gives: "pair": (out, state), where the state is None unless asked for. "out or pair": the state comes only if asked for. "out, writes":
    out alone, for one token. The state is written in place, so no part of it has a gradient.
    """

    recurrence: LinearKind
    operands: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    settings: tuple[str, ...] = ()
    state_flag: str | None = None
    gives: str = "pair"
    by_token: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> frozenset[str]:
        """Parameters that a function must have to be proposed."""
        flag = () if self.state_flag is None else (self.state_flag,)
        return frozenset((*self.operands.values(), *self.settings, *self.fixed, *flag))


_DELTA = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta", "state": "initial_state"}
_SSD = {"x": "hidden_states", "dt": "dt", "A": "A", "B": "B", "C": "C", "D": "D", "dt_bias": "dt_bias"}
_NORMALISED = "use_qk_l2norm_in_kernel"

TEMPLATES: tuple[Template, ...] = (
    # transformers: torch_chunk_gated_delta_rule, chunk_kimi_delta_attention
    Template(
        recurrence="delta",
        operands=_DELTA,
        optional=frozenset({"state"}),
        settings=("chunk_size", _NORMALISED),
        state_flag="output_final_state",
    ),
    # transformers: torch_recurrent_gated_delta_rule, recurrent_kimi_delta_attention
    Template(
        recurrence="delta",
        operands=_DELTA,
        optional=frozenset({"state"}),
        settings=(_NORMALISED,),
        state_flag="output_final_state",
        by_token=True,
    ),
    # transformers: mamba2_chunk_scan
    Template(
        recurrence="ssd",
        operands={**_SSD, "state": "initial_states"},
        optional=frozenset({"D", "dt_bias", "state"}),
        settings=("chunk_size", "dt_softplus", "dt_limit"),
        state_flag="return_final_states",
        gives="out or pair",
    ),
    # transformers: mamba2_selective_state_update
    Template(
        recurrence="ssd",
        operands={**_SSD, "state": "state"},
        optional=frozenset({"D", "dt_bias"}),
        settings=("dt_softplus",),
        gives="out, writes",
        by_token=True,
        fixed={"z": None},
    ),
)
