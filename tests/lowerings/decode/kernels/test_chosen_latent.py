"""Many queries over chosen keys of a latent, in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.decode import chosen_launch
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule
from attn_compiler.spec.attention import AttentionSpec, LatentSpec, TensorSpec
from tests.lowerings.specs import make_spec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on a CPU")

BATCH, HEADS, QUERIES, KEYS, CHOSEN = 2, 5, 7, 45, 19


def _text(rank: int, rope: int, heads: int = HEADS, scale: float = 0.3) -> str:
    def of(width: int) -> TensorSpec:
        return TensorSpec(
            shape=(BATCH, 1, KEYS, width), strides=(KEYS * width, KEYS * width, width, 1), dtype="float32"
        )

    spec: AttentionSpec = make_spec(batch=BATCH, heads=heads, seqlen_q=QUERIES, seqlen_kv=KEYS, needs_grad=False)
    latent = LatentSpec(latent=of(rank), rope=of(rope) if rope else None, nope=16, nope_first=True)
    spec = dataclasses.replace(spec, latent=latent, score=dataclasses.replace(spec.score, scale=scale))
    schedule = Schedule(keys=16, warps=4, stages=1, rows=16, programs=1, least_keys=16)
    return DecodeCall(spec=spec, schedule=schedule, of_latent=True).to_text()


def _given(rank: int, rope: int, *, heads: int = HEADS, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    # In the strides of a model that has queries before heads, and of a latent that is a part of something.
    q = torch.randn(BATCH, QUERIES, heads, rank + rope, generator=draw).transpose(1, 2)
    both = torch.randn(BATCH, 1, KEYS, rank + rope, generator=draw)
    keys = torch.rand(BATCH * QUERIES, KEYS, generator=draw).topk(CHOSEN, -1).indices
    return {"q": q, "latent": both[..., :rank], "rope": both[..., rank:] if rope else None, "keys": keys}


def _run(given: dict[str, Any], counts: Tensor | None, text: str) -> tuple[Tensor, Tensor]:
    further = [x for x in (given["rope"], given["keys"], counts) if x is not None]
    return chosen_launch.forward(given["q"], given["latent"], given["latent"], further, text)


def _right(given: dict[str, Any], counts: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """One query after another, over its keys alone."""
    q, latent = given["q"].double(), given["latent"].double()
    k = latent if given["rope"] is None else torch.cat([latent, given["rope"].double()], -1)
    out, lse = torch.zeros(*q.shape[:3], latent.shape[-1]).double(), torch.full(q.shape[:3], -torch.inf).double()
    for row, keys in enumerate(given["keys"]):
        batch, query = row // QUERIES, row % QUERIES
        used = keys if counts is None else keys[counts[row]]
        used = used[(used >= 0) & (used < KEYS)]
        if used.numel():
            scores = q[batch, :, query] @ k[batch, 0, used].T * scale
            out[batch, :, query] = scores.softmax(-1) @ latent[batch, 0, used]
            lse[batch, :, query] = scores.logsumexp(-1)
    return out, lse


def _first_of_each(keys: Tensor) -> Tensor:
    return torch.stack([torch.tensor([x not in row[:i] for i, x in enumerate(row)]) for row in keys.tolist()])


def _assert_right(given: dict[str, Any], counts: Tensor | None, *, rank: int, rope: int, heads: int = HEADS) -> None:
    found, lse = _run(given, counts, _text(rank, rope, heads))
    right, right_lse = _right(given, counts, 0.3)
    assert found.dtype == given["q"].dtype
    torch.testing.assert_close(found.double(), right, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("rank", "rope"), [(32, 16), (24, 8), (32, 0), (20, 4)])
def test_every_key_that_is_named(rank: int, rope: int) -> None:
    _assert_right(_given(rank, rope), None, rank=rank, rope=rope)


@pytest.mark.parametrize("heads", [1, 16, 21])
def test_any_number_of_heads(heads: int) -> None:
    _assert_right(_given(32, 16, heads=heads, seed=1), None, rank=32, rope=16, heads=heads)


def test_a_causal_mask_beside_the_choice() -> None:
    """Keys behind the query do not count: those of the first queries have few that do, and one has none."""
    given = _given(32, 16, seed=2)
    given["keys"][0] = torch.arange(20, 20 + CHOSEN)
    counts = given["keys"] <= torch.arange(QUERIES).repeat(BATCH)[:, None] * 3
    assert not counts[0].any()
    _assert_right(given, counts, rank=32, rope=16)


def test_a_number_that_stands_in_a_row_twice_counts_once() -> None:
    given = _given(32, 16, seed=3)
    given["keys"] = given["keys"] // 3
    counts = _first_of_each(given["keys"])
    assert not counts.all()
    _assert_right(given, counts, rank=32, rope=16)


def test_numbers_that_name_no_key() -> None:
    given = _given(32, 16, seed=4)
    given["keys"][:, ::3] = KEYS
    given["keys"][3] = -1
    _assert_right(given, None, rank=32, rope=16)


def test_what_does_not_count_is_not_read() -> None:
    given = _given(32, 16, seed=5)
    counts = given["keys"] % 2 == 0
    clean = _run(given, counts, _text(32, 16))
    for name in ("latent", "rope"):
        given[name] = given[name].clone()
        given[name][:, :, 1::2] = torch.nan
    for mine, right in zip(_run(given, counts, _text(32, 16)), clean, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


def test_its_definition_is_the_same() -> None:
    given = _given(32, 16, seed=6)
    counts = given["keys"] % 3 != 0
    asked = chosen_launch.Given(
        q=given["q"], latent=given["latent"], rope=given["rope"], keys=given["keys"], counts=counts
    )
    for mine, right in zip(chosen_launch.by_definition_of(asked, 0.3), _right(given, counts, 0.3), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=3e-6)
