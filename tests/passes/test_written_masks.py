"""A mask that one compiled function made means what it holds, whatever wrote to it before another one uses it."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler.torch_private import known_masks
from tests.passes.border_masks import B, D, H, S, attend, causal, padded

_LOWEST = torch.finfo(torch.float32).min


def additive(q: Tensor) -> Tensor:
    return torch.where(causal(q), 0.0, _LOWEST)


def four_axes(q: Tensor) -> Tensor:
    return causal(q).expand(B, 1, S, S).clone()


def _other(mask: Tensor) -> Tensor:
    """A window of two keys on each side, of the mask's dtype and shape."""
    at = torch.arange(S)
    near = (at[:, None] - at).abs() < 3
    return (near if mask.dtype == torch.bool else torch.where(near, 0.0, -1e9)).expand(mask.shape).clone()


def _memory(mask: Tensor) -> None:
    other = _other(mask)
    ctypes.memmove(mask.data_ptr(), other.data_ptr(), mask.numel() * mask.element_size())


def _storage(mask: Tensor) -> None:
    mask.untyped_storage().copy_(_other(mask).untyped_storage())


def _of_storage(mask: Tensor) -> None:
    torch.empty(0, dtype=mask.dtype).set_(mask.untyped_storage(), 0, mask.shape, mask.stride()).copy_(_other(mask))


def _regrown(mask: Tensor) -> None:
    shape = mask.shape
    mask.resize_(2 * mask.numel()).resize_(shape).copy_(_other(mask))


def _freed(mask: Tensor) -> None:
    size = mask.untyped_storage().nbytes()
    mask.untyped_storage().resize_(0)
    mask.untyped_storage().resize_(size)
    mask.data.copy_(_other(mask))


def _within_another(mask: Tensor) -> None:
    big = torch.zeros(mask.numel() + 4, dtype=mask.dtype)
    big[4:] = _other(mask).flatten()
    mask.set_(big.untyped_storage(), 4, mask.shape, mask.stride())


def _loaded(mask: Tensor) -> None:
    module = nn.Module()
    module.register_buffer("mask", mask)
    module.load_state_dict({"mask": _other(mask)})


def _applied(mask: Tensor) -> None:
    module = nn.Module()
    module.register_buffer("mask", mask)
    module._apply(lambda x: x.data.copy_(_other(x)))


def _inference(mask: Tensor) -> None:
    with torch.inference_mode():
        mask.data.copy_(_other(mask))


def _uncounted(mask: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(mask):
        mask.copy_(_other(mask))


def _exchanged(mask: Tensor) -> None:
    """The data goes, and comes back as another's."""
    own = mask.data
    mask.data = _other(mask)
    own.copy_(_other(mask))
    mask.data = own


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "transposed data": lambda m: setattr(m, "data", m.data.mT),
    "other strides": lambda m: m.as_strided_(m.shape, (*m.stride()[:-2], 1, S)),
    "data with other strides": lambda m: m.data.as_strided_(m.shape, (*m.stride()[:-2], 1, S)).copy_(_other(m)),
    "data": lambda m: m.data.copy_(_other(m)),
    "the diagonal of the data": lambda m: m.data.diagonal(dim1=-2, dim2=-1)[1:].fill_(m[..., 0, 1].flatten()[0]),
    "parts of the data": lambda m: [part.copy_(m[..., 3:4]) for part in m.data.split(1, -1)[1:3]],
    "several at once": lambda m: torch._foreach_copy_([m.data], [_other(m)]),
    "as an output": lambda m: torch.maximum(_other(m), _other(m), out=m.data),
    "data as bytes": lambda m: m.data.view(torch.uint8).copy_(_other(m).view(torch.uint8)),
    "data that is exchanged": _exchanged,
    "numpy": lambda m: np.copyto(m.numpy(), _other(m).numpy()),
    "DLPack": lambda m: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(m)).copy_(_other(m)),
    "memory": _memory,
    "storage": _storage,
    "another tensor of the storage": _of_storage,
    "another storage": lambda m: m.set_(_other(m)),
    "a place in another storage": _within_another,
    "regrown": _regrown,
    "freed and filled": _freed,
    "shared with processes": lambda m: m.share_memory_().data.copy_(_other(m)),
    "a buffer that is loaded": _loaded,
    "a module's _apply": _applied,
    "inference mode": _inference,
    "no count": _uncounted,
}


@pytest.mark.in_turns
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("make", [causal, four_axes, additive])
def test_a_mask_that_was_written_means_what_it_holds(make: Callable[[Tensor], Tensor], name: str) -> None:
    q, layer, mask = torch.randn(B, H, S, D), _layer(), _made(make)
    assert known_masks.recall(mask) is not None
    torch.testing.assert_close(layer(q, mask), attend(q, make(q)))
    WRITES[name](mask)
    wanted = attend(q, mask.clone())
    assert not torch.allclose(wanted, attend(q, make(q)))
    torch.testing.assert_close(layer(q, mask), wanted)
    words = [site.spec.mask.words for report in attn_compiler.reports() for site in report.sites]
    assert words[0] == "causal (proved)"
    assert "dense" in words[-1]


def _layer() -> Callable[..., Tensor]:
    torch._dynamo.reset()
    attn_compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(attend, backend="attn_compiler", options={"inner": "eager"})
    return compiled


def _made(make: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
    compiled = torch.compile(make, backend="attn_compiler", options={"inner": "eager", **options})
    made: Tensor = compiled(torch.zeros(B, H, S, D))
    return made


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("recomputes", [False, True])
def test_layers_are_trained_by_one_mask_step_after_step_with_code_that_knows_it(recomputes: bool) -> None:
    """Inductor's code takes the address of the mask that it reads, in the forward, in the backward and where a checkpoint runs again."""
    torch._dynamo.reset()
    attn_compiler.reset()
    layers = nn.ModuleList(Layer() for _ in range(2))
    plain = copy.deepcopy(layers)
    for layer in layers:
        # Written out, so that Inductor's own code reads the mask.
        layer.compile(backend="attn_compiler", options={"lowerings": ("math",)})
    mask = _made(padded)
    for _ in range(3):
        xs = [torch.ones(B, H, S, D).cumsum(-1).requires_grad_() for _ in range(2)]
        for x, stack, given in zip(xs, (layers, plain), (mask, mask.clone()), strict=True):
            y = x
            for layer in stack:
                y = (
                    checkpoint(layer, y, given, use_reentrant=False)
                    if recomputes and stack is layers
                    else layer(y, given)
                )
            y.sin().sum().backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad)
        assert known_masks.recall(mask) is not None
    (site,) = [site for report in attn_compiler.reports() for site in report.sites]
    assert "causal ∧ key padding" in site.spec.mask.words
    mask.data.copy_(_other(mask))
    torch.testing.assert_close(layers[0](xs[1], mask), plain[0](xs[1], mask.clone()))


def test_a_backward_that_reads_a_mask_leaves_it_known() -> None:
    mask, x = _made(causal), torch.randn(S, S, requires_grad=True)
    function = torch.compile(lambda x, m: x.masked_fill(m, 0.0).sin() * x, backend="attn_compiler")
    out = function(x, mask)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
        assert known_masks.recall(mask) is not None
    mask.data[1:, 1] = False
    out.sum().backward()
    assert known_masks.recall(mask) is None


def test_what_a_compiled_function_only_reads_stays_known_to_the_next() -> None:
    q, layer, mask = torch.randn(B, H, S, D), _layer(), _made(causal)
    counted = torch.compile(lambda m: m.sum(-1) * 2, backend="attn_compiler")
    torch.testing.assert_close(counted(mask), causal(q).sum(-1) * 2)
    torch.testing.assert_close(layer(q, mask), attend(q, causal(q)))
    assert attn_compiler.reports()[-1].sites[0].spec.mask.words == "causal (proved)"


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_mask_that_a_compiled_function_writes_is_unknown_to_the_next(inner: str) -> None:
    q, layer, mask = torch.randn(B, H, S, D), _layer(), _made(causal)

    def write(m: Tensor) -> Tensor:
        m.data[..., 1:, 1] = False
        return m.sum(-1)

    torch.compile(write, backend="attn_compiler", options={"inner": inner})(mask)
    assert not mask.diagonal()[1]
    torch.testing.assert_close(layer(q, mask), attend(q, mask.clone()))
