from __future__ import annotations

import dataclasses

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan, head_dim_sums, head_dim_tiles
from attn_compiler.spec import masks
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
