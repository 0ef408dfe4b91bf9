"""Attention inside an opaque op: a library's kernel, called by its own op.

It is reported as a miss, with a remedy, unless its arguments say all of it (library_calls.py). An op is recognised by name and arguments
alone: its name says attention, and it is given at least q, k and v.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason

_SDPA = "load the model with attn_implementation='sdpa', or call torch.nn.functional.scaled_dot_product_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A library. namespaces: prefixes of its ops' namespaces. name: for people. remedy: for the user."""

    namespaces: tuple[str, ...]
    name: str
    remedy: str = _SDPA


LIBRARIES: tuple[Library, ...] = (
    Library(namespaces=("flash_attn", "_flash_attn", "vllm_flash_attn"), name="flash_attn"),
    Library(
        namespaces=("xformers",),
        name="xFormers",
        remedy="call torch.nn.functional.scaled_dot_product_attention in place of memory_efficient_attention; in diffusers "
        "call disable_xformers_memory_efficient_attention()",
    ),
    Library(
        namespaces=("vllm", "_vllm"),
        name="vLLM",
        remedy="vLLM's attention reads a cache of its own; outside of vLLM load the model with attn_implementation='sdpa'",
    ),
    Library(
        namespaces=("torch_attn",),
        name="torch.nn.attention.varlen",
        remedy="call torch.nn.functional.scaled_dot_product_attention with a mask that keeps the documents apart",
    ),
    Library(
        namespaces=("aten",),
        name="PyTorch, called by name",
        remedy="call torch.nn.functional.scaled_dot_product_attention, which leaves the kernel to choose",
    ),
    Library(namespaces=("transformer_engine", "tex"), name="Transformer Engine"),
    Library(namespaces=("sageattention", "sageattn"), name="SageAttention"),
    Library(namespaces=("flashinfer",), name="FlashInfer"),
)

#: a library that is not listed
_OTHER = Library(namespaces=(), name="an op of its own")

#: PyTorch's own ops are matched or decomposed; ours replaced a site
_NOT_OPAQUE = frozenset({"aten", "prim", "prims", "higher_order", "attn_compiler", "inductor"})
#: internal kernels of PyTorch that some models call by name
_OF_PYTORCH = frozenset({"_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"})
_SAYS_ATTENTION = ("attention", "attn", "mha")
_FEWEST_TENSORS = 3


def name_of(node: fx.Node) -> str | None:
    """Return the name of the attention op that a Dynamo node calls, if it is opaque: "flash_attn::_flash_attn_forward"."""
    name = qualified(node)
    if name is None:
        return None
    namespace, _, op = name.partition("::")
    runs = any(word in op for word in ("forward", "fwd"))
    says = any(word in op for word in _SAYS_ATTENTION) or (_library(namespace) is not _OTHER and runs)
    own = namespace in _NOT_OPAQUE and not (namespace == "aten" and op in _OF_PYTORCH)
    if own or not says or "backward" in op or "bwd" in op:
        return None
    tensors = [x for x in node.all_input_nodes if isinstance(x.meta.get("example_value"), torch.Tensor)]
    given = sum(isinstance(x, fx.Node) and x in tensors for x in (*node.args, *node.kwargs.values()))
    return name if given >= _FEWEST_TENSORS else None


def namespace_of(node: fx.Node) -> str | None:
    """Return the namespace of the op that a Dynamo node calls."""
    name = qualified(node)
    return None if name is None else name.partition("::")[0]


def attention_of(call: fx.Node) -> fx.Node:
    """Return the attention among a call's results; the call itself if no `getitem` takes it."""
    taken = (user for user in call.users if user.target is operator.getitem and user.args[1] == 0)
    return next(taken, call)


def reason(name: str) -> Reason:
    """Say why the op of this name is no site."""
    library = _library(name.partition("::")[0])
    return Reason(
        code=Code.LIBRARY_KERNEL,
        rule="the model leaves it to torch.compile how attention is computed",
        observed=f"{name}, a kernel of {library.name}" if library is not _OTHER else f"{name}, {library.name}",
        remedy=library.remedy,
    )


def _library(namespace: str) -> Library:
    return next((library for library in LIBRARIES if namespace.startswith(library.namespaces)), _OTHER)


def qualified(node: fx.Node) -> str | None:
    """Return the name of the op that a Dynamo node calls; None if it calls no op."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name)
    return str(node.target._qualified_op_name) if isinstance(node.target, torch._ops.OpOverloadPacket) else None
