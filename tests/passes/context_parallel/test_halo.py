"""Which masks leave a rank with a halo, how wide it is, and what a rank's attention is made of then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attn_compiler import index_expr as ix
from attn_compiler.context_parallel import collectives as torch_collectives, halo_ops as torch_halos
from attn_compiler.context_parallel.halo import Halo
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.passes.context_parallel import halo
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.graph import bodies
from attn_compiler.passes.graph.calls import target_name
from tests.lowerings.emitting import GraphEmitter
from tests.passes.context_parallel.compiled import LENGTH, Data, Model, compile_and_run, kept_graphs

Q, K = Index("q"), Index("k")
CAUSAL = ix.compare("<=", K, Q)


def _back(n: int) -> Expr:
    return ix.compare(">=", ix.add(K, Const(n)), Q)


def _ahead(n: int) -> Expr:
    return ix.compare("<=", K, ix.add(Q, Const(n)))


def _chunks(size: int, start: int = 0) -> Expr:
    return ix.compare("==", *(ix.apply("floordiv", ix.add(x, Const(-start)), Const(size)) for x in (Q, K)))


def _and(*parts: Expr) -> Expr:
    return ix.apply("and", *parts)


def _layout(size: int, is_balanced: bool) -> GraphLayout:
    return GraphLayout(size=size, group="g", is_balanced=is_balanced)


_DOCUMENT = ix.compare("==", *(Load("document", (x,), "int") for x in (Q, K)))
_TWO_WINDOWS = ix.apply("or", _and(CAUSAL, _back(9)), _and(_back(2), _ahead(3)))
_OR_FIRST = ix.apply("or", _and(CAUSAL, _back(9)), _and(CAUSAL, ix.compare("<=", K, Const(3))))


@pytest.mark.parametrize(
    ("allowed", "size", "is_balanced", "length", "expected"),
    [
        (_and(CAUSAL, _back(9)), 2, False, 32, (9, 0, 32)),
        (_and(CAUSAL, _back(9)), 2, True, 32, (9, 0, 16)),
        (_and(_ahead(4), _back(9)), 4, False, 32, (9, 4, 32)),
        (_and(CAUSAL, _back(9), _DOCUMENT), 2, False, 32, (9, 0, 32)),
        (_TWO_WINDOWS, 2, False, 32, (9, 3, 32)),
        # Narrower than what is between: 33 positions reach a chunk that is not next to it.
        (_and(CAUSAL, _back(33)), 4, False, 32, (33, 0, 32)),
        # Chunks of 24 from 0 on begin 8 or 16 before those of ranks.
        (_and(CAUSAL, _chunks(24)), 4, False, 32, (16, 0, 32)),
        (_chunks(24), 4, False, 32, (16, 16, 32)),
        (_chunks(16), 2, False, 32, (0, 0, 32)),
        (_chunks(16, 3), 2, False, 32, (13, 3, 32)),
        # No less than everything:
        (CAUSAL, 2, False, 32, None),
        (CAUSAL, 4, True, 32, None),
        (ix.TRUE, 4, False, 32, None),
        (_DOCUMENT, 4, False, 32, None),
        (_OR_FIRST, 2, False, 32, None),
        (_back(9), 2, False, 32, None),
        (_and(CAUSAL, _back(31)), 2, False, 32, (31, 0, 32)),
        (_and(CAUSAL, _back(32)), 2, False, 32, None),
        (_and(CAUSAL, _back(15)), 2, True, 32, (15, 0, 16)),
        (_and(CAUSAL, _back(16)), 2, True, 32, None),
        (_and(_ahead(20), _back(20)), 2, False, 32, None),
        # Of a number that is known at run time alone nothing follows.
        (_and(CAUSAL, ix.compare(">=", ix.add(K, Load("width", (), "int")), Q)), 2, False, 32, None),
    ],
)
def test_a_halo_is_taken_where_it_is_less_than_everything(
    allowed: Expr, size: int, is_balanced: bool, length: int, expected: tuple[int, int, int] | None
) -> None:
    found = halo.found(allowed, length, _layout(size, is_balanced))
    assert found == (None if expected is None else Halo(left=expected[0], right=expected[1], chunk=expected[2]))


_PARTS = [
    st.builds(_back, st.integers(0, 12)),
    st.builds(_ahead, st.integers(0, 12)),
    st.builds(_chunks, st.integers(1, 12), st.integers(0, 5)),
    st.just(CAUSAL),
]
_ALL_OF = st.lists(st.one_of(_PARTS), min_size=1, max_size=3).map(lambda parts: _and(*parts))
_CONDITIONS = st.lists(_ALL_OF, min_size=1, max_size=2).map(lambda parts: ix.apply("or", *parts))


def _pairs(allowed: Expr, whole: int) -> Tensor:
    found = [[bool(ix.evaluate(allowed, {"q": q, "k": k}, None)) for k in range(whole)] for q in range(whole)]  # type: ignore[arg-type]
    return torch.tensor(found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    allowed=_CONDITIONS, size=st.integers(2, 4), is_balanced=st.booleans(), chunk=st.integers(1, 6), wide=st.booleans()
)
def test_ranks_with_their_halos_compute_the_attention_of_the_whole_sequence(
    monkeypatch: pytest.MonkeyPatch, allowed: Expr, size: int, is_balanced: bool, chunk: int, wide: bool
) -> None:
    """Every rank in one process, with what it would be sent."""
    layout, lay = _layout(size, is_balanced), Layout(size=size, balanced=is_balanced)
    length = chunk * lay.chunks // size
    near = halo.found(allowed, length, layout)
    if near is None:
        return
    whole = length * size
    pairs = _pairs(allowed, whole)
    q, k, v = (torch.randn(2, 1, whole, n, dtype=torch.float64) for n in (4, 4, 3 if wide else 4))
    v = v if not wide else v.float()
    expected = scaled_dot_product_attention(q, k, v.double(), attn_mask=pairs)
    for rank in range(size):
        chunks = lay.chunks_of(rank)

        def come(ends: Tensor, left: int, right: int, n: int, *lies: Any, chunks: Any = chunks) -> Tensor:
            both = {8: torch.cat((k, v.double()), 3), 4: k, 3: v}[ends.shape[-1]]
            around = torch.nn.functional.pad(both, (0, 0, left, right))
            parts = [around[:, :, i * n : i * n + left + n + right] for i in chunks]
            return torch.stack([torch.cat((x[:, :, :left], x[:, :, left + n :]), 2) for x in parts], 2).to(ends.dtype)

        monkeypatch.setattr(torch_halos, "halo", come)
        monkeypatch.setattr(torch_collectives, "rank_of", lambda group, rank=rank: rank)
        builder = GraphEmitter(fx.Graph())
        nodes = []
        for x in (q, k, v):
            node = builder.graph.placeholder("x")
            node.meta["example_value"] = lay.part(x, 2, rank)
            nodes.append(node)
        met = halo.meet(builder, layout, near, *nodes)  # type: ignore[arg-type]
        assert met.places is not None
        value = builder.value
        rows, at, keys = (value(x) for x in (met.places.b, met.places.q, met.places.k))
        assert rows.flatten().tolist() == [b for b in range(2) for _ in range(len(chunks))]
        mask = pairs[at, keys.clamp(0, whole - 1)]
        if met.places.inside is not None:
            mask = mask & value(met.places.inside)
        out = scaled_dot_product_attention(value(met.q), value(met.k), value(met.v).double(), attn_mask=mask)
        node = builder.graph.placeholder("out")
        node.meta["example_value"] = out
        found = value(halo.unfolded(builder, layout, node))  # type: ignore[arg-type]
        torch.testing.assert_close(found, lay.part(expected, 2, rank))


# ---- graphs --------------------------------------------------------------------------------------------------------------


def _graph(monkeypatch: pytest.MonkeyPatch, attend: Any, **given: Any) -> fx.GraphModule:
    graphs = kept_graphs(monkeypatch)
    # The other rank is not there to send.
    monkeypatch.setattr(torch_halos, "sent_and_received", lambda x, sent, received, group: x.new_zeros(sum(received)))
    compile_and_run(attend=attend, **given)
    return graphs[0]


def _names(gm: fx.GraphModule) -> list[str]:
    return [target_name(node) for node in gm.graph.nodes]


def _windowed(model: Model, q: Tensor, k: Tensor, v: Tensor, data: Data) -> Tensor:
    at = torch.arange(LENGTH)
    apart = at[:, None] - at
    return scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < 5))


def _alternating(model: Model, q: Tensor, k: Tensor, v: Tensor, data: Data) -> Tensor:
    near = _windowed(model, q, k, v, data)
    far = scaled_dot_product_attention(near, k, v, is_causal=True)
    return _windowed(model, far, k, v, data)


@pytest.mark.parametrize("order", [None, "head_tail"])
def test_one_exchange_brings_the_halo_of_keys_and_values(monkeypatch: pytest.MonkeyPatch, order: Any) -> None:
    names = _names(_graph(monkeypatch, _windowed, method="all_gather", load_balance=order))
    assert names.count("halo") == 1
    assert "gathered_sequence" not in names


def test_windows_have_their_halo_and_other_attentions_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = _graph(monkeypatch, _alternating, method="all_gather")
    assert _names(gm).count("halo") == 2
    assert _names(gm).count("gathered_sequence") == 1
    # Where pairs stand is worked out once for all windows.
    assert _names(gm).count("sequence_rank") == 1


def test_a_halo_in_a_checkpoint_comes_again_where_the_checkpoint_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(model: Model, q: Tensor, k: Tensor, v: Tensor, data: Data) -> Tensor:
        found: Tensor = checkpoint(lambda *x: _windowed(model, *x, data), q, k, v, use_reentrant=False)
        return found

    gm = _graph(monkeypatch, attend, method="all_gather")
    (call,) = [node for node in gm.graph.nodes if bodies.is_higher_order(node)]
    (body,) = bodies.bodies(call)
    assert "halo" in _names(body)
    assert "halo" not in _names(gm)
    assert "sequence_rank" in _names(gm)
