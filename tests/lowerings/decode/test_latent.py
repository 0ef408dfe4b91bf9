"""The lowering over a latent, whole: what it takes, what it emits, and the numbers of sites in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import attn_compiler
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.choice import priorities
from attn_compiler.lowerings.decode import latent_schedule
from attn_compiler.passes.writing import keyless_nodes
from attn_compiler.spec.attention import AttentionSpec, LatentSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import ScoreSpec
from attn_compiler.spec.target import Target
from tests.passes.compiling import Compiled, compiled, mark

H100 = Target.fake(sm=90)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on a CPU")


def _tensor(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    strides = torch.empty(shape, device="meta").stride()
    return TensorSpec(shape=shape, strides=tuple(strides), dtype=dtype)


def latent_spec(
    *, batch: int = 1, heads: int = 16, queries: int = 1, keys: int = 4096, rank: int = 512, rope: int = 64, **more: Any
) -> AttentionSpec:
    dtype = more.pop("dtype", "bfloat16")
    own = (
        _tensor(batch, 1, keys, rank, dtype=dtype),
        _tensor(batch, 1, keys, rope, dtype=dtype) if rope else None,
    )
    return AttentionSpec(
        q=_tensor(batch, heads, queries, 128 + rope, dtype=dtype),
        k=_tensor(batch, heads, keys, 128 + rope, dtype=dtype),
        v=_tensor(batch, heads, keys, 128, dtype=dtype),
        mask=MaskSpec(),
        score=ScoreSpec(scale=0.1),
        device="cuda",
        out_dtype=dtype,
        latent=LatentSpec(latent=own[0], rope=own[1], nope=128),
        **more,
    )


def _refused(spec: AttentionSpec, target: Target = H100) -> str:
    return "; ".join(map(str, by_name("decode_latent").why_not(spec, target)))


def test_it_comes_first_on_a_gpu_and_not_at_all_on_a_cpu() -> None:
    assert priorities.order(latent_spec(), H100)[:2] == ("decode_latent", "absorbed")
    on_cpu = dataclasses.replace(latent_spec(dtype="float32"), device="cpu")
    assert priorities.order(on_cpu, Target.fake(device="cpu"))[0] == "absorbed"
    assert _refused(latent_spec()) == ""


def test_what_is_refused() -> None:
    assert "at most 16 queries, which are known, and fewer than 164" in _refused(latent_spec(queries=17))
    assert "no gradient is needed" in _refused(latent_spec(needs_grad=True))
    assert "at most 512 dims" in _refused(latent_spec(rank=1024))
    assert "at most 512 dims" in _refused(latent_spec(rank=508))
    assert "k and v are linear maps of one latent" in _refused(dataclasses.replace(latent_spec(), latent=None))
    far = dataclasses.replace(
        latent_spec().latent, latent=dataclasses.replace(latent_spec().latent.latent, strides=(1, 1, 513, 1))
    )  # type: ignore[union-attr, type-var]
    assert "the latent is read as it lies" in _refused(dataclasses.replace(latent_spec(), latent=far))
    assert "GPU" in _refused(latent_spec(), Target.fake(sm=75))


@pytest.mark.parametrize(
    ("heads", "batch", "rows", "splits"), [(16, 1, 16, 32), (16, 16, 16, 8), (128, 1, 64, 32), (128, 16, 64, 4)]
)
def test_schedules(heads: int, batch: int, rows: int, splits: int) -> None:
    found = latent_schedule.schedule(latent_spec(heads=heads, batch=batch), Target.fake(sm=90, processors=132))
    assert (found.rows, found.splits) == (rows, splits)


# ---- whole sites ---------------------------------------------------------------------------------------------------

B, H, S, RANK, ROPE, NOPE, V = 2, 4, 70, 32, 8, 16, 24


def latent_attention(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, length: Tensor) -> Tensor:
    """The caches are as long as they are, and filled up to `length`."""
    nope, v = torch.split(linear(latent, weight).view(B, S, H, NOPE + V).transpose(1, 2), [NOPE, V], dim=-1)
    k = torch.cat((nope, rope.expand(-1, H, -1, -1)), -1)
    at = torch.arange(q.shape[2]) + length
    mask = torch.arange(S)[None, :] <= at[:, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None], scale=0.2)


def latent_inputs(queries: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, queries, NOPE + ROPE), (B, 1, S, RANK), (B, 1, S, ROPE), (H * (NOPE + V), RANK))
    q, latent, rope, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    weight = weight / RANK**0.5
    return [*(x.to(dtype) for x in (q, latent, rope, weight)), torch.tensor([40])]


def _run(inputs: list[Tensor], attention: Any = latent_attention, **options: Any) -> tuple[Tensor, Compiled]:
    function = compiled(attention, lowering="decode_latent", verify=True, **options)
    with torch.no_grad():
        found = function(*inputs)
    return found, function


@interpreted
@pytest.mark.parametrize("queries", [1, 3])
def test_a_site(queries: int) -> None:
    inputs = latent_inputs(queries)
    found, function = _run(inputs)
    with torch.no_grad():
        torch.testing.assert_close(found, latent_attention(*inputs), atol=2e-6, rtol=1e-4)
    assert function.site.decision.lowering == "decode_latent"
    assert not {"linear", "scaled_dot_product_attention", "copy_"} & set(function.calls)
    (note,) = (note for note in function.site.notes if "numbers of each key" in note)
    assert any(note.startswith("not by the kernel for Hopper: ") for note in function.site.notes)
    assert "32 + 8 numbers of each key, 160 bytes, in place of 192, 768 bytes" in note


@interpreted
def test_half_precision_is_closer_than_the_models_own() -> None:
    """Nothing is rounded between the products but q, and the weights of the softmax."""
    inputs = latent_inputs(dtype=torch.float16)
    found, _ = _run(inputs)
    with torch.no_grad():
        exact = latent_attention(*(x.double() if x.is_floating_point() else x for x in inputs))
        own = (latent_attention(*inputs).double() - exact).norm()
        assert (found.double() - exact).norm() <= own
    assert any("output verified" in str(one) for one in attn_compiler.verifications())


@interpreted
def test_what_the_latents_dims_have_in_common_cancels_out() -> None:
    """v is small beside the latent, so that a result over the latent that is rounded once would be off by as much as v is large."""
    q, latent, rope, weight, length = latent_inputs(dtype=torch.float16)
    latent = (latent.float() * 0.05 + 30.0).half()
    weight = (weight.float() - weight.float().mean(-1, keepdim=True)).half()
    inputs = [q * 0.01, latent, rope, weight, length]
    function = compiled(latent_attention, lowering="decode_latent")
    with torch.no_grad():
        found = function(*inputs).double()
        exact = latent_attention(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert (found - exact).norm() <= 0.02 * exact.norm()


@interpreted
def test_slots_that_are_not_filled_may_hold_anything() -> None:
    inputs = latent_inputs()
    expected, _ = _run(inputs)
    for cache in inputs[1:3]:
        cache[:, :, 41:] = torch.nan
    function = compiled(latent_attention, lowering="decode_latent")
    with torch.no_grad():
        torch.testing.assert_close(function(*inputs), expected)


@interpreted
@pytest.mark.parametrize("queries", [1, 3])
def test_a_row_without_keys_is_a_mean(queries: int) -> None:
    """Padding on the left, which is all of one row; of the other one, the first queries see nothing either."""

    def attention(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, real: Tensor, length: Tensor) -> Tensor:
        nope, v = torch.split(linear(latent, weight).view(B, S, H, NOPE + V).transpose(1, 2), [NOPE, V], dim=-1)
        k = torch.cat((nope, rope.expand(-1, H, -1, -1)), -1)
        seen = torch.arange(S)[None, :] <= (torch.arange(q.shape[2]) + length)[:, None]
        allowed = real[:, None, None].bool() & seen
        scores = (q @ k.transpose(2, 3) * 0.2).masked_fill(~allowed, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v

    real = torch.ones(B, S, dtype=torch.int64)
    real[0], real[1, :41] = 0, 0
    inputs = [*latent_inputs(queries)[:4], real, torch.tensor([40])]
    found, function = _run(inputs, attention)
    torch.testing.assert_close(found, attention(*inputs), atol=2e-6, rtol=1e-4)
    assert keyless_nodes.NOTE in function.site.notes


@interpreted
def test_a_length_that_grows_is_compiled_once() -> None:
    def attention(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor) -> Tensor:
        kv = linear(latent, weight).view(B, latent.shape[2], H, NOPE + V).transpose(1, 2)
        nope, v = torch.split(kv, [NOPE, V], dim=-1)
        return scaled_dot_product_attention(q, torch.cat((nope, rope.expand(-1, H, -1, -1)), -1), v)

    q, latent, rope, weight, _ = latent_inputs()
    function = compiled(attention, lowering="decode_latent")
    with torch.no_grad():
        for length in (33, 50, 70):
            caches = (mark(x[:, :, :length].contiguous(), [length]) for x in (latent, rope))
            given = (q, *caches, weight)
            torch.testing.assert_close(function(*given), attention(*given), atol=2e-6, rtol=1e-4)
    assert len(function.reports) == 1
    assert function.site.decision.lowering == "decode_latent"
