"""Attention inside an op that nothing here sees into: a library's kernel, called by its own op. Reported as a miss, with what would help,
if its arguments do not say all of it (library_calls.py).

An op is taken for one by its name and its arguments alone: it says attention, and is given at least q, k and v.
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
    """namespaces: how the names of its ops' namespaces begin. name: for people. remedy: what a user can do."""

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

#: another library's, of which nothing is known but the name
_OTHER = Library(namespaces=(), name="an op of its own")

#: PyTorch's own are matched, or taken apart; ours are what took a site's place
_NOT_OPAQUE = frozenset({"aten", "prim", "prims", "higher_order", "attn_compiler", "inductor"})
#: of PyTorch's own those that it calls inside of others, and that some models call by name
_OF_PYTORCH = frozenset({"_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"})
_SAYS_ATTENTION = ("attention", "attn", "mha")
_FEWEST_TENSORS = 3


def name_of(node: fx.Node) -> str | None:
    """The op that a Dynamo node calls, if it is an attention that is not seen into: "flash_attn::_flash_attn_forward"."""
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
    """The namespace of the op that a Dynamo node calls."""
    name = qualified(node)
    return None if name is None else name.partition("::")[0]


def attention_of(call: fx.Node) -> fx.Node:
    """The attention among what a call gives; the call itself if it is not taken out."""
    taken = (user for user in call.users if user.target is operator.getitem and user.args[1] == 0)
    return next(taken, call)


def reason(name: str) -> Reason:
    """Why the op of this name is no site."""
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
    """The op that a Dynamo node calls; None if it calls no op."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name)
    return str(node.target._qualified_op_name) if isinstance(node.target, torch._ops.OpOverloadPacket) else None
