"""Functions of linear attention, by the names that programs call them by: transformers', and those of own_functions.py."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_MODELS = "transformers.models.{0}.modeling_{0}"
_OWN = "tests.fuzz.own_functions"
FUNCTIONS = {
    "delta_rule": (_MODELS.format("qwen3_next"), "torch_chunk_gated_delta_rule"),
    "delta_rule_by_token": (_MODELS.format("qwen3_next"), "torch_recurrent_gated_delta_rule"),
    "kimi_delta": (_MODELS.format("kimi_linear"), "chunk_kimi_delta_attention"),
    "kimi_delta_by_token": (_MODELS.format("kimi_linear"), "recurrent_kimi_delta_attention"),
    "state_space": (_MODELS.format("bamba"), "mamba2_chunk_scan"),
    **{name: (_OWN, name) for name in ("by_setting", "by_helper", "by_gradient")},
}


def called_in(text: str, *, exact: bool) -> dict[str, Callable[..., Any]]:
    """Those that a text calls. exact: they compute in float64, where they cast to float32."""
    own = {
        name: getattr(importlib.import_module(module), called)
        for name, (module, called) in FUNCTIONS.items()
        if f"{name}(" in text
    }
    return {name: functools.partial(_widened, one) for name, one in own.items()} if exact else own


def _widened(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
    # A planted fault has to come before our package.
    from attn_compiler.torch_private.substitution import Widened

    with Widened():
        return own(*given, **named)
