"""An attention as it was read, pair by pair, is the model's own; at other positions it is that of those positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.lowerings import score_changes
from attn_compiler.lowerings.shared.parts.score_changes import Form
from attn_compiler.spec.scores import Pointwise
from attn_compiler.verifying.as_read import AsRead
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.values import Values
from tests.verifying.planning import LENGTH, Tensor, causal, planned, qkv

_EXACT = 1e-12


def _read(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, /, **changed: Any) -> AsRead:
    """What is read off the function at a length of LENGTH. q, k, v: of the attention that is computed."""
    own = [x[:, :, :LENGTH] for x in (q, k, v)]
    site = planned(function, *own).check("output").site
    assert site.spec is not None
    return AsRead(
        **{
            "site": site,
            "spec": site.spec,
            "values": Values(bodies={}),
            "q": q,
            "k": k,
            "v": v,
            "sinks": None,
            "positions": torch.arange(q.shape[2]),
            "loads": {},
            "score_loads": {},
            **changed,
        }
    )


def _softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = torch.arange(q.shape[2])
    scores = torch.tanh(q @ k.mT * 0.3 / 2.0) * 2.0
    return scores.masked_fill(count > count[:, None], -torch.inf).softmax(-1) @ v


def _of_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = torch.arange(q.shape[2])
    bias = (count - count[:, None]).to(q.dtype) * 0.25
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


@pytest.mark.parametrize("function", [causal, _of_flag, _softcap, _distance, _shared_heads])
def test_it_is_the_model_s_own(function: Callable[..., Tensor]) -> None:
    q, k, v = qkv(dtype=torch.float64)
    k, v = (x[:, :2].contiguous() if function is _shared_heads else x for x in (k, v))
    found = _read(function, q, k, v)
    assert (found.run() - function(q, k, v)).abs().max() < _EXACT
    assert bool(found.rows().all())


class _Halved(Pointwise):
    """s -> s / 2"""

    number = 2.0


def test_a_change_of_any_kind_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form(name="halved", apply=lambda call, x, by: call(torch.div, x, by), slope=lambda x, by: x)
    monkeypatch.setitem(score_changes.FORMS, _Halved, form)
    q, k, v = qkv(dtype=torch.float64)
    plain = _read(_distance, q, k, v)
    halved = dataclasses.replace(plain.spec, score=dataclasses.replace(plain.spec.score, changes=(_Halved(),)))
    found = dataclasses.replace(plain, spec=halved)
    assert (found.run() - _distance(q / 2, k, v)).abs().max() < _EXACT
    assert (found.run() - plain.run()).abs().max() > _EXACT


@pytest.mark.parametrize("function", [causal, _of_flag, _softcap, _distance])
def test_some_queries_of_a_longer_sequence(function: Callable[..., Tensor]) -> None:
    q, k, v = qkv(dtype=torch.float64, shape=(2, 4, 2 * LENGTH, 8))
    mine = torch.tensor([3, 4, 5, 11, 10, 0])
    found = _read(function, q, k, v, q=q[:, :, mine], positions=mine)
    assert (found.run() - function(q, k, v)[:, :, mine]).abs().max() < _EXACT


def test_a_row_without_keys_is_zero_and_counts_for_nothing() -> None:
    q, k, v = qkv(dtype=torch.float64)
    found = _read(causal, q, k, v, positions=torch.arange(LENGTH) - 1)
    assert not bool(found.run()[:, :, 0].any())
    assert found.rows()[0, 0, :, 0].tolist() == [False, *[True] * (LENGTH - 1)]


def test_sinks_take_their_share() -> None:
    q, k, v = qkv(dtype=torch.float64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    found = _read(causal, q, k, v, sinks=sinks).run()
    count = torch.arange(LENGTH)
    scores = (q @ k.mT / 8**0.5).masked_fill(count > count[:, None], -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)
    wanted = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
    assert (found - wanted).abs().max() < _EXACT


def test_the_steps_are_rounded_as_the_model_s_are_and_not_where_a_dtype_is_given() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    read = _read(causal, q, k, v)
    wanted = causal(*(x.double() for x in (q, k, v)))
    assert read.run().dtype == torch.bfloat16
    assert (read.run(torch.float64) - wanted).abs().max() < _EXACT
    off = float((read.run().double() - wanted).abs().max())
    assert 1e-4 < off < 5e-2
    noisy = read.run(torch.float64, Noise(seed=0))
    assert 1e-4 < float((noisy - wanted).abs().max()) < 0.2
