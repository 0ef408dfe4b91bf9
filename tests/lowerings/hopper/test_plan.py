"""Blocks of the kernel for Hopper, what its copy engine reads, and what is decided of a site before a node is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.choice import head_parts
from attn_compiler.lowerings.hopper import added, plan
from attn_compiler.lowerings.hopper.call import backward_of, call_of, why_not_in_order
from attn_compiler.lowerings.hopper.lowering import HopperAttention
from attn_compiler.lowerings.hopper.plan import blocks_of, grad_blocks_of
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Plan, head_dim_sums, head_dim_tiles
from attn_compiler.spec import masks
from attn_compiler.spec.attention import SizeRange
from attn_compiler.spec.masks import MaskKind, MaskSpec
from attn_compiler.spec.target import Target
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec


# Blocks of the kernel for Hopper.
def test_unknown_head_dims_are_an_error() -> None:
    with pytest.raises(TypeError, match="unknown head dims"):
        plan.blocks_of(make_spec(head_dim="s0"))


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "is_three"), [(8192, 64, True), (2048, 64, False), (8192, 128, False), ("s0", 64, False)]
)
def test_long_sequences_of_narrow_heads_have_three_warpgroups(seqlen: int | str, head_dim: int, is_three: bool) -> None:
    spec = make_spec(mask=CAUSAL, seqlen_q=seqlen, seqlen_kv=seqlen, head_dim=head_dim)
    assert (plan.blocks_of(spec) == plan.THREE) is is_three


def test_a_block_has_64_queries_for_each_warpgroup() -> None:
    assert {blocks.queries for blocks in plan.BLOCKS.values()} == {128}
    assert plan.THREE.queries == 192
    assert not plan.THREE.takes_turns


def test_outputs_leave_from_the_queries_place_where_there_is_no_room() -> None:
    assert plan.leaves_from_queries(make_spec(head_dim=256))
    assert not plan.leaves_from_queries(make_spec(head_dim=128))


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums were faster wherever they are no power of two."""
    monkeypatch.setattr(head_parts, "is_faster", lambda spec: head_dim_sums(spec) != head_dim_tiles(spec))


@pytest.mark.parametrize(
    ("head_dim", "multiplied", "stages"), [(72, 80, 3), (80, 80, 3), (96, 96, 3), (112, 112, 2), (128, 128, 2)]
)
def test_a_sum_leaves_room_for_more_tiles(head_dim: int, multiplied: int, stages: int, summed: None) -> None:
    spec = make_spec(head_dim=head_dim)
    assert plan.multiplied(spec) == (multiplied, multiplied)
    assert plan.blocks_of(spec).stages == stages
    assert not plan.leaves_from_queries(spec)


def test_what_was_not_measured_has_powers_of_two() -> None:
    spec = make_spec(head_dim=80, seqlen_q=256, seqlen_kv=256)
    assert plan.multiplied(spec) == (128, 128)
    assert plan.blocks_of(spec) == plan.BLOCKS[128]


def test_of_any_length_what_guards_say_counts() -> None:
    """Three warpgroups where every call is long, cuDNN's backward where every call is short."""
    any_length = make_spec(head_dim=64, seqlen_q="s0", seqlen_kv="s0", mask=CAUSAL)
    assert plan.blocks_of(any_length) == plan.BLOCKS[64]
    long = dataclasses.replace(any_length, ranges=(SizeRange(size="s0", least=4096),))
    assert plan.blocks_of(long) == plan.THREE
    wide = make_spec(head_dim=128, seqlen_q="s0", seqlen_kv="s0", mask=CAUSAL)
    assert not plan.cudnn_is_faster(wide)
    assert not plan.cudnn_is_faster(make_spec(head_dim=64))
    assert plan.cudnn_is_faster(dataclasses.replace(wide, ranges=(SizeRange(size="s0", least=2, most=512),)))


def test_narrow_heads_have_tiles_in_halves_where_they_are_faster() -> None:
    causal: dict[str, Any] = {"band": Band(right=0)}
    whole: list[dict[str, Any]] = [causal | {"documents": True}, {"mask": True}, {"slopes": True}, {"bias": True}]
    for beside in ({}, causal, {"keys": True}, {"rows": True}, {"documents": True}, *whole):
        made, queries = dataclasses.replace(Case(name="narrow").plan, **beside), 64 if beside in whole else 128
        assert plan.grad_blocks_of(make_spec(head_dim=64), made).queries == queries


@pytest.mark.parametrize(("qk", "v"), [(64, 80), (72, 72), (96, 80), (112, 112), (128, 96), (192, 128)])
def test_tiles_of_sums_fit_shared_memory(qk: int, v: int, summed: None) -> None:
    spec = make_spec(head_dim=qk, head_dim_v=v)
    blocks, (qk, v) = plan.blocks_of(spec), plan.multiplied(spec)
    queries = blocks.queries * blocks.query_stages * qk
    elements = queries + blocks.stages * blocks.keys * (qk + v)
    if plan.leaves_from_queries(spec):
        assert (qk, v) == (192, 128)
    else:
        elements += blocks.queries * v
    assert 2 * elements <= 226 * 1024


_OF_KEY = Load("of_key", (Index("b"), Index("k")), "int")


@pytest.mark.parametrize(
    ("kind", "is_ordered"),
    [
        (masks.Document(of_key=_OF_KEY), True),
        (masks.Chunked(size=300), True),
        (masks.KeyPadding(condition=ix.as_bool(_OF_KEY)), False),
        (masks.Causal(), False),
    ],
)
def test_blocks_of_any_length_come_long_ones_first(kind: MaskKind, is_ordered: bool) -> None:
    dense = masks.Dense(shape=(2, 1, 1024, 1024), dtype="bool")
    mask = masks.MaskSpec(kinds=(kind,), dense=dense)
    assert plan.is_ordered(make_spec(mask=mask, seqlen_q=1024, seqlen_kv=1024)) is is_ordered
    # For so few queries no lists are made.
    assert not plan.is_ordered(make_spec(mask=mask, seqlen_q=16, seqlen_kv=1024))


@pytest.mark.parametrize(
    ("qk", "v", "multiplied", "part", "stages"),
    [(512, 512, 512, 256, 3), (264, 264, 384, 128, 8), (384, 320, 384, 128, 8), (192, 512, 256, 256, 5), (512, 128, 512, 256, 3)],
)  # fmt: skip
def test_wide_heads_have_a_ring_of_as_many_parts_as_there_is_room_for(
    qk: int, v: int, multiplied: int, part: int, stages: int
) -> None:
    spec = make_spec(head_dim=qk, head_dim_v=v)
    assert plan.is_wide(spec)
    assert plan.multiplied(spec) == (multiplied, plan.WIDE_PASS)
    blocks = plan.blocks_of(spec)
    assert blocks.part == part
    assert blocks.stages == stages >= (multiplied + plan.WIDE_PASS) // part
    assert not blocks.takes_turns
    assert not plan.leaves_from_queries(spec)
    assert not plan.has_backward(spec)


@pytest.mark.parametrize("mask", [CAUSAL, MaskSpec()], ids=["causal", "none"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (384, 320), (264, 264), (200, 512), (512, 64)])
def test_passes_of_wide_heads_fit_into_shared_memory(head_dim: int, head_dim_v: int, mask: MaskSpec) -> None:
    spec = make_spec(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim_v, mask=mask)
    assert plan.has_wide_backward(spec)
    qk, v = plan.wide_head_dims(spec)
    for grad in "qk":
        blocks = plan.wide_blocks_of(spec, grad)
        assert head_dim <= qk < head_dim + blocks.part
        assert head_dim_v <= v < head_dim_v + blocks.part_v
        assert qk % blocks.part == v % blocks.part_v == 0
        # A whole tile is there at once: its scores and its sums read the same.
        assert blocks.stages >= qk // blocks.part
        numbers = plan.ROWS * (qk + v + blocks.tile)
        numbers += blocks.tile * (blocks.stages * blocks.part + blocks.stages_v * blocks.part_v)
        assert 200 * 1024 <= 2 * numbers <= 226 * 1024
    assert plan.wide_blocks_of(spec, "v").rows == 2 * plan.ROWS


def _of(*kinds: MaskKind) -> MaskSpec:
    """A tensor that was read as those."""
    return MaskSpec(kinds=kinds, dense=masks.Dense(shape=(2, 1, 2048, 2048), dtype="bool"))


_LONG: Any = {"dtype": "bfloat16", "seqlen_q": 2048, "seqlen_kv": 2048, "head_dim": 512}


@pytest.mark.parametrize(
    ("given", "is_faster"),
    [
        ({"mask": CAUSAL}, True), ({}, True), ({"mask": CAUSAL, "head_dim": 320}, True), ({"mask": CAUSAL, "seqlen_kv": "s0"}, True),
        ({"mask": CAUSAL, "head_dim": 312}, False), ({"mask": CAUSAL, "head_dim": 512, "head_dim_v": 320}, False),
        ({"mask": CAUSAL, "seqlen_q": 1023}, False), ({"mask": _of(masks.SlidingWindow(left=100, right=0))}, False),
        ({"mask": _of(masks.Causal(), masks.Document(of_key=_OF_KEY))}, False),
        ({"mask": _of(masks.Causal(), masks.KeyPadding(condition=ix.as_bool(_OF_KEY)))}, True),
    ],
)  # fmt: skip
def test_the_passes_of_wide_heads_are_faster_where_that_was_measured(given: dict[str, Any], is_faster: bool) -> None:
    assert plan.wide_is_faster(make_spec(**_LONG | given)) is is_faster


# What is decided of a site before a node is made.
HOPPER = HopperAttention()
H200 = Target.fake()
DETERMINISTIC = Target.fake(deterministic=True)
#: of each key alone, which this family's backward reads
KEYS = dense(2, 1, 1, 2048)

_CALL_LONG: dict[str, Any] = {"dtype": "bfloat16", "seqlen_q": 2048, "seqlen_kv": 2048, "head_dim": 128}


def test_cudnns_backward_takes_no_gradient_of_the_lse() -> None:
    assert backward_of(make_spec(**_CALL_LONG), H200) == "sdpa_cudnn"
    differentiated = make_spec(**_CALL_LONG, lse="differentiated")
    assert HOPPER.why_not(differentiated, H200) == []
    assert backward_of(differentiated, H200) == "hopper"


def test_the_backward_is_its_own_where_it_is_the_fastest() -> None:
    assert backward_of(make_spec(mask=CAUSAL, **_CALL_LONG), H200) == "hopper"
    assert backward_of(make_spec(mask=KEYS, **_CALL_LONG), H200) == "hopper"
    assert backward_of(make_spec(**_CALL_LONG), H200) == "sdpa_cudnn"
    assert backward_of(make_spec(mask=CAUSAL, **_CALL_LONG | {"seqlen_q": 512, "seqlen_kv": 512}), H200) == "sdpa_cudnn"
    assert backward_of(make_spec(**_CALL_LONG), Target.fake(cudnn=0)) == "hopper"


def test_wide_heads_have_the_backward_of_another_family() -> None:
    wide = _CALL_LONG | {"head_dim": 256}
    assert backward_of(make_spec(mask=CAUSAL, **wide), Target.fake(torch="2.11.0")) == "sdpa_cudnn"
    assert backward_of(make_spec(mask=dense(2, 1, 2048, 2048), **wide), H200) == "triton"


@pytest.mark.parametrize("target", [H200, DETERMINISTIC])
@pytest.mark.parametrize("head_dim", [320, 512])
def test_head_dims_above_256_have_three_passes_of_its_own(head_dim: int, target: Target) -> None:
    wide = _CALL_LONG | {"head_dim": head_dim}
    spec = make_spec(mask=CAUSAL, **wide)
    assert backward_of(spec, target) == "hopper"
    tiles = call_of(spec, target).grad_tiles
    assert tiles is not None
    assert (tiles.forward, tiles.grad_kv.queries, tiles.grad_kv.keys) == (blocks_of(spec).tile, 64, 128)


@pytest.mark.parametrize("target", [H200, DETERMINISTIC])
def test_wide_heads_that_were_not_measured_have_the_triton_kernels_backward(target: Target) -> None:
    wide = _CALL_LONG | {"head_dim": 512}
    held = bias(1, 8, 2048, 2048, requires_grad=False)
    for given in ({"mask": dense(2, 1, 2048, 2048)}, {"changes": (held,)}, {"mask": CAUSAL, "head_dim": 264}):
        assert backward_of(make_spec(**wide | given), target) == "triton"


@pytest.mark.parametrize("target", [H200, DETERMINISTIC])
def test_learned_biases_have_the_backward_of_another_family(target: Target) -> None:
    assert backward_of(make_spec(changes=(bias(1, 8, 2048, 2048),), **_CALL_LONG), target) == "triton"


@pytest.mark.parametrize(("dtype", "family"), [("bfloat16", "hopper"), ("float16", "hopper"), ("float32", "triton")])
def test_biases_in_half_precision_that_want_no_gradient_have_its_own_backward(dtype: str, family: str) -> None:
    held = bias(1, 8, 2048, 2048, dtype=dtype, requires_grad=False)
    assert backward_of(make_spec(changes=(held,), **_CALL_LONG), H200) == family
    assert backward_of(make_spec(changes=(held,), **_CALL_LONG), DETERMINISTIC) == "triton"


def test_dense_masks_have_its_own_backward() -> None:
    assert backward_of(make_spec(mask=dense(2, 1, 2048, 2048), **_CALL_LONG), H200) == "hopper"
    assert backward_of(make_spec(mask=dense(2, 1, 2048, 2048), **_CALL_LONG), DETERMINISTIC) == "triton"


def test_values_that_are_wider_than_keys_have_the_backward_of_another_family() -> None:
    """dv leaves from a place in shared memory that is as large as a tile of q."""
    wide = _CALL_LONG | {"head_dim": 64, "head_dim_v": 128}
    mask = KEYS
    assert backward_of(make_spec(mask=mask, **wide), H200) == "triton"
    assert backward_of(make_spec(mask=mask, **wide | {"head_dim": 72}), H200) == "hopper"
    assert backward_of(make_spec(mask=mask, **wide | {"head_dim": 128, "head_dim_v": 64}), H200) == "hopper"


def test_a_deterministic_backward_adds_up_in_one_order_where_that_is_faster() -> None:
    many = _CALL_LONG | {"batch": 8, "heads": 16, "heads_kv": 16}
    assert backward_of(make_spec(mask=CAUSAL, **many), DETERMINISTIC) == "hopper_in_order"
    assert backward_of(make_spec(mask=CAUSAL, **many | {"batch": 1}), DETERMINISTIC) == "triton"
    assert backward_of(make_spec(**many), DETERMINISTIC) == "triton"
    assert backward_of(make_spec(mask=CAUSAL, **many | {"head_dim": 256}), DETERMINISTIC) == "triton"
    assert why_not_in_order(make_spec(**many), H200) == []
    assert why_not_in_order(make_spec(**many | {"head_dim": 256}), DETERMINISTIC) == []


def test_cudnns_backward_reads_no_repeated_axes() -> None:
    spec = make_spec(**_CALL_LONG)
    repeated = dataclasses.replace(spec.k, strides=(0, *spec.k.strides[1:]))
    assert backward_of(spec, H200) == "sdpa_cudnn"
    assert backward_of(dataclasses.replace(spec, k=repeated), H200) == "hopper"


def test_lists_are_made_for_the_tiles_of_whoever_reads_them() -> None:
    spec = make_spec(mask=CAUSAL, **_CALL_LONG)
    of_triton = tile_table.tiles(spec, H200)
    own = call_of(spec, H200)
    assert own.tiles.forward == blocks_of(spec).tile != of_triton.forward
    assert own.grad_tiles is not None
    assert own.grad_tiles.grad_kv == grad_blocks_of(spec, own.parts).tile != of_triton.grad_kv
    assert call_of(make_spec(mask=CAUSAL, **_CALL_LONG | {"head_dim": 256}), DETERMINISTIC).grad_tiles is not None
    assert call_of(make_spec(**_CALL_LONG), H200).grad_tiles is None


def test_without_gradients_no_backward_is_decided() -> None:
    call = call_of(make_spec(mask=CAUSAL, needs_grad=False, **_CALL_LONG), DETERMINISTIC)
    assert (call.backward, call.grad_tiles, call.not_in_order) == (None, None, ())


# What the copy engine reads of what is added to the scores.
@pytest.fixture
def emitter() -> Any:
    return kernel_problems.Eager()


def _in_copies(values: torch.Tensor) -> torch.Tensor:
    """As `Plan.distances` has them."""
    length = -(-(values.shape[1] + 1) // 8) * 8
    padded = torch.nn.functional.pad(values, (0, length + 8 - values.shape[1]))
    return torch.stack([padded[:, p : p + length] for p in range(8)], 1)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (1, 300), (70, 130), (256, 64), (300, 77)])
def test_a_tile_of_numbers_by_distance_begins_at_its_first_distance(
    seqlen_q: int, seqlen_kv: int, emitter: Any
) -> None:
    values = torch.randn(2, seqlen_q + seqlen_kv - 1)
    found = added.shifted_distances(emitter, _in_copies(values), seqlen_q, seqlen_kv)
    assert found.shape[:3] == (1, 2, 64)
    assert found.stride(2) % 8 == 0
    zero = added.zero(seqlen_q)
    for query in range(0, seqlen_q, 37):
        for key in range(0, seqlen_kv, 29):
            first = query // 64 * 64
            got = found[0, :, query - first, key - first + zero]
            assert torch.equal(got, values[:, key - query + seqlen_q - 1])


@pytest.mark.parametrize("seqlen_q", [1, 64, 65, 200])
@pytest.mark.parametrize("queries", [128, 192])
def test_no_tile_begins_before_the_first_column(seqlen_q: int, queries: int) -> None:
    last = -(-seqlen_q // queries) * queries - 64
    assert added.zero(seqlen_q) - last >= 0
    assert (added.zero(seqlen_q) - last) % 64 == 0


@pytest.mark.parametrize(
    ("bias", "readable"),
    [
        (torch.empty(1, 2, 8, 16, dtype=torch.bfloat16), True),
        (torch.empty(1, 2, 8, 12, dtype=torch.bfloat16), False),
        (torch.empty(1, 2, 8, 12), True),
        (torch.empty(1, 2, 16, 8).transpose(2, 3), False),
        (torch.empty(1, 2, 1, 16).expand(1, 2, 8, 16), False),
        (torch.empty(1, 1, 1, 13), True),
    ],
)
def test_which_biases_are_read_where_they_are(bias: torch.Tensor, readable: bool, emitter: Any) -> None:
    assert added.is_readable(bias) is readable
    assert (added.readable_bias(emitter, bias) is bias) is readable


def test_heads_and_batch_rows_that_are_repeated_are_read_once(emitter: Any) -> None:
    bias = torch.randn(1, 1, 8, 16).expand(3, 4, 8, 16)
    found = added.readable_bias(emitter, bias)
    assert found.shape == (1, 1, 8, 16)
    assert found.data_ptr() == bias.data_ptr()


def test_what_begins_between_vectors_is_copied() -> None:
    memory = torch.randn(129)
    there, beside = memory[:128].view(1, 1, 8, 16), memory[1:].view(1, 1, 8, 16)
    first = torch.empty(3)
    assert there.data_ptr() % 16 == 0
    assert not added.begins_between_vectors(Plan(bias=True), [first, there])
    assert added.begins_between_vectors(Plan(bias=True), [first, beside])
    assert not added.begins_between_vectors(Plan(), [first, beside])
    same, copy = added.with_copy([first, beside])
    assert same is first
    assert torch.equal(copy, beside)
    assert copy.data_ptr() % 16 == 0


def test_what_has_the_operand() -> None:
    assert added.is_there(Plan(bias=True))
    assert added.is_there(Plan(distances=True))
    assert not added.is_there(Plan(slopes=True, mask=True))
    made: Any = {"bias": torch.randn(1, 1, 8, 16)}
    assert added.emit(kernel_problems.Eager(), Plan(bias=True), made, (8, 16)) is made["bias"]  # type: ignore[arg-type]
