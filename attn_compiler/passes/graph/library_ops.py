"""The libraries' kernels whose arguments are understood, and the calls of them in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import autograd_functions, opaque_calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """The names of an op's arguments. q, k and v are (B, S, H, D), or (tokens, H, D) with the bounds of documents.

    window: the number of keys that a query sees to the left and to the right of its own, as two numbers or one list; below zero: all.
    bounds: of documents in q and in k, (documents + 1).
    mask_type: a number in place of `causal` and `window`: 0 for none, 1 from the first query on, 2 up to the last one.
    off: must be None, False or zero.
    Any other argument but those of HARMLESS must have its default.
    """

    qkv: tuple[str, str, str]
    scale: str
    dropout: str
    off: tuple[str, ...]
    causal: str | None = None
    window: tuple[str, ...] = ()
    softcap: str | None = None
    bounds: tuple[str, str] | None = None
    mask_type: str | None = None

    def known(self) -> frozenset[str]:
        """Return the arguments that are read here, or do not change the attention."""
        one = (self.scale, self.dropout, self.causal, self.softcap, self.mask_type)
        return HARMLESS.union(self.qkv, self.off, self.window, self.bounds or (), filter(None, one))


#: arguments that do not change the attention: the longest documents' lengths, the kernel's method and further outputs, repetitions of
#: other arguments
HARMLESS = frozenset(
    "max_seqlen_q max_seqlen_k max_q max_k num_splits compute_log_sumexp enable_gqa deterministic rng_state".split()
)

_QKV = ("query", "key", "value")
_OF_FLASH_ATTN: dict[str, Any] = {
    "qkv": ("q", "k", "v"),
    "scale": "softmax_scale",
    "dropout": "dropout_p",
    "causal": "causal",
    "window": ("window_size_left", "window_size_right"),
    "softcap": "softcap",
}

OPS: Mapping[str, Op] = {
    "flash_attn::_flash_attn_forward": Op(**_OF_FLASH_ATTN, off=("alibi_slopes", "return_softmax")),
    "flash_attn::_flash_attn_varlen_forward": Op(
        **_OF_FLASH_ATTN,
        bounds=("cu_seqlens_q", "cu_seqlens_k"),
        off=("alibi_slopes", "return_softmax", "block_table", "leftpad_k", "seqused_k", "zero_tensors"),
    ),
    "xformers_flash::flash_fwd": Op(
        qkv=_QKV,
        scale="softmax_scale",
        dropout="p",
        causal="is_causal",
        window=("window_left", "window_right"),
        bounds=("cu_seqlens_q", "cu_seqlens_k"),
        off=("seqused_k", "return_softmax", "block_tables"),
    ),
    "torch_attn::_varlen_attn": Op(
        qkv=_QKV,
        scale="scale",
        dropout="",
        causal="is_causal",
        window=("window_size",),
        bounds=("cu_seq_q", "cu_seq_k"),
        off=("seqused_k", "block_table"),
    ),
    "aten::_flash_attention_forward": Op(
        qkv=_QKV,
        scale="scale",
        dropout="dropout_p",
        causal="is_causal",
        window=("window_size_left", "window_size_right"),
        bounds=("cum_seq_q", "cum_seq_k"),
        off=("return_debug_mask", "seqused_k", "alibi_slopes", "block_table"),
    ),
    "aten::_efficient_attention_forward": Op(
        qkv=_QKV,
        scale="scale",
        dropout="dropout_p",
        bounds=("cu_seqlens_q", "cu_seqlens_k"),
        off=("bias", "seqlen_k", "window_size"),
        mask_type="custom_mask_type",
    ),
}


def given_arguments(node: fx.Node) -> dict[str, Any] | str:
    """Return the value of each argument of an op, defaults included; a text: the reason why they are not known."""
    overload = _overload(node)
    if overload._overloadname != "default":
        return f"its overload {overload._overloadname} is another attention"
    arguments = overload._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    others = [name for name in node.kwargs if name not in {argument.name for argument in arguments}]
    if others or len(node.args) > len(positional):
        return "its arguments are those of another overload"
    return {**given, **dict(zip(positional, node.args, strict=False)), **node.kwargs}


def unknown_argument(node: fx.Node, given: Mapping[str, Any], known: frozenset[str]) -> str | None:
    """Return the name of the first argument that is not known and has another value than its default."""
    for argument in _overload(node)._schema.arguments:
        is_default = argument.has_default_value() and given[argument.name] == argument.default_value
        if argument.name not in known and not is_default:
            return str(argument.name)
    return None


def is_off(value: Any) -> bool:
    """Return whether an argument switches nothing on: None, False or 0."""
    return value is None or value in (False, 0)


def _overload(node: fx.Node) -> torch._ops.OpOverload:
    target: Any = node.target
    return target if isinstance(target, torch._ops.OpOverload) else target.default


def kernel_in(node: fx.Node) -> fx.Node | None:
    """Return the call of a kernel: the node itself, or one in the forward of its autograd.Function."""
    if opaque_calls.name_of(node) in OPS:
        return node
    kernel = autograd_functions.kernel_of(node)
    return kernel if kernel is not None and opaque_calls.name_of(kernel) in OPS else None
