"""The latent that k and v are made of: found however they are written, and every near miss left alone, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import attn_compiler
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import LatentSpec
from attn_compiler.verifying import outputs
from tests.passes.compiling import Compiled, compiled

B, H, S, RANK, ROPE, NOPE, V = 2, 4, 24, 32, 8, 16, 12
Inputs = dict[str, Tensor]
Attention = Callable[[Inputs], Tensor]


def _inputs(queries: int = 1, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows = H * (NOPE + V)
    return {
        "q": randn(B, H, queries, NOPE + ROPE),
        "c": randn(B, 1, S, RANK),
        "other": randn(B, 1, S, RANK),
        "rope": randn(B, 1, S, ROPE),
        "of_heads": randn(B, H, S, ROPE),
        "w": randn(rows, RANK) / RANK**0.5,
        "w2": randn(rows, RANK) / RANK**0.5,
        "down": randn(4, RANK),
        "up": randn(rows, 4),
        "bias": randn(rows),
        "cos": randn(S, NOPE),
        "gain": randn(RANK),
        "mask": torch.rand(B, 1, 1, S, generator=generator) > 0.3,
        "int8": torch.randint(-127, 128, (rows, RANK), generator=generator, dtype=torch.int8),
        "scale": torch.rand(rows, 1, generator=generator).to(dtype) / 500,
    }


def _heads(made: Tensor) -> Tensor:
    return made.view(B, S, -1, NOPE + V).transpose(1, 2)


def _expanded(made: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers does it: into a new tensor, through views."""
    kv = _heads(made)
    nope, v = torch.split(kv, [NOPE, V], dim=-1)
    k = kv.new_empty(B, H, S, NOPE + ROPE)
    k[..., :NOPE].copy_(nope)
    k[..., NOPE:].copy_(rope.expand(-1, H, -1, -1))
    return k, v


def _joined(made: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    nope, v = torch.split(_heads(made), [NOPE, V], dim=-1)
    return torch.cat((nope, rope.expand(-1, H, -1, -1)), -1), v


def _attend(x: Inputs, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(x["q"], k, v, attn_mask=x["mask"], scale=0.2)


def _by(make: Callable[[Inputs], tuple[Tensor, Tensor]]) -> Attention:
    return lambda x: _attend(x, *make(x))


def _found(attention: Attention, inputs: Inputs | None = None, **options: Any) -> Compiled:
    """Compiled and called once; the result is checked."""
    given = inputs or _inputs()
    function = compiled(attention, lowerings=["absorbed", "math"], verify=True, **options)
    with torch.no_grad():
        expected = attention({name: tensor.clone() for name, tensor in given.items()})
        torch.testing.assert_close(function(given), expected, atol=2e-5, rtol=1e-4)
    return function


def _rope_first(x: Inputs) -> tuple[Tensor, Tensor]:
    nope, v = torch.split(_heads(linear(x["c"], x["w"])), [NOPE, V], dim=-1)
    return torch.cat((x["rope"].expand(-1, H, -1, -1), nope), -1), v


def _v_first(x: Inputs) -> tuple[Tensor, Tensor]:
    v, nope = torch.split(_heads(linear(x["c"], x["w"])), [V, NOPE], dim=-1)
    return torch.cat((nope, x["rope"].expand(-1, H, -1, -1)), -1), v


def _sliced(x: Inputs) -> tuple[Tensor, Tensor]:
    kv = linear(x["c"][:, 0], x["w"]).unflatten(-1, (H, NOPE + V)).permute(0, 2, 1, 3)
    k = torch.empty(B, H, S, NOPE + ROPE)
    k[..., NOPE:] = x["rope"]
    k[..., :NOPE] = kv[..., :NOPE]
    return k, kv[..., NOPE:]


def _two_projections(x: Inputs) -> tuple[Tensor, Tensor]:
    k = linear(x["c"], x["w"][: H * NOPE]).view(B, S, H, NOPE).transpose(1, 2)
    v = linear(x["c"], x["w2"][: H * V]).view(B, S, H, V).transpose(1, 2)
    return torch.cat((k, x["rope"].expand(-1, H, -1, -1)), -1), v


def _normed(x: Inputs) -> Tensor:
    return x["gain"] * (x["c"] * torch.rsqrt(x["c"].pow(2).mean(-1, keepdim=True) + 1e-6))


def _cached(x: Inputs) -> tuple[Tensor, Tensor]:
    """A static cache: written in place, in the graph."""
    at = torch.tensor([3])
    x["c"].index_copy_(2, at, x["other"][:, :, :1])
    x["rope"].index_copy_(2, at, x["of_heads"][:, :1, :1])
    return _expanded(linear(x["c"], x["w"]), x["rope"])


def _written_out(x: Inputs) -> Tensor:
    k, v = _expanded(linear(x["c"], x["w"]), x["rope"])
    scores = torch.matmul(x["q"], k.transpose(2, 3)) * 0.2
    scores = scores.masked_fill(~x["mask"], -torch.inf)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32), v)


@pytest.mark.parametrize(
    "attention",
    [
        _by(lambda x: _expanded(linear(x["c"], x["w"]), x["rope"])),
        _by(lambda x: _joined(linear(x["c"], x["w"]), x["rope"])),
        _by(lambda x: _joined(linear(x["c"][:, 0], x["w"]), x["rope"])),
        _by(lambda x: _joined(linear(torch.cat((x["c"][:, :, :9], x["other"][:, :, 9:]), 2), x["w"]), x["rope"])),
        _by(lambda x: _joined(linear(x["c"], x["int8"].float() * x["scale"]), x["rope"])),
        _by(lambda x: _joined(linear(_normed(x), x["w"]), x["rope"])),
        _by(_rope_first),
        _by(_v_first),
        _by(_sliced),
        _by(_two_projections),
        _by(_cached),
        _written_out,
    ],
    ids="new_empty cat three_dims growing dequantised norm_after rope_first v_first sliced two_weights static written_out".split(),
)
def test_it_is_found(attention: Attention) -> None:
    function = _found(attention)
    assert function.site.decision.lowering == "absorbed", function.site.decision
    latent = function.site.spec.latent
    assert isinstance(latent, LatentSpec)
    assert (latent.rank, latent.nope, latent.kept) == (RANK, NOPE, RANK + ROPE)
    # Nothing makes k and v any more.
    assert function.calls.count("linear") == 0
    assert "copy_" not in function.calls


def test_keys_without_a_shared_part() -> None:
    def attention(x: Inputs) -> Tensor:
        k, v = torch.split(_heads(linear(x["c"], x["w"])), [NOPE, V], dim=-1)
        return scaled_dot_product_attention(x["q"][..., :NOPE], k, v, attn_mask=x["mask"])

    site = _found(attention).site
    assert site.decision.lowering == "absorbed"
    assert site.spec.latent is not None
    assert site.spec.latent.rope is None


@pytest.mark.in_turns
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("queries", [1, 3])
def test_batches_and_queries(batch: int, queries: int) -> None:
    def attention(q: Tensor, c: Tensor, rope: Tensor, w: Tensor) -> Tensor:
        nope, v = torch.split(linear(c, w).view(batch, S, -1, NOPE + V).transpose(1, 2), [NOPE, V], dim=-1)
        return scaled_dot_product_attention(q, torch.cat((nope, rope.expand(-1, H, -1, -1)), -1), v)

    x = _inputs(queries)
    given = [*(x[name][:batch] for name in ("q", "c", "rope")), x["w"]]
    function = compiled(attention, lowering="absorbed", verify=True)
    with torch.no_grad():
        torch.testing.assert_close(function(*given), attention(*given), atol=2e-5, rtol=1e-4)
    assert function.site.decision.lowering == "absorbed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Within twice the model's own error of the exact result: `verify` raises otherwise."""
    x = _inputs(dtype=dtype)
    function = compiled(_by(lambda x: _expanded(linear(x["c"], x["w"]), x["rope"])), lowering="absorbed", verify=True)
    with torch.no_grad():
        assert function(x).dtype == dtype
    assert any("output verified" in str(one) for one in attn_compiler.verifications())


def _heads_rope(x: Inputs) -> tuple[Tensor, Tensor]:
    nope, v = torch.split(_heads(linear(x["c"], x["w"])), [NOPE, V], dim=-1)
    return torch.cat((nope, x["of_heads"]), -1), v


def _rotated(x: Inputs) -> tuple[Tensor, Tensor]:
    nope, v = torch.split(_heads(linear(x["c"], x["w"])), [NOPE, V], dim=-1)
    return torch.cat((nope * x["cos"], x["rope"].expand(-1, H, -1, -1)), -1), v


def _another_latent(x: Inputs) -> tuple[Tensor, Tensor]:
    k, _ = _joined(linear(x["c"], x["w"]), x["rope"])
    return k, _joined(linear(x["other"], x["w2"]), x["rope"])[1]


def _heads_last(x: Inputs) -> tuple[Tensor, Tensor]:
    """Each head has every fourth column."""
    kv = linear(x["c"], x["w"]).view(B, S, NOPE + V, H).permute(0, 3, 1, 2)
    return torch.cat((kv[..., :NOPE], x["rope"].expand(-1, H, -1, -1)), -1), kv[..., NOPE:]


def _heads_of_less(x: Inputs) -> tuple[Tensor, Tensor]:
    """Of a projection that makes more than the heads, and something else in front of them."""
    made = linear(x["c"], torch.cat((x["w2"][:4], x["w"]), 0))[..., 4:]
    return _joined(made.reshape(B, S, -1), x["rope"])


def _part_of_rope(x: Inputs) -> tuple[Tensor, Tensor]:
    return _joined(linear(x["c"], x["w"]), x["c"][..., 2 : 2 + ROPE])


def _rounded(x: Inputs) -> tuple[Tensor, Tensor]:
    k, v = _joined(linear(x["c"], x["w"]), x["rope"])
    return k, v.to(torch.bfloat16).to(torch.float32)


def _lora(x: Inputs) -> tuple[Tensor, Tensor]:
    return _joined(linear(x["c"], x["w"]) + linear(linear(x["c"], x["down"]), x["up"]) * 2.0, x["rope"])


def _then(write: Callable[[Inputs, Tensor], object]) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """k and v, of tensors of the graph's own, and then a write."""

    def make(x: Inputs) -> tuple[Tensor, Tensor]:
        own = {**x, "c": x["c"].clone(), "rope": x["rope"].clone(), "w": x["w"].clone()}
        k, v = _expanded(linear(own["c"], own["w"]), own["rope"])
        write(own, k)
        return k, v

    return make


@pytest.mark.parametrize(
    ("make", "observed"),
    [
        (_lora, "LoRA"),
        (lambda x: _joined(linear(x["c"], x["w"], x["bias"]), x["rope"]), "has a bias"),
        (_rotated, "it is not what the projection gives (a rotary embedding"),
        (_heads_rope, "a rotary part of its own"),
        (_another_latent, "two latents"),
        (_heads_last, "heads are not equal parts"),
        (_part_of_rope, "is only a part of its tensor"),
        (_then(lambda x, k: x["c"].mul_(2.0)), "the latent is written in between, by mul_"),
        (_then(lambda x, k: x["c"][:, :, 3:5].fill_(9.0)), "the latent is written in between, by fill_"),
        (_then(lambda x, k: x["w"].mul_(2.0)), "the weight of the projection is written in between, by mul_"),
        (_then(lambda x, k: k.mul_(0.5)), "is written in place: it is not what the projection gives"),
        (_then(lambda x, k: k[..., 3:5].fill_(0.5)), "is written in place: it is not what the projection gives"),
    ],
    ids="lora bias rotated heads_rope two_latents heads_last part_of_rope written written_by_view weight_written scaled filled".split(),
)
def test_a_near_miss_is_left_and_named(make: Callable[[Inputs], tuple[Tensor, Tensor]], observed: str) -> None:
    site = _found(_by(make)).site
    assert site.decision.lowering == "math"
    assert site.spec.latent is None
    reason = site.spec.no_latent
    assert isinstance(reason, Reason)
    assert observed in reason.observed
    (refusal,) = site.decision.refusals
    assert refusal.reasons == (reason,)


@pytest.mark.parametrize("make", [_heads_of_less, _rounded])
def test_what_is_not_like_a_projection_of_heads_is_left(make: Callable[[Inputs], tuple[Tensor, Tensor]]) -> None:
    site = _found(_by(make)).site
    assert (site.decision.lowering, site.spec.latent) == ("math", None)


def test_two_dtypes_are_left() -> None:
    x = _inputs()

    def attention(x: Inputs) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _attend(x, *_joined(linear(x["c"], x["w"]), x["rope"]))

    function = compiled(attention, lowerings=["absorbed", "math"])
    with torch.no_grad():
        torch.testing.assert_close(function(x), attention(x), atol=2e-2, rtol=2e-2)
    reason = function.site.spec.no_latent
    assert reason is not None
    assert "they are made in bfloat16 and float32" in reason.observed


@pytest.mark.parametrize(("queries", "lowering"), [(12, "absorbed"), (13, "math")])
def test_it_is_taken_where_there_is_less_to_multiply(queries: int, lowering: str) -> None:
    """1 / (36 / 896 + 1 / 24) = 12.2"""
    function = _found(_by(lambda x: _joined(linear(x["c"], x["w"]), x["rope"])), _inputs(queries))
    assert function.site.decision.lowering == lowering


@pytest.mark.parametrize("expand", [_expanded, _joined])
def test_a_rope_part_that_grows(expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """A cache and a new key: what they are put together to is one tensor."""

    def attention(x: Inputs) -> Tensor:
        latent = torch.cat((x["c"][:, :, 1:], x["other"][:, :, :1]), 2)
        rope = torch.cat((x["rope"][:, :, 1:], x["of_heads"][:, :1, :1]), 2)
        return _attend(x, *expand(linear(latent, x["w"]), rope))

    assert _found(attention).site.decision.lowering == "absorbed"


@pytest.mark.parametrize("added", [False, True])
def test_keys_that_nobody_sees_may_hold_anything(added: bool) -> None:
    def attention(x: Inputs) -> Tensor:
        k, v = _joined(linear(x["c"], x["w"]), x["rope"])
        mask = torch.where(x["mask"], 0.0, -torch.inf) if added else x["mask"]
        return scaled_dot_product_attention(x["q"], k, v, attn_mask=mask, scale=0.2)

    x = _inputs()
    function = compiled(attention, lowering="absorbed")
    with torch.no_grad():
        expected = attention(x)
        unseen = ~x["mask"][:, :, 0, :, None]
        x["c"], x["rope"] = (x[name].masked_fill(unseen, torch.nan) for name in ("c", "rope"))
        torch.testing.assert_close(function(x), expected, atol=2e-5, rtol=1e-4)


def test_a_checked_output_is_compared_from_the_projection_on() -> None:
    """What the model rounds k and v to is part of its own error."""
    attention = _by(lambda x: _expanded(linear(x["c"], x["w"]), x["rope"]))
    checked: list[list[str]] = []
    find = outputs.dependents

    def record(*given: Any) -> list[torch.fx.Node]:
        found = find(*given)
        checked.append([str(node.target) for node in found])
        return found

    with mock.patch.object(outputs, "dependents", record):
        assert _found(attention).site.decision.lowering == "absorbed"
    assert checked
    assert all(names[0] == "aten.linear.default" and "aten.copy_.default" in names for names in checked)


def test_the_shared_part_may_be_written_before_but_not_after() -> None:
    def attention(x: Inputs) -> Tensor:
        rope = x["rope"] * 1.0
        k, v = _joined(linear(x["c"], x["w"]), rope)
        rope.add_(1.0)
        return _attend(x, k, v) + rope.sum() * 0

    reason = _found(attention).site.spec.no_latent
    assert reason is not None
    assert "the part of k that heads share is written in between" in reason.observed


def test_another_reader_of_k_or_v() -> None:
    def attention(x: Inputs) -> Tensor:
        k, v = _expanded(linear(x["c"], x["w"]), x["rope"])
        return _attend(x, k, v) + k.mean()

    reason = _found(attention).site.spec.no_latent
    assert reason is not None
    assert "something besides the attention reads k or v" in reason.observed


def test_a_mask_that_reads_k() -> None:
    def attention(x: Inputs) -> Tensor:
        k, v = _joined(linear(x["c"], x["w"]), x["rope"])
        return scaled_dot_product_attention(x["q"], k, v, attn_mask=k[:, :1, None, :, 0] > 0, scale=0.2)

    reason = _found(attention).site.spec.no_latent
    assert reason is not None
    assert "something besides the attention reads k or v" in reason.observed


def test_a_gradient_is_refused_by_name() -> None:
    x = _inputs()
    x["w"].requires_grad_()
    attention = _by(lambda x: _expanded(linear(x["c"], x["w"]), x["rope"]))
    function = compiled(attention, lowerings=["absorbed", "math"])
    function(x).sum().backward()
    assert x["w"].grad is not None
    refused = function.site.decision.refusals[0]
    assert "no gradient is needed" in [reason.rule for reason in refused.reasons]


def test_a_weight_with_a_gradient_under_no_grad_brings_none() -> None:
    x = _inputs()
    x["w"].requires_grad_()

    def attention(x: Inputs) -> Tensor:
        with torch.no_grad():
            k, v = _joined(linear(x["c"], x["w"]), x["rope"])
        return _attend(x, k, v)

    function = compiled(attention, lowerings=["absorbed", "math"])
    out = function(x)
    assert not out.requires_grad
    torch.testing.assert_close(out, attention(x), atol=2e-5, rtol=1e-4)


def test_as_many_queries_as_keys_are_not_asked_for() -> None:
    def attention(x: Inputs) -> Tensor:
        k, v = _joined(linear(x["c"], x["w"]), x["rope"])
        return scaled_dot_product_attention(x["q"], k, v)

    site = _found(attention, _inputs(queries=S)).site
    assert (site.spec.latent, site.spec.no_latent) == (None, None)


def test_a_cache_of_k_and_v_is_no_near_miss() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v)

    function = compiled(attention, lowering="math")
    function(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
    assert (function.site.spec.latent, function.site.spec.no_latent) == (None, None)
