"""The lowering over a latent, whole: what it takes, what it emits, how its work is shared out, and its numbers in Triton's interpreter."""

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
from attn_compiler.lowerings.decode import latent_hopper, latent_schedule
from attn_compiler.lowerings.decode.latent_schedule import ROWS, schedule
from attn_compiler.passes.writing import keyless_nodes
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.attention import AttentionSpec, LatentSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import ScoreSpec, Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import dense
from tests.passes.compiling import Compiled, compiled, mark

# The lowering over a latent, whole.
H100 = Target.fake(sm=90)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on a CPU")


def _tensor(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    strides = torch.empty(shape, device="meta").stride()
    return TensorSpec(shape=shape, strides=tuple(strides), dtype=dtype)


def latent_spec(
    *, batch: int = 1, heads: int = 16, queries: int = 1, keys: int = 4096, rank: int = 512, rope: int = 64, **more: Any
) -> AttentionSpec:
    dtype = more.pop("dtype", "bfloat16")
    own = (_tensor(batch, 1, keys, rank, dtype=dtype), _tensor(batch, 1, keys, rope, dtype=dtype) if rope else None)
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


# How the work over a latent is shared out, on every machine that has a row.
MACHINES = (80, 90, 100, 120)


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_every_machine_has_a_schedule(heads: int, dtype: str, sm: int) -> None:
    found = schedule(latent_spec(heads=heads, dtype=dtype), Target.fake(sm=sm))
    assert found.rows in {row.rows for row in ROWS}
    assert found.keys >= 16
    assert found.splits is not None
    assert found.splits >= 1


def test_hopper_alone_has_tiles_of_more_rows() -> None:
    rows = {sm: schedule(latent_spec(heads=128), Target.fake(sm=sm)).rows for sm in MACHINES}
    assert rows == {80: 16, 90: 64, 100: 16, 120: 16}
    narrow = {heads: schedule(latent_spec(heads=heads), Target.fake(sm=90)).rows for heads in (1, 16, 17, 32, 33)}
    assert narrow == {1: 16, 16: 16, 17: 32, 32: 32, 33: 64}


def test_kernels_begin_early_on_the_gpus_of_data_centers_since_hopper() -> None:
    assert [schedule(latent_spec(), Target.fake(sm=sm)).early for sm in MACHINES] == [False, True, True, False]


def test_lengths_that_are_not_known_are_left_to_the_launch() -> None:
    assert schedule(unknown_keys(latent_spec()), Target.fake(sm=90)).splits is None


def unknown_keys(spec: AttentionSpec) -> AttentionSpec:
    k, v = (dataclasses.replace(x, shape=(*x.shape[:2], "s0", x.shape[3])) for x in (spec.k, spec.v))
    return dataclasses.replace(spec, k=k, v=v)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (dataclasses.replace(latent_spec(), latent=None), "the site has no latent"),
        (latent_spec(rank=1024), "no schedule for a latent of 1024 in bfloat16"),
        (latent_spec(dtype="float64"), "no schedule for a latent of 512 in float64"),
    ],
)
def test_what_has_no_row(spec: AttentionSpec, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        latent_schedule.schedule(spec, Target.fake(sm=90))


# Which attention over a latent goes to the kernel for Hopper, and with how many splits.
H200 = Target.fake(sm=90, processors=132)
SERVED = latent_spec(heads=128)


def _scored(**given: object) -> AttentionSpec:
    return dataclasses.replace(SERVED, score=dataclasses.replace(ScoreSpec(scale=0.1), **given))


@pytest.mark.parametrize("heads", [33, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_it_takes(heads: int, dtype: str) -> None:
    spec = latent_spec(heads=heads, dtype=dtype)
    assert latent_hopper.refused(spec, H200) == []
    assert latent_schedule.schedule(spec, H200).hopper
    assert latent_hopper.note([]).startswith("the kernel for Hopper")


@pytest.mark.parametrize(
    ("spec", "target", "code", "observed"),
    [
        (SERVED, Target.fake(sm=80), Code.ARCHITECTURE, "sm80"),
        (SERVED, Target.fake(sm=100), Code.ARCHITECTURE, "sm100"),
        (SERVED, dataclasses.replace(H200, triton="3.5.1"), Code.LIBRARY_VERSION, "3.5.1"),
        (SERVED, dataclasses.replace(H200, triton_interpreted=True), Code.ARCHITECTURE, "Triton's interpreter"),
        (latent_spec(heads=128, dtype="float32"), H200, Code.DTYPE, "float32"),
        (latent_spec(heads=128, rank=256), H200, Code.LATENT, "256 and 64"),
        (latent_spec(heads=128, rope=32), H200, Code.LATENT, "512 and 32"),
        (latent_spec(heads=128, rope=0), H200, Code.LATENT, "512 and 0"),
        (latent_spec(heads=32), H200, Code.LATENT, "32 heads"),
        (latent_spec(heads=128, queries=2), H200, Code.LENGTHS, "seqlen_q 2"),
        (
            dataclasses.replace(SERVED, mask=dense(1, 1, 1, 4096)),
            H200,
            Code.MASK_KIND,
            "without keys; observed dense bool",
        ),
        (_scored(changes=(Sinks(requires_grad=False),)), H200, Code.SINKS, "one learned logit"),
        (_scored(changes=(Softcap(cap=30.0),)), H200, Code.SOFTCAP, "30"),
        (_scored(scale=-0.1), H200, Code.SCALE, "-0.1"),
        (_scored(scale=1e-35), H200, Code.SCALE, "1e-35"),
    ],
)
def test_what_it_refuses_goes_to_the_triton_kernel(
    spec: AttentionSpec, target: Target, code: Code, observed: str
) -> None:
    reasons = latent_hopper.refused(spec, target)
    assert [reason.code for reason in reasons] == [code]
    assert observed in str(reasons[0])
    found = latent_schedule.schedule(spec, target)
    assert found == latent_schedule.of_triton(spec, target)
    assert not found.hopper
    assert str(reasons[0]) in latent_hopper.note(reasons)


def test_a_site_without_a_latent_is_not_asked_about() -> None:
    without = dataclasses.replace(SERVED, latent=None)
    for ask in (latent_hopper.refused, latent_schedule.of_triton):
        with pytest.raises((ValueError, LookupError), match="the site has no latent"):
            ask(without, H200)


@pytest.mark.parametrize(
    ("heads", "batch", "keys", "splits"),
    [
        (128, 16, 4096, 4),
        (128, 16, 32768, 4),
        (128, 64, 4096, 1),
        (128, 64, 32768, 1),
        (128, 1, 4096, 32),
        (128, 1, 32768, 66),
        (64, 16, 4096, 8),
        (64, 16, 32768, 8),
    ],
)
def test_it_is_given_as_many_splits_as_were_the_fastest(heads: int, batch: int, keys: int, splits: int) -> None:
    found = latent_schedule.schedule(latent_spec(heads=heads, batch=batch, keys=keys), H200)
    assert (found.hopper, found.rows, found.splits) == (True, 64, splits)


def test_lengths_that_are_not_known_leave_the_splits_to_the_launch() -> None:
    found = latent_schedule.schedule(unknown_keys(SERVED), H200)
    assert (found.hopper, found.splits) == (True, None)


@pytest.mark.parametrize(
    ("rows", "splits", "parts", "columns"),
    [(2048, 4, 4, 512), (1024, 8, 8, 512), (256, 8, 8, 128), (128, 32, 32, 32), (128, 66, 64, 32), (2048, 2, 4, 512)],
)
def test_few_programs_add_up_what_many_rows_leave(rows: int, splits: int, parts: int, columns: int) -> None:
    schedule = latent_schedule.schedule(SERVED, H200)
    assert latent_schedule.merging(schedule, rows=rows, splits=splits, width=512) == (parts, columns)


def test_no_program_adds_up_more_dims_than_there_are() -> None:
    schedule = latent_schedule.schedule(SERVED, H200)
    assert latent_schedule.merging(schedule, rows=4096, splits=4, width=64) == (4, 64)
