from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.shared import parts, tile_table
from attn_compiler.lowerings.shared.listing import HEAD, SURPLUS, TAIL, UNIT
from attn_compiler.lowerings.triton.stand_ins import MeasuredSizes, StandIn, strides_of
from attn_compiler.spec import scores
from attn_compiler.spec.attention import TensorSpec
from attn_compiler.spec.scores import Sinks
from attn_compiler.spec.target import Target
from tests.lowerings.specs import bias, dense, make_spec

CPU = torch.device("cpu")


def strides(shape: tuple[int, ...], given: tuple[int | str, ...], itemsize: int = 2) -> tuple[int, ...]:
    described = TensorSpec(shape=shape, strides=given, dtype="bfloat16")
    return strides_of(described, shape, itemsize)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ((65536, 64, 512, 1), (65536, 64, 512, 1)),  # BSHD, all known
        (("512*s0", 64, 512, 1), (65536, 64, 512, 1)),  # BSHD of a length that is not
        (("512*s0", "64*s0", 64, 1), (65536, 8192, 64, 1)),  # BHSD
        ((512, 64, "512*s1", 1), (512, 64, 1024, 1)),  # SBHD of a batch that is not
        ((65536, 0, 512, 1), (65536, 0, 512, 1)),  # expanded
        ((65536, 8192, 1, 128), (65536, 8192, 64, 1)),  # transposed: a copy is made
        ((65540, 64, 516, 1), (65536, 8192, 64, 1)),  # not aligned: a copy is made
    ],
)
def test_strides_are_those_that_the_kernel_sees(given: tuple[int | str, ...], seen: tuple[int, ...]) -> None:
    assert strides((2, 8, 128, 64), given) == seen


def test_a_split_projection_keeps_its_gaps() -> None:
    spec = make_spec(batch=2, heads=4, heads_kv=4, seqlen_q=64, seqlen_kv=64)
    gaps = dataclasses.replace(spec, **{n: dataclasses.replace(spec.q, strides=(49152, 64, 768, 1)) for n in "qkv"})
    given = StandIn(gaps, CPU)
    assert given.q.stride() == given.v.stride() == (49152, 64, 768, 1)
    assert bool(given.q.isfinite().all())
    assert 0.9 < float(given.q.float().std()) < 1.1


def test_sizes_that_are_not_known_have_stand_ins() -> None:
    spec = make_spec(batch="s2", heads=32, heads_kv="s3", seqlen_q="s0", seqlen_kv=100_000)
    sizes = MeasuredSizes.of(spec)
    assert sizes == MeasuredSizes(batch=4, heads_q=32, heads_kv=32, seqlen_q=4096, seqlen_kv=16384)
    assert sizes.stand_ins(spec) == (
        "batch 4 for s2",
        "32 key heads for s3",
        "4096 queries for s0",
        "16384 keys for 100000",
    )
    assert MeasuredSizes.of(make_spec()).stand_ins(make_spec()) == ()
    assert MeasuredSizes.of(make_spec(heads_kv=2)).words == "batch 2, 8/2 heads, 128 queries, 128 keys"


PARTS = {
    "open": make_spec(seqlen_kv=600),
    "keys": make_spec(seqlen_kv=600, mask=dense(2, 1, 1, 600)),
    "mask": make_spec(seqlen_kv=600, mask=dense(2, 8, 128, 600)),
    "bias": make_spec(seqlen_kv=600, changes=(bias(1, 8, 1, 600),)),
    "sinks": make_spec(seqlen_kv=600, changes=(Sinks(requires_grad=True),), dropout_p=0.1),
    "few pairs": make_spec(mask=dense(2, 1, 1, 128)),
    "no gradients": make_spec(seqlen_kv=600, mask=dense(2, 1, 1, 600), needs_grad=False),
}


@pytest.mark.parametrize("name", PARTS)
def test_operands_are_the_plans(name: str) -> None:
    spec = dataclasses.replace(PARTS[name], device="cpu")
    plan, tiles = parts.of(spec), tile_table.tiles(spec, Target.fake())
    found = dict(zip(plan.operands, StandIn(spec, CPU).operands(tiles), strict=True))
    shapes = {"keys": (1, 600), "mask": (2, 8, 128, 600), "bias": (1, 8, 1, 600), "sinks": (8,), "seed": (1,)}
    for operand, tensor in found.items():
        if operand in shapes and name != "few pairs":
            assert tuple(tensor.shape) == shapes[operand], operand
    if plan.mask:
        assert bool(found["mask"].all())
    assert ("tiles" in found) is (name in ("keys", "mask", "no gradients"))
    assert ("tiles_by_key" in found) is (name in ("keys", "mask"))


def test_lists_are_those_of_the_tiles_asked_for() -> None:
    spec = make_spec(seqlen_q=600, seqlen_kv=600, mask=dense(2, 1, 1, 600), device="cpu")
    given, table = StandIn(spec, CPU), tile_table.tiles(spec, Target.fake())
    for queries, keys in ((32, 32), (64, 128)):
        tiles = dataclasses.replace(table, forward=dataclasses.replace(table.forward, queries=queries, keys=keys))
        named = dict(zip(parts.of(spec).operands, given.operands(tiles), strict=True))
        blocks_q, blocks_k = -(-600 // queries), -(-600 // keys)
        assert named["tiles"].shape == (1, 1, blocks_q + SURPLUS, blocks_k + HEAD + TAIL)
        # All but the last block of keys, which goes beyond the end, is allowed in full.
        assert named["tiles"][0, 0, :-SURPLUS, :4].tolist() == [[1, 0, blocks_k - 1, blocks_k - 1]] * blocks_q
        again = given.operands(tiles)
        assert again[parts.of(spec).operands.index("tiles")] is named["tiles"]
    assert UNIT == 32


def test_an_additive_dense_tensor_keeps_its_dtype() -> None:
    spec = make_spec(seqlen_kv=600, changes=(scores.DenseBias(shape=(8, 128, 600), dtype="float32"),), device="cpu")
    tiles = tile_table.tiles(spec, Target.fake())
    (found,) = StandIn(spec, CPU).operands(tiles)
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (1, 8, 128, 600))


def test_upstream_gradients_lie_as_the_outputs_do() -> None:
    given = StandIn(make_spec(device="cpu"), CPU)
    out = torch.empty(2, 128, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
    grad_out, grad_lse = given.gradients(out, torch.ones(2, 8, 128))
    assert (grad_out.shape, grad_out.stride(), grad_out.dtype) == (out.shape, out.stride(), out.dtype)
    assert not grad_lse.any()


def test_unknown_head_dims_are_refused() -> None:
    with pytest.raises(TypeError, match="'s3'"):
        StandIn(make_spec(head_dim="s3"), CPU)
