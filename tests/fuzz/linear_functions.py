"""Functions of linear attention of transformers, by the names that programs call them by."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

FUNCTIONS = {
    "delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "delta_rule_by_token": ("qwen3_next", "torch_recurrent_gated_delta_rule"),
    "kimi_delta": ("kimi_linear", "chunk_kimi_delta_attention"),
    "state_space": ("bamba", "mamba2_chunk_scan"),
}


def called_in(text: str, *, exact: bool) -> dict[str, Callable[..., Any]]:
    """Those that a text calls. exact: they compute in float64, where they cast to float32."""
    own = {name: _own(*where) for name, where in FUNCTIONS.items() if f"{name}(" in text}
    return {name: functools.partial(_widened, one) for name, one in own.items()} if exact else own


def _own(family: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name)  # type: ignore[no-any-return]


def _widened(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
    # A planted fault has to come before our package.
    from attn_compiler.torch_private.substitution import Widened

    with Widened():
        return own(*given, **named)
