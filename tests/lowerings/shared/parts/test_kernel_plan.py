"""A kernel's plan as text, its tiles, and changes of each score by itself."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.plain import takes as plain
from attn_compiler.lowerings.shared.kernels import tile_parts
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.parts import score_changes, site_parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan, head_dim_sums, head_dim_tiles
from attn_compiler.lowerings.shared.parts.tile_table import ROWS, Part, is_small, parts_of, tiles, tiles_of_one
from attn_compiler.lowerings.shared.parts.tiles import UNIT
from attn_compiler.spec import masks, scores
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec
from attn_compiler.spec.scores import Pointwise, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.kernel_problems import DEVICE
from tests.lowerings.specs import make_spec

TILE = Tile(queries=64, keys=32, warps=4, stages=2)
TILES = Tiles(forward=TILE, grad_q=TILE, grad_kv=dataclasses.replace(TILE, warps=8))


@pytest.mark.parametrize(
    ("plan", "operands"),
    [
        (Plan(), ()),
        (Plan(rows=True), ("rows", "tiles")),
        (Plan(keys=True, needs_grad=True), ("keys", "tiles", "tiles_by_key")),
        (Plan(documents=True, mask=True), ("documents_q", "documents_k", "mask", "tiles")),
        (Plan(bias=True, slopes=True, dropout=True), ("bias", "slopes", "seed")),
        (Plan(distances=True, sinks=True), ("distances", "sinks")),
    ],
)
def test_operands_in_the_order_of_the_plan(plan: Plan, operands: tuple[str, ...]) -> None:
    assert plan.operands == operands


def test_what_gets_a_gradient() -> None:
    assert Plan(bias=True, sinks=True, sinks_grad=True, needs_grad=True).differentiable == ("sinks",)
    assert Plan(bias=True, bias_grad=True, distances=True, distances_grad=True).differentiable == ("bias", "distances")


def test_a_call_is_its_text() -> None:
    mask = masks.MaskSpec(
        kinds=(masks.Document(of_key=Load("ids", (Index("b"), Index("k")), "int")), masks.CausalFrom(offset=ix.ONE)),
        out_of_reach=("ids",),
    )
    call = Call(spec=make_spec(mask=mask, seqlen_q="s0"), tiles=TILES)
    assert Call.from_text(call.to_text()) == call
    assert Call(spec=call.spec, tiles=dataclasses.replace(TILES, grad_kv=TILE)).to_text() != call.to_text()


def test_words_of_a_tile() -> None:
    assert TILE.words == f"{TILE.queries}x{TILE.keys} w{TILE.warps} s{TILE.stages}"
    assert dataclasses.replace(TILE, apart=True).words == f"{TILE.words} apart"
    assert dataclasses.replace(TILE, registers=168).words == f"{TILE.words} r168"


def test_registers_are_left_to_the_compiler_where_nothing_is_said() -> None:
    options = {"num_warps": TILE.warps, "num_stages": TILE.stages}
    assert TILE.launch_options == options
    assert dataclasses.replace(TILE, registers=168).launch_options == {**options, "maxnreg": 168}


def test_a_tile_whose_gradients_are_apart_survives_its_text() -> None:
    tiles = dataclasses.replace(TILES, grad_kv=dataclasses.replace(TILE, apart=True))
    call = Call(spec=make_spec(), tiles=tiles)
    assert Call.from_text(call.to_text()) == call


@pytest.mark.parametrize(("head_dim", "tiles"), [(32, 64), (64, 64), (72, 128), (128, 128), (136, 256), (256, 256)])
def test_head_dims_are_held_by_powers_of_two(head_dim: int, tiles: int) -> None:
    assert head_dim_tiles(make_spec(head_dim=head_dim)) == (tiles, tiles)


@pytest.mark.parametrize(
    ("head_dims", "sums"),
    [
        ((32, 32), (64, 64)),
        ((72, 72), (80, 80)),
        ((80, 96), (80, 96)),
        ((104, 112), (112, 112)),
        ((120, 128), (128, 128)),
        ((192, 128), (192, 128)),
        ((136, 80), (256, 128)),
        ((192, 192), (256, 256)),
    ],
)
def test_head_dims_are_held_by_sums_of_powers_of_two(head_dims: tuple[int, int], sums: tuple[int, int]) -> None:
    assert head_dim_sums(make_spec(head_dim=head_dims[0], head_dim_v=head_dims[1])) == sums


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sm", [0, 80, 89, 90, 100, 120])
def test_every_shape_has_tiles_that_the_lists_can_be_made_for(dtype: str, sm: int) -> None:
    """Of a dense mask, which is asked by UNIT × UNIT pairs. Small machines have none beside the gradients of wide heads."""
    target, widest = Target.fake(sm=sm), 256 if dtype == "float32" else 512
    for qk, v, seqlen in itertools.product((1, 64, 72, 128, 192, 256, widest), (16, 128, widest), (1, 33, "s0")):
        spec = make_spec(head_dim=qk, head_dim_v=v, seqlen_q=seqlen, dtype=dtype)
        masked = dataclasses.replace(spec, mask=MaskSpec(dense=Dense(shape=(2, 1, 64, 64), dtype="bool")))
        found, listed = tiles(spec, target), tiles(masked, target)
        for tile in (found.forward, found.grad_q, found.grad_kv, listed.grad_q):
            assert tile.queries % 16 == tile.keys % 16 == 0
        by_key = [] if is_small(target) and max(qk, v) > 256 else [listed.grad_kv]
        for tile in (listed.forward, *by_key):
            assert tile.queries % UNIT == tile.keys % UNIT == 0


def test_where_there_are_lists_the_gradient_of_q_visits_the_forwards() -> None:
    """What reads the kept gradients of scores, of what is learned, takes the forward's whole block."""
    for row in ROWS:
        assert row.listed_grad_q.keys == row.tiles.forward.keys
        assert row.tiles.forward.queries % row.listed_grad_q.queries == 0
        if row.head_dim <= (128 if row.small else 256):
            assert row.listed_grad_q.queries == row.tiles.forward.queries
    spec, target = make_spec(head_dim=128, seqlen_q=4096, seqlen_kv=4096), Target.fake()
    padded = dataclasses.replace(spec, mask=MaskSpec(dense=Dense(shape=(2, 1, 1, 4096), dtype="bool")))
    assert tiles(spec, target).grad_q.queries != tiles(spec, target).forward.queries
    assert tiles(padded, target).grad_q.queries == tiles(padded, target).forward.queries


def test_what_is_added_may_want_other_tiles() -> None:
    spec, target = make_spec(head_dim=128, seqlen_q=4096, seqlen_kv=4096), Target.fake()
    bias = MaskSpec(dense=Dense(shape=(1, 8, 4096, 4096), dtype="bfloat16"))
    assert tiles(dataclasses.replace(spec, mask=bias), target).forward != tiles(spec, target).forward


def test_rows_are_chosen_by_what_is_evaluated_beside_the_products() -> None:
    spec, target = make_spec(head_dim=64, seqlen_q=4096, seqlen_kv=4096), Target.fake(sm=90)
    bias = Dense(shape=(1, 8, 4096, 4096), dtype="bfloat16")
    masks: dict[str, tuple[frozenset[Part], MaskSpec]] = {
        "full": (frozenset(), MaskSpec()),
        "band": (frozenset({"band"}), MaskSpec(kinds=(Causal(),), flag=Flag.CALLED)),
        "mask": (
            frozenset({"band", "mask"}),
            MaskSpec(kinds=(Causal(),), flag=Flag.CALLED, dense=Dense(shape=(2, 1, 64, 4096), dtype="bool")),
        ),
        "bias": (frozenset({"band", "bias"}), MaskSpec(kinds=(Causal(),), flag=Flag.CALLED, dense=bias)),
    }
    found = {}
    for name, (parts, mask) in masks.items():
        each = dataclasses.replace(spec, mask=mask)
        assert parts_of(each, site_parts.make_plan(each)) == parts
        found[name] = tiles(each, target)
    assert found["band"].forward.registers is not None
    assert found["mask"].grad_q.registers is not None
    assert found["full"] not in (found["band"], found["mask"])
    assert found["bias"] == found["full"]


def test_the_larger_head_dim_counts() -> None:
    target = Target.fake()
    assert tiles(make_spec(head_dim=64, head_dim_v=256), target) == tiles(make_spec(head_dim=256), target)
    assert tiles(make_spec(head_dim=64), target) != tiles(make_spec(head_dim=256), target)


def test_few_queries_get_small_tiles_if_their_number_is_known() -> None:
    target = Target.fake()
    assert tiles(make_spec(seqlen_q=1), target).forward.queries == 32
    assert tiles(make_spec(seqlen_q="s0"), target) == tiles(make_spec(seqlen_q=4096), target)


def test_a_newer_gpu_gets_larger_tiles() -> None:
    spec = make_spec(head_dim=256)
    assert tiles(spec, Target.fake(sm=90)).forward.queries > tiles(spec, Target.fake(sm=80)).forward.queries


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
def test_small_blackwell_is_given_the_tiles_of_ampere(head_dim: int) -> None:
    """Of Ampere's small machines, where that makes a difference: without gradients from head dim 257 on."""
    spec = make_spec(head_dim=head_dim)
    small, large = tiles(spec, Target.fake(sm=89)), tiles(spec, Target.fake(sm=80))
    assert tiles(spec, Target.fake(sm=120)) == small == tiles(spec, Target.fake(sm=86))
    assert (small == large) == (head_dim <= 128)
    assert (small.forward == large.forward) == (head_dim <= 256)
    assert tiles(spec, Target.fake(sm=103)) == tiles(spec, Target.fake(sm=100))


@pytest.mark.parametrize(
    ("sm", "small"),
    [(80, False), (86, True), (87, True), (89, True), (90, False), (103, False), (110, False), (120, True)],
)
def test_machines_with_little_shared_memory(sm: int, small: bool) -> None:
    assert is_small(Target.fake(sm=sm)) == small


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_sums_of_wide_heads_are_held_in_passes(sm: int) -> None:
    found, narrower = (tiles(make_spec(head_dim=head_dim), Target.fake(sm=sm)) for head_dim in (512, 256))
    assert found == tiles(make_spec(head_dim=392), Target.fake(sm=sm)) != narrower
    # What 385 dims leave no room for.
    assert (tiles(make_spec(head_dim=384), Target.fake(sm=sm)) != found) == (sm == 90)
    assert found.grad_kv.apart
    with pytest.raises(LookupError, match="520"):
        tiles(make_spec(head_dim=520), Target.fake(sm=sm))


def test_there_are_none_for_other_dtypes() -> None:
    with pytest.raises(LookupError, match="no tiles for float64"):
        tiles(make_spec(dtype="float64"), Target.fake())


def test_no_row_is_hidden_by_one_before_it() -> None:
    for index, row in enumerate(ROWS):
        for before in ROWS[:index]:
            hidden = (
                before.bytes >= row.bytes
                and before.head_dim >= row.head_dim
                and before.first_sm <= row.first_sm
                and before.small <= row.small
                and before.seqlen_q is None
                and (not before.holds or set(before.holds) >= set(row.holds) > set())
            )
            assert not hidden, row


def test_keys_that_are_the_values_leave_room_for_more_of_them() -> None:
    """Only where that was measured, and not where a backward visits the same lists."""
    spec = make_spec(head_dim=512, needs_grad=False)
    training = make_spec(head_dim=512)
    for sm, asked, more in ((90, spec, True), (90, training, False), (80, spec, False)):
        of_one, of_two = (find(asked, Target.fake(sm=sm)).forward for find in (tiles_of_one, tiles))
        assert (of_one.keys == 2 * of_two.keys) == more
        assert more or of_one == of_two


# Changes of each score by itself.

#: one of each class
CHANGES: tuple[Pointwise, ...] = (Softcap(cap=3.0),)
#: further than any of them lets through
SCORES = torch.linspace(-9, 9, 1024, dtype=torch.float64)
each = pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)


def _applied(x: torch.Tensor, change: Pointwise | None) -> torch.Tensor:
    return score_changes.applied(lambda function, *given: function(*given), x, change)


def test_every_change_is_tested_here_and_taken() -> None:
    tested = {type(change) for change in CHANGES}
    assert tested == {x for x in scores.KINDS if issubclass(x, Pointwise)} == set(score_changes.FORMS)
    for takes in (plain.MATH, plain.REFERENCE, kernel_limits.TAKES):
        assert tested <= set(takes.changes)


def test_names_are_different() -> None:
    names = [form.name for form in score_changes.FORMS.values()]
    assert len({*names, score_changes.UNCHANGED}) == len(names) + 1


def test_a_softcap_is_what_its_formula_says() -> None:
    expected = torch.tensor([3.0 * math.tanh(x / 3.0) for x in SCORES.tolist()], dtype=torch.float64)
    torch.testing.assert_close(_applied(SCORES, Softcap(cap=3.0)), expected, rtol=1e-14, atol=0)


@each
def test_its_slope_is_what_autograd_finds(change: Pointwise) -> None:
    x = SCORES.clone().requires_grad_()
    changed = _applied(x, change)
    (expected,) = torch.autograd.grad(changed.sum(), x)
    found = score_changes.through(torch.full_like(x, 2.0), changed.detach(), change)
    torch.testing.assert_close(found, 2.0 * expected, rtol=1e-12, atol=1e-12)


@each
def test_a_factor_may_stand_on_either_side(change: Pointwise) -> None:
    for factor in (0.25, -2.0):
        torch.testing.assert_close(factor * _applied(SCORES, change), _applied(factor * SCORES, change.scaled(factor)))


@each
def test_no_score_is_larger_than_it_says(change: Pointwise) -> None:
    for changed in (change, change.scaled(-2.0)):
        most = _applied(100.0 * SCORES, changed).abs().max().item()
        assert most == pytest.approx(changed.most)


def test_without_a_change_nothing_happens() -> None:
    assert _applied(SCORES, None) is SCORES
    assert score_changes.through(SCORES, SCORES, None) is SCORES


@triton.jit
def _change(X, Logits, Grad, scale, number, CHANGE: tl.constexpr):
    at = tl.arange(0, 1024)
    found, factor = tile_parts.changed(tl.load(X + at), scale, number, CHANGE, False, tile_parts.LOG2E)
    tl.store(Logits + at, found * factor)
    tl.store(Grad + at, tile_parts.through_change(tl.full([1024], 2.0, tl.float32), found, CHANGE))


@pytest.mark.parametrize("change", [*CHANGES, None], ids=lambda change: type(change).__name__)
def test_kernels_do_the_same(change: Pointwise | None) -> None:
    x, scale = SCORES.float().to(DEVICE), 0.5
    logits, grad = torch.empty_like(x), torch.empty_like(x)
    _change[(1,)](x, logits, grad, scale, score_changes.number(change), score_changes.name(change))
    expected = _applied(scale * x.double(), change)
    torch.testing.assert_close(logits.double() * math.log(2.0), expected, rtol=1e-5, atol=1e-5)
    of_ones = score_changes.through(torch.full_like(expected, 2.0), expected, change)
    torch.testing.assert_close(grad.double(), of_ones, rtol=1e-5, atol=1e-5)
