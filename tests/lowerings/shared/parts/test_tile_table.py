from __future__ import annotations

import dataclasses
import itertools

import pytest

from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.tile_table import ROWS, Part, is_small, parts_of, tiles, tiles_of_one
from attn_compiler.lowerings.shared.parts.tiles import UNIT
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import make_spec


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
        assert parts_of(each, site_parts.of(each)) == parts
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
