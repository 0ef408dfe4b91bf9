"""Real tensors lie as the fake ones, and masks leave the usual work."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings.choice.timed import values
from attn_compiler.lowerings.choice.timed.values import NoValues, SiteTensors
from attn_compiler.spec.added_scores import GatheredBias
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Causal, Dense, Document, Formula, KeyBound, KeyPadding, MaskSpec
from attn_compiler.spec.scores import DenseBias, ScoreSpec, Sinks

CPU = torch.device("cpu")
B, H, S, D = 4, 2, 40, 16
_B, _Q, _K = map(Index, "bqk")
_PAIRS = (B, 1, S, S)


def spec_of(mask: MaskSpec, score: ScoreSpec = ScoreSpec(scale=0.25)) -> AttentionSpec:  # noqa: B008 - frozen
    # As a projection lies: positions before heads.
    tensor = TensorSpec(shape=(B, H, S, D), strides=(S * H * D, D, H * D, 1), dtype="float32", requires_grad=True)
    return AttentionSpec(q=tensor, k=tensor, v=tensor, mask=mask, score=score, device="cpu", out_dtype="float32")


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense(*kinds: object, dtype: str = "bool") -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=_PAIRS, dtype=dtype))  # type: ignore[arg-type]


def test_operands_lie_as_the_spec_says_and_the_model_s_numbers_are_not_drawn() -> None:
    state = torch.get_rng_state()
    found = values.real(spec_of(MaskSpec()), SiteTensors(), CPU)
    assert torch.equal(torch.get_rng_state(), state)
    for x in (found.q, found.k, found.v):
        assert (tuple(x.shape), x.stride(), x.requires_grad) == ((B, H, S, D), (S * H * D, D, H * D, 1), True)
        assert 0.8 < float(x.detach().std()) < 1.2
    assert not torch.equal(found.q, found.k)


def test_a_repeated_axis_stays_one() -> None:
    spec = spec_of(MaskSpec())
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
    found = values.real(spec_of(dense(kind)), given, CPU).further
    assert found.mask is not None
    kept = found.loads["m"].bool() ^ inverted
    assert kept[0].all()
    assert float(kept[-1].float().mean()) == pytest.approx(0.6, abs=0.15)
    assert torch.equal(found.mask, kept[:, None, None].expand(_PAIRS))


def test_a_mask_that_is_repeated_for_each_query_holds_each_row_of_the_batch() -> None:
    kind = KeyPadding(condition=Load("m", (_B, _K), "bool"))
    repeated = torch.empty_strided(_PAIRS, (S, S, 0, 1), dtype=torch.bool, device="meta")
    given = SiteTensors(mask=repeated, loads={"m": fake(B, S, dtype=torch.bool)})
    found = values.real(spec_of(dense(kind)), given, CPU).further
    assert found.mask is not None
    assert found.mask.stride() == (S, S, 0, 1)
    assert torch.equal(found.mask, found.loads["m"][:, None, None].expand(_PAIRS))


def test_numbers_of_keys_are_lengths() -> None:
    kind = KeyBound(side="last", bound=ix.add(Load("n", (_B,), "int"), Const(-1)))
    found = values.real(spec_of(dense(kind)), SiteTensors(loads={"n": fake(B, dtype=torch.int64)}), CPU)
    assert found.further.loads["n"].tolist() == [40, 35, 30, 25]


def test_documents_are_four_and_a_diagonal_holds_in_the_dense_mask() -> None:
    mask = dense(Causal(), Document(of_key=Load("ids", (_B, _K), "int")))
    given = SiteTensors(mask=fake(*_PAIRS, dtype=torch.bool), loads={"ids": fake(B, S, dtype=torch.int64)})
    found = values.real(spec_of(mask), given, CPU).further
    assert found.mask is not None
    assert found.loads["ids"][0].unique().tolist() == [0, 1, 2, 3]
    ids, at = found.loads["ids"], torch.arange(S)
    expected = (ids[:, None, :, None] == ids[:, None, None, :]) & (at[:, None] >= at)
    assert torch.equal(found.mask, expected)


def test_numbers_that_are_added_mask_where_the_kinds_do() -> None:
    given = SiteTensors(mask=fake(1, 1, S, S))
    found = values.real(spec_of(dense(Causal(), dtype="float32")), given, CPU).further.mask
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
    found = values.real(spec_of(MaskSpec(), score), given, CPU).further
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
        values.real(spec_of(dense(kind)), SiteTensors(loads={"m": load}), CPU)
