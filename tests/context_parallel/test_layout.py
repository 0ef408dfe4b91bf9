"""How a sequence is shared: descriptions, layouts, one rank, and batches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

import attn_compiler
from attn_compiler.context_parallel import ContextParallel, merge_ops as torch_merges
from attn_compiler.context_parallel.layout import Layout, joined
from attn_compiler.context_parallel.merge_ops import merged
from attn_compiler.reasons.errors import InvalidOption
from tests.meshes import fake_mesh

# Every rank's part in one process.
layouts = st.builds(Layout, size=st.integers(1, 9), balanced=st.booleans())


@pytest.mark.parametrize(
    ("balanced", "expected"),
    [
        (False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (True, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    ],
)
def test_positions_of_each_rank(balanced: bool, expected: list[list[int]]) -> None:
    layout = Layout(size=3, balanced=balanced)
    assert [layout.positions(4, rank).tolist() for rank in range(3)] == expected


@given(layout=layouts, chunk=st.integers(1, 5))
def test_each_position_is_on_one_rank(layout: Layout, chunk: int) -> None:
    length = chunk * layout.chunks
    found = torch.cat([layout.positions(length // layout.size, rank) for rank in range(layout.size)])
    assert sorted(found.tolist()) == list(range(length))
    assert found.dtype == torch.int64


@given(layout=layouts, chunk=st.integers(1, 5), dim=st.sampled_from([0, 1, 2, -1, -2]))
def test_parts_are_at_their_positions_and_give_the_whole_back(layout: Layout, chunk: int, dim: int) -> None:
    length = chunk * layout.chunks
    shape = [2, 3, 4]
    shape[dim] = length
    x = torch.randint(1 << 30, shape)
    parts = [layout.part(x, dim, rank) for rank in range(layout.size)]
    for rank, part in enumerate(parts):
        assert part.equal(x.index_select(dim, layout.positions(length // layout.size, rank)))
        assert part.is_contiguous()
    assert joined(torch.stack(parts), dim % 3, layout.chunks > layout.size).equal(x)


@given(layout=layouts, length=st.integers(1, 200))
def test_the_next_length_is_the_least_that_can_be_cut(layout: Layout, length: int) -> None:
    padded = layout.padded(length)
    fitting = [n for n in range(length, length + layout.chunks) if n % layout.chunks == 0]
    assert [padded] == fitting


@given(size=st.integers(2, 9), chunk=st.integers(1, 5))
def test_balanced_ranks_have_as_much_to_compute_under_a_causal_mask(size: int, chunk: int) -> None:
    layout = Layout(size=size, balanced=True)
    keys = {int((layout.positions(2 * chunk, rank) + 1).sum()) for rank in range(size)}
    assert len(keys) == 1


def test_it_asks_the_mesh() -> None:
    with fake_mesh(2, 4, rank=6, names=("dp", "cp")) as mesh:
        cp = attn_compiler.ContextParallel(mesh["cp"])
        assert (cp.size, cp.rank, cp.is_balanced) == (4, 2, True)
        assert cp.group_name == mesh["cp"].get_group().group_name
        # Ranks 4 to 7 share a sequence: this one has the chunks 2 and 5 of 8.
        assert cp.positions(6).tolist() == [6, 7, 8, 15, 16, 17]
        assert cp.positions(6).dtype == torch.int64


def test_one_rank_has_the_sequence_in_its_order() -> None:
    with fake_mesh(1) as mesh:
        assert not ContextParallel(mesh).is_balanced
        assert ContextParallel(mesh).positions(3).tolist() == [0, 1, 2]


def test_a_mesh_of_several_dimensions_is_refused_with_their_names() -> None:
    expected = r"of one dimension, not of 2: one of mesh\['dp'\], mesh\['cp'\]"
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh, pytest.raises(InvalidOption, match=expected):
        ContextParallel(mesh)
    with fake_mesh(2, 2) as mesh, pytest.raises(InvalidOption, match="has no named dimensions"):
        ContextParallel(mesh)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"takes a torch\.distributed\.DeviceMesh of one dimension, got 'cp'"):
        ContextParallel("cp")  # type: ignore[arg-type]


def test_a_build_without_meshes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(InvalidOption, match="this build of torch has not"):
        ContextParallel(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("method", "rings", "one of 'auto', 'all_gather', 'all_to_all', 'ring', got 'rings'"),
        ("method", None, "one of 'auto'"),
        ("load_balance", "zigzag", "one of 'auto', 'head_tail', None"),
        ("load_balance", True, "one of 'auto', 'head_tail', None"),
        ("replicated", "image", "a tuple of names of model inputs"),
        ("replicated", (1,), "a tuple of names of model inputs"),
        ("allow", torch.ops.aten.cumsum.default, "a tuple of names of ops, as 'aten.cumsum.default'"),
        ("allow", (torch.ops.aten.cumsum.default,), "a tuple of names of ops"),
        ("packed", 1, "True or False, got 1"),
        ("gather_limit", -1, "a number of bytes, 0 or more, got -1"),
        ("gather_limit", True, "a number of bytes"),
        ("gather_limit", 1e9, "a number of bytes"),
    ],
)
def test_wrong_values_are_refused_and_named(name: str, value: object, expected: str) -> None:
    with fake_mesh(2) as mesh, pytest.raises(InvalidOption, match=f"'context_parallel: {name}' takes {expected}"):
        ContextParallel(mesh, **{name: value})  # type: ignore[arg-type]


def test_the_digest_has_everything_but_the_rank() -> None:
    digests = []
    for shape, rank, extra in (
        ((2,), 0, {}),
        ((4,), 0, {}),
        ((2,), 0, {"method": "all_to_all"}),
        ((2,), 0, {"load_balance": None}),
        ((2,), 0, {"replicated": ["image"]}),
        ((2,), 0, {"allow": {"aten.cumsum.default"}}),
        ((2,), 0, {"packed": True}),
        ((2,), 0, {"gather_limit": 2**20}),
        ((2,), 0, {"method": "ring"}),
    ):
        with fake_mesh(*shape, rank=rank) as mesh:
            digests.append(ContextParallel(mesh, **extra).digest)  # type: ignore[arg-type]
    assert len(set(digests)) == len(digests)
    with fake_mesh(2, rank=1) as mesh:
        assert ContextParallel(mesh).digest == digests[0]
        assert ContextParallel(mesh, load_balance="head_tail").digest == digests[0]


def test_groups_of_the_same_shape_differ() -> None:
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        dp, cp = ContextParallel(mesh["dp"]), ContextParallel(mesh["cp"])
        assert dp.digest != cp.digest
        assert dp != cp


def test_equal_where_all_that_matters_is() -> None:
    """torch.compile compares options to see whether a backend is another one."""
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        one, same = ContextParallel(mesh["cp"]), ContextParallel(mesh["cp"], load_balance="head_tail")
        assert one == same
        assert hash(one) == hash(same)
        assert one != ContextParallel(mesh["cp"], method="all_gather")
        assert one != "cp"


def test_the_option_is_taken_and_one_rank_computes_what_it_would_without() -> None:
    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x.sin(), x.cos(), x, is_causal=True)

    x = torch.randn(2, 3, 10, 8)
    with fake_mesh(1) as mesh:
        options = {"context_parallel": ContextParallel(mesh), "inner": "aot_eager", "strict": True}
        compiled = torch.compile(attention, backend="attn_compiler", options=options, fullgraph=True)
        torch.testing.assert_close(compiled(x), attention(x))
    assert attn_compiler.reports()[-1].num_sites == 1


# What ranks send each other to merge.
SIZE = 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_outputs_and_logsumexps_travel_together(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_sinks: bool
) -> None:
    sent: list[Tensor] = []

    def parts(x: Tensor, size: int, group: str) -> Tensor:
        sent.append(x)
        return torch.stack([x * (rank + 1) for rank in range(size)])

    monkeypatch.setattr(torch_merges, "parts", parts)
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.randn(2, 4, 1, 8).to(dtype), torch.randn(2, 4, 1, dtype=wide)
    sinks = torch.randn(4) if has_sinks else None
    found = torch.ops.attn_compiler.merged_over_ranks(out, lse, sinks, SIZE, "g")
    (one,) = sent
    assert one.shape == (2, 4, 1, 9)
    assert one.dtype == wide
    assert found.dtype == dtype
    outs, lses = (torch.stack([x.to(wide) * (rank + 1) for rank in range(SIZE)]) for x in (out, lse))
    assert found.equal(merged(outs, lses, sinks).to(dtype))


# Parts of an attention, put together, are the attention over all keys.
B, H, Q, D = 2, 3, 4, 5


def _attention(scores: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """A row of -inf gives 0."""
    logits = scores if sinks is None else torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.nan_to_num(logits.softmax(-1))[..., : scores.shape[-1]]
    return weights @ v


@given(
    parts=st.integers(1, 4), seed=st.integers(0, 999), masked=st.sampled_from([0.0, 0.5, 0.95]), has_sinks=st.booleans()
)
def test_parts_are_the_whole(parts: int, seed: int, masked: float, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    scores = 30 * random(B, H, Q, 3 * parts)
    scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < masked, -math.inf)
    v, sinks = random(B, H, 3 * parts, D), 10 * random(H) if has_sinks else None
    cut = list(zip(scores.chunk(parts, -1), v.chunk(parts, 2), strict=True))
    outs = torch.stack([_attention(s, x, None) for s, x in cut])
    lses = torch.stack([s.logsumexp(-1) for s, _ in cut])
    found = merged(outs, lses, sinks)
    torch.testing.assert_close(found, _attention(scores, v, sinks), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sinks", [None, torch.zeros(H)])
def test_rows_without_keys_give_nothing(sinks: Tensor | None) -> None:
    found = merged(torch.zeros(2, B, H, Q, D), torch.full((2, B, H, Q), -math.inf), sinks)
    assert found.equal(torch.zeros(B, H, Q, D))


def test_large_sums_do_not_overflow() -> None:
    lses = torch.tensor([1e4, 1e4 + 1.0]).view(2, 1, 1, 1)
    outs = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1)
    assert merged(outs, lses).item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)


def test_the_lowest_number_counts_for_nothing_beside_another_part() -> None:
    """A model that masks by adding the lowest number of its dtype leaves a rank with such sums."""
    lses = torch.tensor([torch.finfo(torch.float32).min, 0.0]).view(2, 1, 1, 1)
    outs = torch.tensor([3.0, 1.0]).view(2, 1, 1, 1, 1)
    assert merged(outs, lses).item() == 1.0
