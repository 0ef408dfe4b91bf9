"""Sites that ranks share: as sites, whole, and in bands."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.functional import dropout, scaled_dot_product_attention

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.passes.context_parallel import sites
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.graph.site import Keyless
from attn_compiler.passes.recovering import kinds
from attn_compiler.reasons.errors import ContextParallelUnsupported
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import Sinks, Softcap, Unusual
from attn_compiler.spec.target import Target
from tests.distributed import processes
from tests.lowerings.specs import CAUSAL, bias, make_spec
from tests.passes.context_parallel import decoded
from tests.passes.context_parallel.compiled import BATCH, LENGTH, WIDTH, Attend, Data, Model, compile_and_run, positions
from tests.passes.context_parallel.decoded import KEPT, RIGHT, Found
from tests.thinned import asked_for, further

# What can't be told, or done, of an attention over the whole sequence.

#: the first query alone has keys
SHUT_OUT = Keyless(allowed=ix.compare("<=", Index("q"), ix.ZERO), highest=-1e9)


def _site(**changed: Any) -> Any:
    scores, axes = SimpleNamespace(limits=changed.pop("limits", ())), SimpleNamespace(query=())
    match = SimpleNamespace(out="out", scores=scores, axes=axes)
    return SimpleNamespace(match=match, keyless=changed.pop("keyless", None))


def test_numbers_of_which_the_highest_count_are_refused() -> None:
    spec = make_spec()
    spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, by_highest=True))
    with pytest.raises(CannotShard) as caught:
        sites.check_shareable(_site(), spec)
    assert "the highest count" in caught.value.reason.observed


@pytest.mark.parametrize(
    "spec", [{}, {"mask": CAUSAL}, {"changes": (Softcap(cap=30.0), Sinks(requires_grad=False))}], ids=str
)
def test_what_is_understood_is_taken(spec: dict[str, Any]) -> None:
    sites.check_shareable(_site(), make_spec(**spec))


@pytest.mark.parametrize(
    ("spec", "observed"),
    [
        ({"mask": MaskSpec(reason="it reads the weather")}, "the mask was not understood: it reads the weather"),
        ({"changes": (Unusual(what="a step"),)}, "the scores are changed"),
        ({"changes": (bias(1, 8, 128, 128),)}, "the scores are changed"),
        ({"dropout_p": 0.1}, "dropout 0.1"),
        ({"returns_weights": True}, "they are read"),
        ({"seqlen_kv": 256}, "128 queries and 256 keys"),
        ({"batch": "s0"}, "s0"),
    ],
)
def test_what_is_not_is_refused(spec: dict[str, Any], observed: str) -> None:
    with pytest.raises(CannotShard) as caught:
        sites.check_shareable(_site(), make_spec(**spec))
    assert observed in caught.value.reason.observed
    assert caught.value.at == "out"


@pytest.mark.parametrize(
    ("changed", "observed"), [({"limits": ("low",)}, "clamped"), ({"keyless": SHUT_OUT}, "shuts out")]
)
def test_what_a_match_has_besides_is_refused(changed: dict[str, Any], observed: str) -> None:
    with pytest.raises(CannotShard) as caught:
        sites.check_shareable(_site(**changed), make_spec())
    assert observed in f"{caught.value.reason.rule} {caught.value.reason.observed}"


def test_a_scale_that_looks_like_the_length_is_refused() -> None:
    def by_length(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / LENGTH)

    with pytest.raises(ContextParallelUnsupported, match="the scale of scores does not depend"):
        compile_and_run(attend=by_length)


def _written_out(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    at = torch.arange(q.shape[2])
    scores = torch.tanh(q @ k.mT * 0.3 / 5) * 5
    return scores.masked_fill(at[:, None] < at, -math.inf).softmax(-1) @ v


def test_changed_scores_are_written_out_for_the_whole_sequence() -> None:
    assert compile_and_run(attend=_written_out).shape == (BATCH, LENGTH, WIDTH)


def test_the_weights_may_not_be_dropped_or_read() -> None:
    def dropped(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        return dropout((q @ k.mT).softmax(-1), 0.5) @ v

    with pytest.raises(ContextParallelUnsupported, match="no weights are dropped"):
        compile_and_run(attend=dropped)


# What masks and biases read of inputs.
def _masked(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _up_to(name: str) -> Attend:
    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        bound = data[name] if name == "lengths" else data[name][:, 1]
        return _masked(torch.arange(k.shape[2]) < bound[:, None, None, None], q, k, v)

    return attend


_BOUNDS = {"lengths": torch.tensor([9, 14]), "spans": torch.tensor([[1, 5], [2, 9]])}


# Not "name": the fixtures below run every case that a test of this file has by that name.
@pytest.mark.parametrize("bounds", _BOUNDS)
def test_an_input_of_another_length_is_no_part_of_the_sequence(bounds: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match=rf"2 elements.*{LENGTH} positions.*replicated"):
        compile_and_run(attend=_up_to(bounds), data={bounds: _BOUNDS[bounds]})
    compile_and_run(attend=_up_to(bounds), data={bounds: _BOUNDS[bounds]}, replicated=(bounds,))


def test_what_is_read_along_the_sequence_is_read_by_positions() -> None:
    """As many lengths as positions: each rank has them all, or a part of them, and nothing tells which."""

    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        return _masked(torch.arange(k.shape[2]) < data["lengths"][: k.shape[0], None, None, None], q, k, v)

    with pytest.raises(ContextParallelUnsupported):
        compile_and_run(attend=attend, data={"lengths": torch.full((LENGTH,), 9)})


def test_documents_are_counted_over_the_whole_sequence() -> None:
    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        documents = (data["position_ids"] == 0).cumsum(-1)
        return _masked(documents[:, None, :, None] == documents[:, None, None, :], q, k, v)

    compile_and_run(attend=attend, data={"position_ids": positions()})


# Distances that are bounded, as two bounds.
Q, K = Index("q"), Index("k")
SIZE = ix.linear(Const(12))


def _within(width: int, shift: int = 0) -> Expr:
    return ix.compare("<=", ix.apply("abs", ix.add(ix.add(Q, Const(shift)), K, -1)), Const(width))


@given(width=st.integers(0, 6), shift=st.integers(-4, 4), is_negated=st.booleans())
def test_the_same_pairs_take_part(width: int, shift: int, is_negated: bool) -> None:
    condition = _within(width, shift)
    condition = ix.apply("not", condition) if is_negated else ix.apply("or", condition, ix.compare("==", K, Const(0)))
    opened = sites.with_bounds(condition)
    for q in range(12):
        for k in range(12):
            at = {"q": q, "k": k}
            assert ix.evaluate(opened, at, None) == ix.evaluate(condition, at, None)  # type: ignore[arg-type]


def test_a_band_stays_a_window() -> None:
    assert kinds.recognise(sites.with_bounds(_within(3)), SIZE, SIZE) == (masks.SlidingWindow(left=3, right=3),)


def test_a_band_that_is_moved_is_known_by_its_bounds() -> None:
    (formula,) = kinds.recognise(_within(3, 3), SIZE, SIZE)
    assert isinstance(formula, masks.Formula)
    found = kinds.recognise(sites.with_bounds(_within(3, 3)), SIZE, SIZE)
    assert found == (masks.SlidingWindow(left=0, right=6),)


@pytest.mark.parametrize(
    "condition",
    [
        ix.compare("<=", K, Q),
        ix.compare("<=", ix.apply("abs", Q), Const(3)),
        ix.compare(">=", ix.apply("abs", ix.add(Q, K, -1)), Const(3)),
    ],
)
def test_what_is_no_bounded_distance_stays(condition: Expr) -> None:
    assert sites.with_bounds(condition) == condition


# Each rank attends to its own slots of a cache, and what they merge is the attention over all of it.

#: a mask of each sort, what is added, sinks, what is verified, and Inductor
_DAILY = ("filled", "left padding", "filled, Inductor", "no keys", "ALiBi", "sinks, verified", "mask from outside")
_THREE = ["filled", "left padding", "keys of one rank", "no keys", "sinks", "causal flag"]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, Found]]:
    return processes.run(decoded.measured, asked_for(request, "name"), size=2)


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest) -> list[dict[str, Found]]:
    return processes.run(decoded.measured, asked_for(request, "name", _THREE), size=3)


def _check(found: Found, name: str) -> None:
    assert found.error < 1e-12
    assert any("ranks attends to the keys that it keeps" in note for note in found.notes), found.notes
    if RIGHT[name].inner != "inductor":
        assert "keys_of_slots" not in found.calls
        assert found.calls.count("merged_over_ranks") == 1
    assert found.checked == RIGHT[name].verify


@pytest.mark.parametrize("name", further(RIGHT, daily=_DAILY))
def test_two_ranks_merge_what_they_keep(two: list[dict[str, Found]], name: str) -> None:
    for rank in two:
        _check(rank[name], name)


@pytest.mark.parametrize("name", further(_THREE, daily=_DAILY))
def test_so_do_three(three: list[dict[str, Found]], name: str) -> None:
    for rank in three:
        _check(rank[name], name)


@pytest.mark.parametrize("name", KEPT)
def test_what_can_not_be_merged_gathers_and_says_why(two: list[dict[str, Found]], name: str) -> None:
    _, words = KEPT[name]
    for rank in two:
        found = rank[name]
        assert found.error < 1e-12
        assert "merged_over_ranks" not in found.calls
        assert any("gathered in each call" in note and words in note for note in found.notes), found.notes


def test_what_is_merged_wrongly_is_an_error_on_every_rank() -> None:
    for said in processes.run(decoded.mismatch, size=2):
        assert "output" in said
        assert "on rank 0" in said


@pytest.mark.parametrize("name", ["left padding"])
def test_masks_are_proved_at_the_positions_of_slots(two: list[dict[str, Found]], name: str) -> None:
    (mask,) = two[0][name].masks
    assert "proved" in mask
    assert "2·k" in mask


@pytest.mark.parametrize(
    "name", further(["everything", "filled", "left padding", "mask from outside", "softcap", "sinks"], daily=_DAILY)
)
def test_the_decode_kernel_takes_what_a_rank_is_left_with(two: list[dict[str, Found]], name: str) -> None:
    (text,) = two[0][name].specs
    spec = AttentionSpec.from_text(text)
    half = {x: dataclasses.replace(getattr(spec, x), dtype="bfloat16") for x in "qkv"}
    on_gpu = dataclasses.replace(spec, **half, device="cuda", out_dtype="bfloat16")
    assert on_gpu.lse == "read"
    assert by_name("decode").why_not(on_gpu, Target.fake()) == []


@pytest.mark.parametrize("name", further(["filled", "filled, several queries", "causal flag"], daily=_DAILY))
def test_what_is_not_filled_yet_is_an_interval_of_slots(two: list[dict[str, Found]], name: str) -> None:
    """So kernels read no tensor for the mask, and no slot that is empty."""
    (text,) = two[0][name].specs
    found = parts.make_plan(AttentionSpec.from_text(text))
    assert found.rows
    assert not found.mask
