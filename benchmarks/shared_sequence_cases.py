"""Attentions and a model over sequences that GPUs share, for bench_shared_sequence.py.

A form is a row in FORMS: what masks the attention, and what the batch has besides q, k and v. PEERS is PyTorch's own `context_parallel`, by
how it exchanges keys and which kernel it calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of one attention. window: keys that a query of the form "window" sees. document: tokens of each of the form "documents"."""

    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    window: int = 1024
    document: int = 4096


FULL = Sizes()
SMALL = Sizes(heads=4, heads_kv=2, head_dim=16, window=8, document=12)

#: (q, k, v, documents (B, S), sizes) -> out. q, k, v: (B, H, S, D)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Sizes], Tensor]


def _distance(q: Tensor) -> Tensor:
    """(S, S): how many positions a key is before a query."""
    at = torch.arange(q.shape[2], device=q.device)
    return at[:, None] - at[None, :]


def _causal(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sizes: Sizes) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _window(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sizes: Sizes) -> Tensor:
    back = _distance(q)
    allowed = (back >= 0) & (back < sizes.window)
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sizes: Sizes) -> Tensor:
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return scaled_dot_product_attention(q, k, v, attn_mask=same & (_distance(q) >= 0), enable_gqa=True)


FORMS: Mapping[str, Attend] = {"causal": _causal, "window": _window, "documents": _documents}


class Attention(nn.Module):
    """One attention of projected tensors."""

    def __init__(self, form: str, sizes: Sizes) -> None:
        super().__init__()
        self._attend, self._sizes = FORMS[form], sizes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """q: (B, S, heads · D); k, v: (B, S, heads_kv · D); documents: (B, S), which one each position is of -> (B, S, heads · D)"""
        split = (x.unflatten(-1, (-1, self._sizes.head_dim)).transpose(1, 2) for x in (q, k, v))
        return self._attend(*split, documents, self._sizes).transpose(1, 2).flatten(2)


def tensors(length: int, sizes: Sizes, device: str) -> dict[str, Tensor]:
    """q, k, v, a gradient and documents of one whole sequence, the same in every process. In float64 on a CPU, else in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    widths = {"q": sizes.heads, "k": sizes.heads_kv, "v": sizes.heads_kv, "grad": sizes.heads}
    made = {
        name: torch.randn(1, length, heads * sizes.head_dim, device=device, dtype=dtype, generator=generator)
        for name, heads in widths.items()
    }
    return made | {"documents": (torch.arange(length, device=device) // sizes.document)[None]}


# ---- PyTorch's own --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """rotation: how keys go round, in PyTorch's words. kernel: what SDPA calls."""

    rotation: str
    kernel: SDPBackend


PEERS: Mapping[str, Peer] = {
    f"torch {rotation} {kernel.name.split('_')[0].lower()}": Peer(rotation=rotation, kernel=kernel)
    for rotation in ("allgather", "alltoall")
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
}


@contextlib.contextmanager
def peer_parts(peer: Peer, mesh: DeviceMesh, given: Mapping[str, Tensor], sizes: Sizes) -> Iterator[list[Tensor]]:
    """q, k, v and the gradient as PyTorch's `context_parallel` cuts them: (1, heads, S / ranks, D), k and v for each head of q.

    Causal attention is what it has. Within, SDPA is the one that it patches.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(peer.rotation)
    group = sizes.heads // sizes.heads_kv
    whole: list[Tensor] = []
    for name, repeats in (("q", 1), ("k", group), ("v", group), ("grad", 1)):
        heads = given[name].unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)
        whole.append(heads.repeat_interleave(repeats, 1).contiguous())
    with sdpa_kernel(peer.kernel), context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * len(whole)):
        yield whole


def peer_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by the SDPA that is in place now."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


# ---- a model --------------------------------------------------------------------------------------------------------

#: Llama's proportions with fewer layers and a vocabulary that is as much smaller
LLAMA: Mapping[str, Mapping[str, Any]] = {
    "full": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 8,
        "vocab_size": 8192,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    },
}


def llama(size: str, length: int, device: str, *, checkpointed: bool) -> nn.Module:
    """The same weights in every process. In float32 on a CPU, else in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **LLAMA[size],
        max_position_embeddings=length,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config).to(torch.float32 if device == "cpu" else torch.bfloat16)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def tokens(size: str, length: int, device: str) -> Tensor:
    """(1, length), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(LLAMA[size]["vocab_size"], (1, length), generator=generator).to(device)
