"""A sequence that ranks share: the attention as it was read, its parts in order, and what all ranks raise."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.context_parallel import collectives as torch_collectives, rank_sync
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.context_parallel.rank_sync import RanksDisagree
from attn_compiler.lowerings import score_changes
from attn_compiler.lowerings.shared.parts.score_changes import Form
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.spec.scores import Pointwise
from attn_compiler.verifying import first
from attn_compiler.verifying.interpreting import Noise
from attn_compiler.verifying.ranks import AsRead, Ranks, SharedCheck, WholeLoads
from attn_compiler.verifying.values import NoValueError, Values
from tests.verifying.planning import LENGTH, SHAPE, Planned, Tensor, causal, masked, planned, qkv
from tests.verifying.training import softcapped

# ---- an attention as it was read, pair by pair ----------------------------------------------------------------------

_EXACT = 1e-12
DOUBLES = qkv(dtype=torch.float64)


def _read(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, /, **changed: Any) -> AsRead:
    """What is read off the function at a length of LENGTH. q, k, v: of the attention that is computed."""
    site = planned(function, *(x[:, :, :LENGTH] for x in (q, k, v))).check("output").site
    given = {"q": q, "k": k, "v": v, "sinks": None, "positions": torch.arange(q.shape[2]), "loads": {}}
    return AsRead(site=site, spec=site.spec, values=Values(bodies={}), **{**given, "score_loads": {}, **changed})


def _of_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = torch.arange(q.shape[2])
    return (q @ k.mT * 0.3 + (count - count[:, None]).to(q.dtype) * 0.25).softmax(-1) @ v


@pytest.mark.parametrize("function", [causal, _of_flag, softcapped, _distance, _shared_heads])
def test_it_is_the_model_s_own(function: Callable[..., Tensor]) -> None:
    """Of all queries, or of some queries of a longer sequence."""
    for length, mine in ((LENGTH, torch.arange(LENGTH)), (2 * LENGTH, torch.tensor([3, 4, 5, 11, 10, 0]))):
        kv_heads = 2 if function is _shared_heads else None
        q, k, v = qkv(dtype=torch.float64, shape=(2, 4, length, 8), kv_heads=kv_heads)
        found = _read(function, q, k, v, q=q[:, :, mine], positions=mine)
        assert (found.run() - function(q, k, v)[:, :, mine]).abs().max() < _EXACT
        assert bool(found.rows().all())


class _Halved(Pointwise):
    """s -> s / 2"""

    number = 2.0


def test_a_change_of_any_kind_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form(name="halved", apply=lambda call, x, by: call(torch.div, x, by), slope=lambda x, by: x)
    monkeypatch.setitem(score_changes.FORMS, _Halved, form)
    plain = _read(_distance, *DOUBLES)
    halved = dataclasses.replace(plain.spec, score=dataclasses.replace(plain.spec.score, changes=(_Halved(),)))
    found = dataclasses.replace(plain, spec=halved)
    assert (found.run() - _distance(DOUBLES[0] / 2, *DOUBLES[1:])).abs().max() < _EXACT
    assert (found.run() - plain.run()).abs().max() > _EXACT


def test_rows_without_keys_and_sinks() -> None:
    found = _read(causal, *DOUBLES, positions=torch.arange(LENGTH) - 1)
    assert not bool(found.run()[:, :, 0].any())
    assert found.rows()[0, 0, :, 0].tolist() == [False, *[True] * (LENGTH - 1)]
    q, k, v = DOUBLES
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    wanted = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)), -1).softmax(-1)[..., :-1] @ v
    assert (_read(causal, q, k, v, sinks=sinks).run() - wanted).abs().max() < _EXACT


def test_the_steps_are_rounded_as_the_model_s_are_and_not_where_a_dtype_is_given() -> None:
    inputs = qkv(dtype=torch.bfloat16)
    read, wanted = _read(causal, *inputs), causal(*(x.double() for x in inputs))
    assert read.run().dtype == torch.bfloat16
    assert (read.run(torch.float64) - wanted).abs().max() < _EXACT
    assert 1e-4 < float((read.run().double() - wanted).abs().max()) < 5e-2
    assert 1e-4 < float((read.run(torch.float64, Noise(seed=0)) - wanted).abs().max()) < 0.2


# ---- one rank that has the whole sequence ---------------------------------------------------------------------------

MASK = torch.tensor([[1] * LENGTH, [0, *[1] * (LENGTH - 1)]])


class _Alone(Ranks):
    """A rank that has all positions."""

    def meet(self, subject: str) -> None:
        assert subject.startswith("the attention of")

    def whole(self, x: Tensor, axis: int) -> Tensor:
        return x


class _Reversed(_Alone):
    """What the rank has of keys, values and masks is put together the wrong way; but for q, which stays."""

    def whole(self, x: Tensor, axis: int) -> Tensor:
        return x.flip(axis) if x.is_floating_point() else x


class _Quarters(_Alone):
    def whole(self, x: Tensor, axis: int) -> Tensor:
        return torch.full_like(x, 0.25) if x.is_floating_point() else x


def _shared(ranks: type[Ranks], *, scale: float = 1.0, filled: bool = False) -> Planned:
    """filled: the rewritten graph gives 0.25."""
    found = planned(masked, *qkv(), MASK)
    check, nodes = found.check("output"), {node.name: node for node in found.plan.module.graph.nodes}
    (mask,) = (name for name in nodes if "attention_mask" in name)
    spec, new_out = check.site.spec, check.new_out
    if filled:
        with new_out.graph.inserting_after(new_out):
            new_out = new_out.graph.call_function(torch.full_like, (new_out, 0.25))
    shared = SharedCheck(
        site=check.site,
        body=check.body,
        new_out=new_out,
        spec=dataclasses.replace(spec, score=dataclasses.replace(spec.score, scale=scale * spec.score.scale)),
        whole=WholeLoads(body=check.body, nodes=nodes, axes={mask: 1}),
        ranks=ranks(layout=Layout(size=1, balanced=False), rank=0, group=""),
    )
    found.plan.checks[found.plan.checks.index(check)] = shared
    shared.find_needs(Values(bodies=found.plan.mirrors))
    return found


def test_a_rank_with_the_whole_sequence_holds() -> None:
    output = _shared(_Alone).run("output")
    assert output.skipped is None
    assert output.elements == SHAPE[0] * SHAPE[1] * LENGTH * SHAPE[3]


def test_what_comes_after_goes_on_with_the_attention_over_the_whole_sequence() -> None:
    found = _shared(_Quarters, filled=True)
    (out,) = first.run_checks(found.plan, found.args).ran.outs
    assert torch.allclose(out, torch.full(SHAPE, 0.25))


@pytest.mark.parametrize(
    ("ranks", "scale", "what"),
    [(_Reversed, 1.0, "output of sdpa_cpu_flash over the whole sequence"), (_Alone, 2.0, "attention as it was read")],
)
def test_keys_in_another_order_and_what_was_misread(ranks: type[Ranks], scale: float, what: str) -> None:
    error = _shared(ranks, scale=scale).mismatch()
    assert error.what == what
    assert "attention_mask" in error.formula


# ---- ranks ----------------------------------------------------------------------------------------------------------


def _ranks(*, balanced: bool = False, rank: int = 0, beside: tuple[str, ...] = ()) -> Ranks:
    return Ranks(layout=Layout(size=3, balanced=balanced), rank=rank, group="of nobody", beside=beside)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("balanced", [False, True])
def test_parts_come_back_in_the_order_of_the_sequence(
    monkeypatch: pytest.MonkeyPatch, balanced: bool, axis: int, dtype: torch.dtype
) -> None:
    ranks, shape = _ranks(balanced=balanced), [2, 3, 4]
    shape[axis] = 12
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    parts = [ranks.layout.part(whole, axis, rank) for rank in range(3)]
    monkeypatch.setattr(torch_collectives, "parts", lambda x, size, group: torch.stack(parts))
    found = ranks.whole(parts[0], axis)
    assert found.dtype == dtype
    assert torch.equal(found, whole)


TEXTS = {"formula": "k <= q", "expected": "1", "observed": "2", "allowed": "0", "differing": "1 of 2"}
NOBODY = "[]"


def _raise(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, answers: Mapping[str, list[str]], *found: tuple[int, str]
) -> str:
    """What a rank says of what it found, where the ranks of each group answer."""
    said: list[str] = []
    monkeypatch.setattr(rank_sync, "answers", lambda group, _, text, **__: said.append(text) or answers[group])
    ranks.raise_first(
        [(place, VerificationMismatch(site="layers.0", what=what, index="[0, 1]", **TEXTS)) for place, what in found]
    )
    return said[0]


def _said(monkeypatch: pytest.MonkeyPatch, rank: int, *found: tuple[int, str]) -> str:
    return _raise(monkeypatch, _ranks(rank=rank), {"of nobody": [NOBODY]}, *found)


def test_the_first_check_of_the_lowest_rank_is_what_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(_said(monkeypatch, 0)) == []
    answers = [NOBODY, _said(monkeypatch, 1, (3, "c"), (1, "b")), _said(monkeypatch, 2, (1, "d"))]
    with pytest.raises(VerificationMismatch, match="compile without context_parallel") as error:
        _raise(monkeypatch, _ranks(), {"of nobody": answers})
    assert (error.value.what, error.value.index) == ("b", "[0, 1] on rank 1")
    notes = ["also: the d at layers.0, [0, 1] on rank 2", "also: the c at layers.0, [0, 1] on rank 1"]
    assert error.value.__notes__ == notes
    by_group = {"of nobody": [NOBODY, NOBODY], "heads": [NOBODY, _said(monkeypatch, 1, (2, "e"))]}
    with pytest.raises(VerificationMismatch, match="the e is not"):
        _raise(monkeypatch, _ranks(beside=("heads",)), by_group)


def test_a_rank_whose_check_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RanksDisagree, match="rank 1: failed: MemoryError"):
        _raise(monkeypatch, _ranks(), {"of nobody": [NOBODY, "failed: MemoryError"]})


def test_what_another_rank_failed_by_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(rank_sync, "send", lambda group, text: said.append(f"{group}: {text}"))
    _ranks(beside=("heads",)).failed(RanksDisagree("rank 1: failed"))
    # Those that share heads did not meet that rank.
    assert [text.split(":")[0] for text in said] == ["heads"]
    _ranks(beside=("heads",)).failed(MemoryError("none left"))
    assert [text.split(":")[0] for text in said[1:]] == ["of nobody", "heads"]
    assert all("none left" in text for text in said[1:])


# ---- what masks load, of the whole sequence -------------------------------------------------------------------------

BEGINS = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0]])
AFTER = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1]])
TABLE = torch.tensor([3, 4])


class _Two(Ranks):
    """Rank 0 of two; the other one has AFTER."""

    def whole(self, x: Tensor, axis: int) -> Tensor:
        assert torch.equal(x, BEGINS)
        return torch.cat((x, AFTER), axis)


def _documents(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, table: Tensor) -> Tensor:
    documents = begins.cumsum(-1)
    return F.scaled_dot_product_attention(q, k, v, documents[:, None, :, None] == documents[:, None, None])


def _first_keys(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, table: Tensor) -> Tensor:
    kept = torch.arange(LENGTH) <= table[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, kept) * begins.sum()


def _whole_load(function: Callable[..., Tensor], *, known: bool = True) -> Tensor:
    """known: the nodes of the model's own graph."""
    found = planned(function, *qkv(), BEGINS, TABLE)
    check = found.check("output")
    nodes = {node.name: node for node in found.plan.module.graph.nodes if known}
    whole = WholeLoads(body=check.body, nodes=nodes, axes={name: 1 for name in nodes if "begins" in name})
    values = Values(bodies=found.plan.mirrors)
    (version,) = (check.site.loads[name] for name in check.site.condition.facts.tensors)
    inputs = dict(zip(found.plan.inputs, found.args, strict=True))
    ranks = _Two(layout=Layout(size=2, balanced=False), rank=0, group="")
    for key in values.needs(lambda asked: whole.value(version, asked, ranks)):
        values.recorded[key] = next((x for name, x in inputs.items() if name in key.name), TABLE)
    return whole.value(version, values, ranks)


def test_loads_are_those_of_the_whole_sequence() -> None:
    """Sums along it go on from one rank to the next. What every rank has is taken as it is."""
    assert torch.equal(_whole_load(_documents), torch.cat((BEGINS, AFTER), 1).cumsum(-1))
    assert _whole_load(_first_keys).tolist() == [3, 4]
    with pytest.raises(NoValueError, match="not in the model's own graph"):
        _whole_load(_documents, known=False)
