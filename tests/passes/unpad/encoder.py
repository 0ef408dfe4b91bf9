"""A small encoder whose ending and layers a test picks, compiled with and without padding, and held against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import attn_compiler
from attn_compiler.reporting.facts import UnpadReport

BATCH, LENGTH, WIDTH, HEADS, WORDS = 3, 10, 16, 2, 40
Between = Callable[[torch.Tensor], torch.Tensor]
Ending = Callable[[torch.Tensor, torch.Tensor], Any]


class Layer(nn.Module):
    def __init__(self, between: Between | None, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.between, self.dropout = between, dropout

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        y = self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        y = F.dropout(y, self.dropout, self.training)
        x = self.norm(x + F.gelu(y))
        return x if self.between is None else self.between(x)


class Encoder(nn.Module):
    """between: after each layer. ending: of the last hidden state and the mask; None: the state itself. dropout: of hidden states."""

    def __init__(self, between: Between | None = None, ending: Ending | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(between, dropout) for _ in range(2))
        self.ending = ending

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        allowed = self.allowed(mask)
        for layer in self.layers:
            x = layer(x, allowed)
        return x if self.ending is None else self.ending(x, mask, **further)

    def allowed(self, mask: torch.Tensor) -> torch.Tensor:
        return mask[:, None, None, :].bool()


class Decoder(Encoder):
    def allowed(self, mask: torch.Tensor) -> torch.Tensor:
        at = torch.arange(mask.shape[1])
        return (at[:, None] >= at[None, :])[None, None] & mask[:, None, None, :].bool()


class Windowed(Encoder):
    def allowed(self, mask: torch.Tensor) -> torch.Tensor:
        at = torch.arange(mask.shape[1])
        return ((at[:, None] - at[None, :]).abs() <= 2)[None, None] & mask[:, None, None, :].bool()


def mask_of(*lengths: int, left: bool = False, length: int = LENGTH) -> torch.Tensor:
    at = torch.arange(length)
    rows = [(at >= length - n) if left else (at < n) for n in lengths]
    return torch.stack(rows).long()


MASK = mask_of(4, 10, 7)


def ids_of(mask: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, WORDS, mask.shape, generator=torch.Generator().manual_seed(0))


def compiled(model: nn.Module, **further: Any) -> Any:
    torch._dynamo.reset()
    attn_compiler.reset()
    dynamic = further.pop("dynamic", False)
    options = {"unpad": True, "strict": True, "inner": "eager", **further}
    return torch.compile(model, backend="attn_compiler", dynamic=dynamic, options=options)


def report() -> UnpadReport:
    """Of the last graph that padding was to be taken out of."""
    found = [one.unpad for one in attn_compiler.reports() if one.unpad is not None]
    assert found
    return found[-1]


def on_real_tokens(x: Any, mask: torch.Tensor) -> Any:
    """A tensor of (rows, positions, ...) with 0 at padding; any other one as it is."""
    if isinstance(x, (tuple, list)):
        return [on_real_tokens(y, mask) for y in x]
    if x.dim() < 2 or x.shape[:2] != mask.shape:
        return x
    return x * mask.reshape(*mask.shape, *(1,) * (x.dim() - 2)).to(x.dtype)


def check(
    model: nn.Module, mask: torch.Tensor = MASK, function: Any = None, *, close: float = 2e-6, **further: Any
) -> UnpadReport:
    """Outputs on real tokens and all gradients are eager's. function: the compiled model; made here if it is not given."""
    torch.manual_seed(0)
    function = compiled(model) if function is None else function
    ids = ids_of(mask)
    expected = on_real_tokens(model(ids, mask, **further), mask)
    found = on_real_tokens(function(ids, mask, **further), mask)
    torch.testing.assert_close(found, expected, atol=close, rtol=1e-5)
    torch.testing.assert_close(_gradients(found, model), _gradients(expected, model), atol=close * 10, rtol=1e-4)
    return report()


def _gradients(output: Any, model: nn.Module) -> list[torch.Tensor]:
    outputs = output if isinstance(output, list) else [output]
    generator = torch.Generator().manual_seed(1)
    total = sum((x.float() * torch.randn(x.shape, generator=generator)).sum() for x in outputs if x.requires_grad)
    assert isinstance(total, torch.Tensor)
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [torch.zeros(()) if x is None else x for x in found]


# ---- endings ---------------------------------------------------------------------------------------------------------


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = mask[..., None].expand(x.size()).float()
    return F.normalize((x * kept).sum(1) / kept.sum(1).clamp(min=1e-9))


def first(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x[:, 0])


def last(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, -1] * 2


def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.view(-1, WIDTH), labels.view(-1))


def weighed_loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(x.view(-1, WIDTH), labels.view(-1), reduction="none").view(labels.shape)
    return (each * mask).sum() / mask.sum()


def labels_of(mask: torch.Tensor) -> torch.Tensor:
    return (ids_of(mask) % WIDTH).masked_fill(mask == 0, -100)


def between_axes_of_one(x: torch.Tensor) -> torch.Tensor:
    """Any of these axes could be that of the one row."""
    places = torch.linspace(0.5, 1.0, x.shape[1])
    x = (x.squeeze(0) * places[:, None])[None, None].transpose(0, 1).squeeze(1)
    return (x.transpose(0, 1) + 0.1 * places[:, None, None]).movedim(1, 0)
