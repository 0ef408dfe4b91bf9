"""Masks and outputs of a site beside the model's own: pair by pair, in slices, and what is said of a difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load, on_tensors
from attn_compiler.passes.graph.site import Operand, Term
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import outputs, pairs, whole
from attn_compiler.verifying.interpreting import Noise
from attn_compiler.verifying.pairs import ALLOWED, BIASED_MASKED_BELOW, MASKED, NEITHER, Own, combined, slices
from attn_compiler.verifying.values import Key, Values
from attn_compiler.verifying.whole import Called
from tests.verifying.planning import LENGTH, PADDING, SHAPE, Planned, Tensor, causal, masked, planned, qkv

Q, K, B, H = (Index(name) for name in "qkbh")
CAUSAL = ix.compare("<=", K, Q)


def _and_not(x: Expr) -> Expr:
    return ix.apply("and", CAUSAL, ix.invert(x))


def _shifted(found: Planned) -> Expr:
    (load,) = ix.loads(found.check("mask").site.condition)
    return ix.as_bool(Load(load.tensor, (B, ix.add(K, ix.ONE)), load.kind))


ONE_PAIR = ix.apply("and", ix.compare("==", Q, Const(4)), ix.compare("==", K, Const(2)))
#: the model, the condition that is believed, and of the first difference its index, what we say, and what the model says
WRONG: dict[str, tuple[Callable[..., Tensor], Expr | Callable[[Planned], Expr], str, str, str]] = {
    "one pair": (causal, ix.apply("xor", CAUSAL, ONE_PAIR), "b=0, h=0, q=4, k=2", "masked out", "allowed"),
    "one more pair": (causal, ix.TRUE, "b=0, h=0, q=0, k=1", "allowed", "masked out"),
    "along b": (causal, _and_not(ix.compare("==", B, Const(1))), "b=1, h=0, q=0, k=0", "masked out", "allowed"),
    "along h": (causal, _and_not(ix.compare("==", H, Const(3))), "b=0, h=3, q=0, k=0", "masked out", "allowed"),
    "last row": (causal, _and_not(ix.compare("==", Q, Const(5))), "b=0, h=0, q=5, k=0", "masked out", "allowed"),
    "the model's alone": (masked, ix.TRUE, "b=1, h=0, q=0, k=3", "allowed", "masked out"),
    "beyond a tensor": (masked, _shifted, "b=0, h=0, q from 0 up to 1", f"no value: .*size {LENGTH}", "a mask"),
}


@pytest.mark.parametrize("most", [1, 7, 2**24])
@pytest.mark.parametrize("name", WRONG)
def test_every_pair_is_compared(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """Slices of any size find the same."""
    monkeypatch.setattr(pairs, "MOST_PAIRS", most)
    function, believed, index, observed, expected = WRONG[name]
    found = planned(function, *qkv(), *([PADDING] if function is masked else []))
    result = found.run("mask")
    assert result.skipped is None
    assert result.elements == (LENGTH * LENGTH if function is causal else 2 * LENGTH)
    found.check("mask").site.condition = believed(found) if callable(believed) else believed
    error = found.mismatch(observed)
    assert error.what == "recovered mask"
    assert error.index == index
    assert expected in error.expected


def test_a_number_that_neither_allows_nor_masks() -> None:
    """What is added is -65504 only for some inputs."""
    found = planned(lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v, *qkv(), torch.full((LENGTH, LENGTH), -1.0))
    check = found.check("mask")
    site = check.site
    site.condition = ix.TRUE
    site.spec = dataclasses.replace(site.spec, score=dataclasses.replace(site.spec.score, proved=()))
    found.plan.checks.remove(found.check("bias"))
    check.skipped = None
    check.find_needs(Values(bodies=found.plan.mirrors))
    assert found.mismatch().expected.startswith("neither allowed nor masked out (")
    assert "holds -1.0" in found.mismatch().expected


UNKNOWN = {
    "the mask was not read": None,
    "s99": ix.compare("<=", K, ix.Size("s99")),
    "'abs'": ix.compare("<=", ix.Apply("abs", (K,)), Q),
    "where unknown is read from is not known": ix.as_bool(Load("unknown", (K,), "int")),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_what_has_no_value_is_skipped(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "'abs'":
        monkeypatch.delitem(on_tensors.ON_TENSORS, "abs")
    found = planned(causal, *qkv())
    check = found.check("mask")
    check.site.condition = UNKNOWN[why]
    assert (check.formula is None) == (why == "the mask was not read")
    assert why in str(found.run("mask").skipped)
    assert found.run("output").skipped is None


def test_what_it_needs_is_what_it_reads() -> None:
    found = planned(causal, *qkv())
    mask, output = found.check("mask"), found.check("output")
    assert (mask.formula, output.formula) == ("k <= q", None)
    assert {key.name for key in mask.needs} == {"le"}
    assert mask.needs < output.needs
    assert {"l_q_", "l_k_", "l_v_"} < {key.name for key in output.needs}
    recorded: dict[Key, Tensor] = {}
    output.find_needs(Values(bodies=found.plan.mirrors, recorded=recorded))
    assert recorded == {}


# ---- the model's effect on a pair -----------------------------------------------------------------------------------

LOWEST, LOW = torch.finfo(torch.float32).min, torch.finfo(torch.float16).min
ADDED = [0.0, -0.0, LOW, -torch.inf, -1.0, 3.0, torch.nan, -1e4]
NUMBERS = [ALLOWED, ALLOWED, MASKED, MASKED, NEITHER, NEITHER, NEITHER, NEITHER]


def _own(x: Any, **more: Any) -> Own:
    operand = Operand(
        node=(node := torch.fx.Graph().placeholder("mask")), used=node, dims=(), root=node, root_dims=(), reads={}
    )
    term = Term(operand=operand, weight=more.get("weight", 1.0), inverted=more.get("inverted", False))
    return Own(x=torch.as_tensor(x), term=term, adds=more.get("adds", True))


@pytest.mark.parametrize(
    ("own", "lowest", "expected"),
    [
        (_own([True, False], adds=False), pairs.MASKED_BELOW, [ALLOWED, MASKED]),
        (_own([True, False], adds=False, inverted=True), pairs.MASKED_BELOW, [MASKED, ALLOWED]),
        # Truth values that are added mask nothing.
        (_own([True, False]), pairs.MASKED_BELOW, [NEITHER, ALLOWED]),
        *(
            (_own(torch.tensor(ADDED, dtype=dtype)), pairs.MASKED_BELOW, NUMBERS)
            for dtype in (torch.float32, torch.float16)
        ),
        # A mask that a bias was added to still masks.
        (_own([LOW + 40]), pairs.MASKED_BELOW, [NEITHER]),
        (_own([LOW + 40, -1e4]), BIASED_MASKED_BELOW, [MASKED, NEITHER]),
        # A weight may take the masking away.
        (_own([-65504.0, LOWEST], weight=1e-3), pairs.MASKED_BELOW, [NEITHER, MASKED]),
    ],
)
def test_effects(own: Own, lowest: float, expected: list[int]) -> None:
    assert own.effects(None, lowest).tolist() == expected


def test_one_that_masks_is_enough() -> None:
    a = torch.tensor([MASKED, MASKED, ALLOWED, ALLOWED, NEITHER, NEITHER], dtype=torch.int8)
    b = torch.tensor([ALLOWED, NEITHER, ALLOWED, NEITHER, MASKED, NEITHER], dtype=torch.int8)
    assert combined([a, b]).tolist() == [MASKED, MASKED, ALLOWED, NEITHER, MASKED, NEITHER]


@pytest.mark.parametrize("most", [1, 7, 12, 2**24])
def test_slices_cover_every_pair_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(pairs, "MOST_PAIRS", most)
    x = torch.zeros(2, 3, 5, 4)
    for at in slices(tuple(x.shape)):
        part = at.of(x)
        assert part.numel() <= max(most, 4)
        part.add_(1)
        assert x[at.b, at.h, at.first, 3] == 1
    assert bool((x == 1).all())


def test_rows_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for where the model gives no number."""

    def of_infinity(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(real[:, None, None, :] == 0, -torch.inf).softmax(-1) @ v

    found = planned(of_infinity, *qkv(), PADDING * torch.tensor([[1], [0]]))
    seen: list[Tensor | None] = []
    real = pairs.rows_with_keys
    monkeypatch.setattr(pairs, "rows_with_keys", lambda *given: seen.append(real(*given)) or seen[-1])
    assert found.run("output").skipped is None
    assert seen[0] is not None
    assert seen[0].expand(2, 1, 1, 1).flatten().tolist() == [True, False]
    unmasked = planned(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv())
    assert real(unmasked.check("output").site, Values(bodies=unmasked.plan.mirrors)) is None


def test_a_call_without_queries_is_verified() -> None:
    """A slice of no rows, beside a bias that all rows share."""

    def attention(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        return (q @ k.mT + slope * torch.arange(k.shape[2])).softmax(-1) @ v

    options = {"verify": True, "strict": True, "inner": "aot_eager"}
    compiled = torch.compile(attention, backend="attn_compiler", dynamic=True, options=options)
    for queries, keys in ((2, 3), (0, 7)):
        q, k, v = (torch.randn(2, 1, n, 4) for n in (queries, keys, keys))
        given = (q, k, v, torch.tensor(0.5))
        torch.testing.assert_close(compiled(*given), attention(*given))


# ---- outputs beside the model's own operations, which run once more ------------------------------------------------


def _changed(found: Planned, function: Callable[..., Any], *more: Any) -> Planned:
    """The same plan, with a kernel whose result is changed."""
    check = found.check("output")
    old = check.new_out
    with old.graph.inserting_after(old):
        check.new_out = old.graph.call_function(function, (old, *more))
    check.body.outs[check.new_out.name] = check.body.outs.pop(old.name)
    return found


# Off by a part of 1 of the result: what has to be allowed, and what has to be noticed.
@pytest.mark.parametrize(
    ("dtype", "little", "much", "size"),
    [
        (torch.float32, 1e-7, 1e-5, 1.0),
        (torch.float32, 1e-7, 1e-5, 1e-6),
        (torch.bfloat16, 2e-3, 5e-2, 1.0),
        (torch.float16, 2e-4, 5e-3, 1.0),
    ],
    ids=lambda x: str(x)[6:] if isinstance(x, torch.dtype) else None,
)
def test_the_rule_is_neither_too_strict_nor_too_lax(
    dtype: torch.dtype, little: float, much: float, size: float
) -> None:
    """The rounding that is allowed is that of the values, not an absolute number."""
    q, k, v = qkv(dtype=dtype)
    result = _changed(planned(causal, q, k, v * size), torch.mul, 1 + little).run("output")
    assert result.skipped is None
    assert result.error is not None
    assert 0 < result.error < much
    error = _changed(planned(causal, q, k, v * size), torch.mul, 1 + much).mismatch()
    assert error.what == "output of sdpa_cpu_flash"


def test_another_dtype_is_a_mismatch() -> None:
    with pytest.raises(VerificationMismatch, match=r"torch\.float64 .*differ"):
        _changed(planned(causal, *qkv()), torch.Tensor.double).found()


def _in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The exact result is made from copies, so that the model's own values stay what they are."""
    scores = q @ k.mT
    scores *= 0.3
    scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v + q


def test_right_outputs_hold() -> None:
    assert planned(_in_place, *qkv()).run("output").elements == math.prod(SHAPE)
    exact = planned(masked, *qkv(), torch.ones(2, LENGTH, dtype=torch.int64)).run("output")
    assert exact.error is not None
    assert 0 < exact.error < 1e-6
    q, k, v = qkv(dtype=torch.float16)
    # Where the model itself overflows there is nothing to compare.
    v[0, 0, 0, 0] = torch.inf
    assert planned(causal, q, k, v).run("output").skipped is None


def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    check = planned(causal, *qkv(), lowerings=("untouched",)).check("output")
    assert check.skipped == "the site is as the model made it"
    assert check.is_as_it_was
    found = planned(causal, *qkv())
    monkeypatch.setattr(outputs, "recomputed", full)
    assert found.run("output").skipped == "there is not enough memory for the exact result"


def test_dependents_run_from_the_product_to_the_output() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.sin() @ k.mT * 0.3
        scores = scores - scores.amax(-1, keepdim=True)
        return (scores.softmax(-1) @ v.cos()).exp()

    check = planned(function, *qkv()).check("output")
    names = [str(n.target).split(".")[1] for n in outputs.dependents(check.body.mirror, check.site.match)]
    assert names == ["matmul", "mul", "amax", "sub", "softmax", "matmul"]


def test_the_same_again_wider_and_with_noise() -> None:
    inputs = qkv()
    found = planned(lambda q, k, v: _in_place(q, k, v) - q, *inputs)
    check, (body,) = found.check("output"), found.plan.bodies.values()
    values = Values(bodies=found.plan.mirrors)

    def record(node: fx.Node, value: Any) -> Any:
        values.recorded[Key(body.index, node.name)] = value
        return value

    whole.run_model(Called.copied(found.plan, found.args), record=record)
    exact = _in_place(*(x.double() for x in inputs)) - inputs[0].double()
    torch.testing.assert_close(outputs.recomputed(check, values), exact.float())
    wide = outputs.recomputed(check, values, torch.float64)
    torch.testing.assert_close(wide, exact, rtol=1e-12, atol=1e-12)
    noisy = outputs.recomputed(check, values, torch.float64, Noise(seed=0))
    assert 0 < float((noisy - wide).abs().max()) < 1e-3
