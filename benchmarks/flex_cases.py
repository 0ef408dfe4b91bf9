"""Models that call FlexAttention, for bench_flex.py: three of transformers, and one with packed documents as torchtitan writes it.

Each comes with the same weights and plain attention, uncompiled, whose numbers are held against. To add one of transformers: its name in
PLAIN, if models.py has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)

from benchmarks import models
from benchmarks.compare import Case
from benchmarks.harness import BACKEND
from benchmarks.models import Size

FLEX = "flex_attention"
Call = Literal["prefill", "train"]
CALLS: tuple[Call, ...] = get_args(Call)
#: a model of transformers -> its attention that has the same meaning and calls no FlexAttention: SDPA has no softcap and no sinks
PLAIN: Mapping[str, str] = {"llama": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}
#: where the block mask of packed documents is made
INSIDE, OUTSIDE = "documents_inside", "documents_outside"
MODELS = (*PLAIN, INSIDE, OUTSIDE)
#: of one call: tokens of a forward; a training step has half of them
TOKENS: Mapping[Size, int] = {"full": 16384, "small": 512}
#: the token that ends a document
END = 0
#: tokens of a document, on average
_DOCUMENT = 700


@dataclass(frozen=True, kw_only=True, slots=True)
class FlexCase:
    """A row's name and how to make its case."""

    model: str
    call: Call
    length: int

    @property
    def words(self) -> str:
        return f"{self.model}/{self.call}/{self.length}"

    @property
    def training(self) -> bool:
        return self.call == "train"

    def batch(self, size: Size) -> int:
        return max(1, TOKENS[size] // (2 if self.training else 1) // self.length)

    def scores(self, size: Size) -> int:
        """How many each attention of the plain model writes. SDPA writes none."""
        if PLAIN.get(self.model) != "eager":
            return 0
        heads = models.FAMILIES[self.model].sizes[size].config["num_attention_heads"]
        return self.batch(size) * int(heads) * self.length**2

    def case(self, size: Size, device: str) -> tuple[Case, int]:
        """The case, and how many attentions its model has. In bfloat16 on a GPU."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch(size), self.length)
        tokens = torch.randint(3, 1000, shape, generator=generator)
        softcap = False
        if self.model in PLAIN:
            softcap = models.FAMILIES[self.model].softcap
            model, baseline, plain = (
                models.build(self.model, size, name, dtype, device).train(self.training)
                for name in (FLEX, FLEX, PLAIN[self.model])
            )
            layers = int(model.config.num_hidden_layers)
            inputs: dict[str, Any] = {"use_cache": False}
        else:
            tokens[torch.rand(shape, generator=generator) < 1 / _DOCUMENT] = END
            shape_of_model = SHAPES[size]
            model, plain = (
                packed(kind, shape_of_model, device).to(dtype).train(self.training) for kind in (self.model, "plain")
            )
            baseline, layers, inputs = model, shape_of_model.layers, {}
        inputs = {"input_ids": tokens.to(device), **inputs}
        return Case(
            model=model,
            baseline=baseline,
            plain=plain,
            inputs=inputs,
            device=device,
            training=self.training,
            softcap=softcap,
        ), layers


# ---- packed documents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    inner: int
    vocab: int = 1024


SHAPES: Mapping[Size, Shape] = {
    "full": Shape(layers=6, heads=16, heads_kv=8, head_dim=128, inner=6144),
    "small": Shape(layers=2, heads=4, heads_kv=2, head_dim=32, inner=128),
}
#: what stands for the mask on its way to the layers, and how a layer attends with it
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def mask_mod(tokens: Tensor) -> Any:
    """Causal, and each query sees its own document alone, which ends with END: torchtitan's lines."""
    ends = tokens == END
    ends[:, -1] = True
    counted = torch.cumsum(torch.where(ends, 1, 0), dim=1)
    document = torch.zeros_like(counted, dtype=torch.int32)
    document[:, 1:] = counted[:, :-1]

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[b, q] == document[b, k]

    return and_masks(_causal, same_document)


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def block_mask(tokens: Tensor) -> BlockMask:
    batch, length = tokens.shape
    return create_block_mask(mask_mod(tokens), batch, None, length, length, device=tokens.device)


def dense_mask(tokens: Tensor) -> Tensor:
    batch, length = tokens.shape
    return create_mask(mask_mod(tokens), batch, 1, length, length, device=tokens.device)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class _Layer(nn.Module):
    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        hidden, self.head_dim, self.attend = shape.heads * shape.head_dim, shape.head_dim, attend
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk, self.wv = (nn.Linear(hidden, shape.heads_kv * shape.head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(hidden, hidden, bias=False)
        self.w1, self.w3 = (nn.Linear(hidden, shape.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.inner, hidden, bias=False)

    def forward(self, x: Tensor, mask: Any, rotation: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.wq, self.wk, self.wv)
        )
        out = self.attend(_rotated(q, *rotation), _rotated(k, *rotation), v, mask)
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Packed(nn.Module):
    """A decoder of packed documents. make_mask: of the tokens, where the caller gives no mask."""

    def __init__(self, shape: Shape, attend: Attend, make_mask: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        hidden = shape.heads * shape.head_dim
        self.half, self.make_mask = shape.head_dim // 2, make_mask
        self.embedding = nn.Embedding(shape.vocab, hidden)
        self.layers = nn.ModuleList([_Layer(shape, attend) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(hidden)

    def forward(self, input_ids: Tensor, mask: Any = None) -> Tensor:
        if self.make_mask is not None:
            mask = self.make_mask(input_ids)
        frequencies = 10000 ** (-torch.arange(self.half, device=input_ids.device) / self.half)
        angles = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] * frequencies
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, mask, (angles.cos(), angles.sin()))
        out: Tensor = self.norm(x)
        return out


class Apart(nn.Module):
    """A model whose mask is made by another function than the model's, as torchtitan's trainer does it for each batch."""

    def __init__(self, model: nn.Module, make_mask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model, self.make_mask = model, make_mask

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids, self.make_mask(input_ids))
        return out


def packed(kind: str, shape: Shape, device: str, seed: int = 0) -> nn.Module:
    """INSIDE, OUTSIDE, or another name: with SDPA and a dense mask."""
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]), torch.device(device):
        torch.manual_seed(seed)
        if kind == INSIDE:
            return Packed(shape, _flex, block_mask)
        if kind == OUTSIDE:
            return Apart(Packed(shape, _flex, None), block_mask)
        return Packed(shape, _sdpa, dense_mask)


def compile_parts(model: nn.Module, backend: str, options: Mapping[str, Any] | None, *, as_is: bool) -> nn.Module:
    """What a user compiles: the model, and what makes its mask beside it, if there is such a function.

    A model of transformers is compiled for our backend in place, as docs/launchers.md says; as_is: by torch.compile alone.
    """
    how: dict[str, Any] = {"backend": backend, "options": options and dict(options), "dynamic": False}
    if isinstance(model, Apart):
        return Apart(torch.compile(model.model, **how), torch.compile(model.make_mask, **how))
    if backend == BACKEND and not as_is and not isinstance(model, Packed):
        from attn_compiler.integrations.transformers import compile_model

        return compile_model(model, options=options, dynamic=False)
    compiled: nn.Module = torch.compile(model, **how)  # type: ignore[assignment]
    return compiled
