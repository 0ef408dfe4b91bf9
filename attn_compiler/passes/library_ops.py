"""The kernels of libraries whose arguments are understood, and where a graph calls one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from attn_compiler.passes import autograd_functions, opaque_calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """What an op calls its arguments. q, k and v are (B, S, H, D), or (tokens, H, D) with the bounds of documents.

    window: how many keys to the left and to the right of its own a query sees, as two numbers or as one list; below zero: all.
    bounds: of documents in q and in k, (documents + 1).
    mask_type: a number in place of `causal` and `window`: 0 for none, 1 from the first query on, 2 up to the last one.
    off: must be None, False or zero.
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
        off=("alibi_slopes", "return_softmax", "block_table", "leftpad_k", "seqused_k"),
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


def kernel_in(node: fx.Node) -> fx.Node | None:
    """The call of a kernel that a node is, or that the forward of its autograd.Function makes."""
    if opaque_calls.name_of(node) in OPS:
        return node
    kernel = autograd_functions.kernel_of(node)
    return kernel if kernel is not None and opaque_calls.name_of(kernel) in OPS else None
