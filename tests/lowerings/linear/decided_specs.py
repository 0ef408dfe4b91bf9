"""Calls of linear attention as models make them, that the table of decisions has a line for each of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from attn_compiler.spec.linear import LinearForm, LinearSpec
from tests.lowerings.linear.linear_forms import CHANNEL, DELTA, STATE_SPACE

_WITHOUT_STATE = dataclasses.replace(DELTA, roles=("q", "k", "v", "g", "beta"))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The heads of a model's layer. form: for many tokens."""

    form: LinearForm
    heads_k: int
    heads_v: int
    dim_k: int
    dim_v: int


LAYERS = {
    "qwen3_next": Layer(form=DELTA, heads_k=16, heads_v=32, dim_k=128, dim_v=128),
    "olmo_hybrid": Layer(form=_WITHOUT_STATE, heads_k=30, heads_v=30, dim_k=96, dim_v=192),
    "kimi_linear": Layer(form=CHANNEL, heads_k=32, heads_v=32, dim_k=128, dim_v=128),
    "bamba": Layer(form=STATE_SPACE, heads_k=1, heads_v=128, dim_k=128, dim_v=64),
    "wide": Layer(form=DELTA, heads_k=2, heads_v=2, dim_k=320, dim_v=128),
}
#: tokens of a call, and whether it is differentiated
CALLS: dict[str, tuple[int | str, bool]] = {
    "token": (1, False),
    "short": (64, False),
    "prompt": (512, False),
    "training": (512, True),
    "long": (4096, False),
    "any_length": ("s0", False),
    "any_length_training": ("s0", True),
}
#: what a user may name, for a line each
ASKED: dict[str, tuple[str, ...] | None] = {"": None, "_triton": ("linear_triton", "linear_reference")}


def specs() -> Iterator[tuple[str, LinearSpec, tuple[str, ...] | None]]:
    """(name, spec on no device yet, what the user names)."""
    for layer, heads in LAYERS.items():
        for call, (length, needs_grad) in CALLS.items():
            for dtype in ("bfloat16", "float32", "float64"):
                spec = LinearSpec(
                    form=_in(heads.form, dtype, is_one=call == "token"),
                    batch=2,
                    length=length,
                    num_heads_k=heads.heads_k,
                    num_heads_v=heads.heads_v,
                    head_dim_k=heads.dim_k,
                    head_dim_v=heads.dim_v,
                    dtype=dtype,
                    device="cpu",
                    needs_grad=needs_grad,
                )
                for suffix, asked in ASKED.items():
                    yield f"linear_{layer}_{call}_{dtype}{suffix}", spec, asked


def _in(form: LinearForm, dtype: str, *, is_one: bool) -> LinearForm:
    """The function's form in a dtype: results of the delta rule are in that of q. One token goes by itself."""
    out = dtype if form.recurrence == "delta" or dtype == "float64" else "float32"
    state = "float64" if dtype == "float64" else "float32"
    return dataclasses.replace(form, out_dtype=out, state_dtype=state, chunk=1 if is_one else form.chunk)
