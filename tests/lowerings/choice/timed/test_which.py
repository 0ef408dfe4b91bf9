"""Which sites are timed, where, and with which values."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings.choice.timed import values, which
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.lowerings.choice.timed.values import NoValues, SiteTensors
from attn_compiler.spec.added_scores import GatheredBias, RelativeBias
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Causal, CausalFrom, Dense, Document, Formula, KeyBound, KeyPadding, MaskSpec
from attn_compiler.spec.scores import DenseBias, ScoreSpec, Sinks
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL

# Sites that a measured row speaks for are not timed, nor those whose tensors nobody can stand in for.
_B, _Q, _K = map(Index, "bqk")
H200 = Target.fake(sm=90, cudnn=91900)


def spec_of(*, seqlen: int = 256, batch: int = 4, heads: int = 8, width: int = 80, **fields: Any) -> AttentionSpec:
    shape = (batch, heads, seqlen, width)
    strides = (heads * seqlen * width, seqlen * width, width, 1)
    tensor = TensorSpec(shape=shape, strides=strides, dtype=fields.pop("dtype", "bfloat16"))
    given = {"mask": MaskSpec(), "score": ScoreSpec(scale=0.1), "device": "cuda", "out_dtype": "bfloat16"}
    return AttentionSpec(q=tensor, k=tensor, v=tensor, **(given | fields))


def test_a_short_site_is_timed_and_the_first_lowering_comes_first() -> None:
    assert which.why_not(spec_of(), H200) is None
    found = which.lowerings_for(spec_of(), H200, "sdpa_cudnn")
    assert found == ("sdpa_cudnn", "triton", "sdpa_flash", "sdpa_efficient")


def test_more_work_is_worth_slow_compilers() -> None:
    found = which.lowerings_for(spec_of(batch=64, seqlen=729), H200, "sdpa_cudnn")
    assert set(found) >= {"hopper", "cudnn"}


def test_few_queries_ask_the_kernel_for_decoding() -> None:
    q = dataclasses.replace(spec_of().q, shape=(4, 8, 1, 80), strides=(640, 80, 80, 1))
    assert "decode" in which.lowerings_for(dataclasses.replace(spec_of(), q=q), H200, "sdpa_cudnn")


def test_a_row_that_was_measured_speaks_for_its_own_shapes() -> None:
    near = spec_of(seqlen=2048, batch=8, heads=16, width=128, mask=CAUSAL)
    assert which.why_not(near, H200) == "a row was measured near it"
    # Another head dim, few elements, and a machine that nothing was measured on.
    assert which.why_not(spec_of(seqlen=2048, batch=8, heads=16, width=112, mask=CAUSAL), H200) is None
    assert which.why_not(spec_of(seqlen=2048, batch=1, heads=2, width=128, mask=CAUSAL), H200) is None
    assert which.why_not(near, Target.fake(sm=80, cudnn=91900)) is None


_SYMBOLIC = dataclasses.replace(spec_of().q, shape=(4, 8, "s0", 80))
_TABLE = (Load("index", (Index("q"), _K), "int"), Index("h"))


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(dtype="float32"),
        spec_of(lse="read"),
        spec_of(returns_weights=True),
        spec_of(score=ScoreSpec(scale=0.1, dropout_p=0.1)),
        dataclasses.replace(spec_of(), q=_SYMBOLIC),
        spec_of(mask=MaskSpec(kinds=(CausalFrom(offset=Load("length", (), "int")),))),
        spec_of(mask=MaskSpec(kinds=(KeyPadding(condition=Load("m", (_B, _K), "bool")),), out_of_reach=("m",))),
        spec_of(mask=MaskSpec(dense=Dense(shape=(4, 1, 256, 256), dtype="bfloat16"), reason="no", own_rows="model")),
        spec_of(score=ScoreSpec(scale=0.1, proved=(GatheredBias(table="t", at=_TABLE, requires_grad=True),))),
        spec_of(
            score=ScoreSpec(scale=0.1, proved=(RelativeBias(table="t", at=(_K,), distance=_K, requires_grad=True),))
        ),
        spec_of(batch=512, heads=32, seqlen=1000),
    ],
    ids=str,
)
def test_what_is_not_timed(spec: AttentionSpec) -> None:
    assert which.why_not(spec, H200)
    assert which.lowerings_for(spec, H200, "triton") == ()


def test_nothing_is_timed_without_a_gpu_of_its_own() -> None:
    for target in (Target.fake(device="cpu"), Target.fake(packaged=True), Target.fake(triton_interpreted=True)):
        assert which.why_not(spec_of(), target) == "it runs on another machine, or without a GPU"


# Real tensors lie as the fake ones, and masks leave the usual work.
CPU = torch.device("cpu")
B, H, S, D = 4, 2, 40, 16
_PAIRS = (B, 1, S, S)


def spec_of_given(mask: MaskSpec, score: ScoreSpec = ScoreSpec(scale=0.25)) -> AttentionSpec:  # noqa: B008 - frozen
    # As a projection lies: positions before heads.
    tensor = TensorSpec(shape=(B, H, S, D), strides=(S * H * D, D, H * D, 1), dtype="float32", requires_grad=True)
    return AttentionSpec(q=tensor, k=tensor, v=tensor, mask=mask, score=score, device="cpu", out_dtype="float32")


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense(*kinds: object, dtype: str = "bool") -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=_PAIRS, dtype=dtype))  # type: ignore[arg-type]


def test_operands_lie_as_the_spec_says_and_the_model_s_numbers_are_not_drawn() -> None:
    state = torch.get_rng_state()
    found = values.real(spec_of_given(MaskSpec()), SiteTensors(), CPU)
    assert torch.equal(torch.get_rng_state(), state)
    for x in (found.q, found.k, found.v):
        assert (tuple(x.shape), x.stride(), x.requires_grad) == ((B, H, S, D), (S * H * D, D, H * D, 1), True)
        assert 0.8 < float(x.detach().std()) < 1.2
    assert not torch.equal(found.q, found.k)


def test_a_repeated_axis_stays_one() -> None:
    spec = spec_of_given(MaskSpec())
    repeated = dataclasses.replace(spec.k, strides=(S * D, 0, D, 1))
    found = values.real(dataclasses.replace(spec, k=repeated), SiteTensors(), CPU)
    assert found.k.stride() == (S * D, 0, D, 1)
    assert torch.equal(found.k[:, 0], found.k[:, 1])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
@pytest.mark.parametrize("inverted", [False, True])
def test_padding_keeps_three_quarters_of_the_keys_whichever_way_round(dtype: torch.dtype, inverted: bool) -> None:
    load = Load("m", (_B, _K), "bool" if dtype == torch.bool else "int")
    condition = load if dtype == torch.bool else ix.compare("!=", load, Const(0))
    kind = KeyPadding(condition=ix.apply("not", condition) if inverted else condition)
    given = SiteTensors(mask=fake(*_PAIRS, dtype=torch.bool), loads={"m": fake(B, S, dtype=dtype)})
    found = values.real(spec_of_given(dense(kind)), given, CPU).further
    assert found.mask is not None
    kept = found.loads["m"].bool() ^ inverted
    assert kept[0].all()
    assert float(kept[-1].float().mean()) == pytest.approx(0.6, abs=0.15)
    assert torch.equal(found.mask, kept[:, None, None].expand(_PAIRS))


def test_a_mask_that_is_repeated_for_each_query_holds_each_row_of_the_batch() -> None:
    kind = KeyPadding(condition=Load("m", (_B, _K), "bool"))
    repeated = torch.empty_strided(_PAIRS, (S, S, 0, 1), dtype=torch.bool, device="meta")
    given = SiteTensors(mask=repeated, loads={"m": fake(B, S, dtype=torch.bool)})
    found = values.real(spec_of_given(dense(kind)), given, CPU).further
    assert found.mask is not None
    assert found.mask.stride() == (S, S, 0, 1)
    assert torch.equal(found.mask, found.loads["m"][:, None, None].expand(_PAIRS))


def test_numbers_of_keys_are_lengths() -> None:
    kind = KeyBound(side="last", bound=ix.add(Load("n", (_B,), "int"), Const(-1)))
    found = values.real(spec_of_given(dense(kind)), SiteTensors(loads={"n": fake(B, dtype=torch.int64)}), CPU)
    assert found.further.loads["n"].tolist() == [40, 35, 30, 25]


def test_documents_are_four_and_a_diagonal_holds_in_the_dense_mask() -> None:
    mask = dense(Causal(), Document(of_key=Load("ids", (_B, _K), "int")))
    given = SiteTensors(mask=fake(*_PAIRS, dtype=torch.bool), loads={"ids": fake(B, S, dtype=torch.int64)})
    found = values.real(spec_of_given(mask), given, CPU).further
    assert found.mask is not None
    assert found.loads["ids"][0].unique().tolist() == [0, 1, 2, 3]
    ids, at = found.loads["ids"], torch.arange(S)
    expected = (ids[:, None, :, None] == ids[:, None, None, :]) & (at[:, None] >= at)
    assert torch.equal(found.mask, expected)


def test_numbers_that_are_added_mask_where_the_kinds_do() -> None:
    given = SiteTensors(mask=fake(1, 1, S, S))
    found = values.real(spec_of_given(dense(Causal(), dtype="float32")), given, CPU).further.mask
    assert found is not None
    below = torch.ones(S, S, dtype=torch.bool).tril()
    assert bool((found[0, 0][~below] == torch.finfo(torch.float32).min).all())
    assert 0.8 < float(found[0, 0][below].std()) < 1.2


def test_biases_and_sinks_have_gradients_as_in_the_spec_and_indices_pick_each_row() -> None:
    at = (Load("index", (_Q, _K), "int"), Index("h"))
    score = ScoreSpec(
        scale=0.25,
        changes=(DenseBias(shape=(1, H, S, S), dtype="float32"), Sinks(requires_grad=True)),
        proved=(GatheredBias(table="table", at=at),),
    )
    loads = {"table": fake(9, H), "index": fake(S, S, dtype=torch.int64)}
    given = SiteTensors(mask=fake(1, H, S, S), sinks=fake(H), score_loads=loads)
    found = values.real(spec_of_given(MaskSpec(), score), given, CPU).further
    assert found.mask is not None
    assert found.sinks is not None
    assert found.mask.requires_grad
    assert found.sinks.requires_grad
    assert found.score_loads["index"].unique().tolist() == list(range(9))


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        (KeyPadding(condition=Load("m", (_B, _K), "bool")), fake(B, S + 1, dtype=torch.bool)),
        (KeyPadding(condition=Load("m", (_B, _K), "bool")), fake(B, S)),
        (KeyPadding(condition=ix.compare("<", Load("m", (_B, _K), "int"), Const(-1))), fake(B, S, dtype=torch.int64)),
        (Formula(condition=Load("m", (_B, _Q, _K), "bool")), fake(B, S, S, dtype=torch.bool)),
    ],
)
def test_what_nothing_can_stand_for(kind: KeyPadding | Formula, load: torch.Tensor) -> None:
    with pytest.raises(NoValues):
        values.real(spec_of_given(dense(kind)), SiteTensors(loads={"m": load}), CPU)


# A lowering's nodes are computed as they are made.
def test_nodes_hold_results_and_what_sites_share_is_made_once() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    x = emitter.given("x", torch.arange(3.0))
    doubled = emitter.once("doubled", lambda: emitter.call(torch.mul, x, 2))
    assert emitter.once("doubled", lambda: x) is doubled
    assert emitter.value(emitter.call(torch.cat, [x, doubled])).tolist() == [0, 1, 2, 0, 2, 4]
    assert set(x.users) == {doubled, *doubled.users}


def test_a_bool_mask_is_added_as_zero_and_minus_infinity() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    mask = emitter.given("mask", torch.tensor([True, False]))
    added = emitter.shared_mask(mask, torch.bfloat16)
    assert emitter.value(added).tolist() == [0, -torch.inf]
    assert emitter.value(added).dtype == torch.bfloat16
    assert emitter.shared_mask(mask, torch.bfloat16) is added
    assert emitter.shared_mask(added, torch.bfloat16) is added


def test_what_was_computed_is_forgotten_but_for_operands_and_what_sites_share() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    x = emitter.given("x", torch.arange(3.0))
    shared = emitter.once("shared", lambda: emitter.call(torch.mul, emitter.call(torch.add, x, 1), 2))
    emitter.call(torch.neg, emitter.call(torch.sub, shared, x))
    emitter.forget()
    assert [node.name for node in emitter.graph.nodes] == ["x", "add", "mul"]
    assert emitter.value(shared).tolist() == [2, 4, 6]


def test_tensors_that_are_let_go_need_no_collector() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    x = emitter.given("x", torch.arange(3.0))
    shared = emitter.once("shared", lambda: emitter.call(torch.mul, x, 2))
    held = [weakref.ref(emitter.value(node)) for node in (x, shared, emitter.call(torch.neg, shared))]
    gc.disable()
    try:
        assert all(ref() is not None for ref in held)
        emitter.let_go()
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_nothing_lives_from_call_to_call() -> None:
    with pytest.raises(TypeError, match="amax"):
        EagerEmitter(Target.fake(device="cpu")).buffer("amax", (1,))
