"""What nobody may see: which keys the recipes leave out, and that kernels in FP8 give the same whatever those hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.fp8 import quantise, visible_keys
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call
from attn_compiler.spec import masks
from attn_compiler.spec.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec
from attn_compiler.spec.target import Target
from tests.lowerings import emitting, kernel_problems, poison, specs
from tests.lowerings.fp8 import problems
from tests.lowerings.fp8.problems import Fp8Problem
from tests.lowerings.hopper import test_fp8_launch as test_hopper_launch
from tests.lowerings.hopper.test_fp8_launch import LENGTHS, OF_LENGTHS
from tests.lowerings.kernel_cases import BY_NAME, Case

pytest.importorskip("triton")

RECIPES = {
    "tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor")),
    "head": Fp8Recipe(scaling=CurrentScaling(granularity="head")),
    "block": Fp8Recipe(),
    "accurate": Fp8Recipe(qk_format="int8", smooth_k=True, hadamard=True),
    "smooth": Fp8Recipe(smooth_k=True, hadamard=True),
    "delayed": Fp8Recipe(scaling=DelayedScaling(amax_history_len=4)),
    "static": Fp8Recipe(scaling=StaticScaling(q=5, k=5, v=5)),
}
#: masks that leave keys which nobody sees
FORMS = {
    "causal": BY_NAME["causal_more_keys"],
    "keys": BY_NAME["keys_left"],
    "window": Case(name="window_from_the_end", band=Band(left=9, right=-3, from_end=True), seqlen_q=37),
    "documents": Case(name="documents_unseen", documents=True, band=Band(right=0), seqlen_q=33, seqlen_kv=100),
}


def of_form(form: str, **given: Any) -> kernel_problems.Problem:
    return kernel_problems.build(FORMS[form], dtype=torch.float16, **given)


def rounded_of_lengths(name: str, recipe: Fp8Recipe, values: tuple[float, ...], device: str) -> Fp8Problem:
    """For `hopper_fp8`: the numbers of keys differ by batch row, and what lies beyond them is given."""
    problem = poison.with_unseen(test_hopper_launch.of_lengths(name, device), *values)
    seen = torch.arange(490, device=device) < torch.tensor(LENGTHS, device=device)[:, None]
    return problems.rounded_problem(problem, recipe, seen=seen)


def assert_same(mine: Any, right: Any, *, tolerance: float = 0.0) -> None:
    for got, wanted in zip(mine, right, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)
        assert not got.isnan().any()


# ---- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_what_lies_beyond_a_length_is_in_no_output_of_hoppers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean, dirty = (rounded_of_lengths(name, RECIPES["block"], x, "cpu") for x in ((0.0,), poison.NOT_FINITE))
    right = test_hopper_launch.in_torch(clean, monkeypatch)
    assert_same(test_hopper_launch.in_torch(dirty, monkeypatch), right)
    assert not right[0][0].any()


@pytest.mark.parametrize("form", ["causal", "window"])
def test_what_lies_beyond_a_band_is_in_no_output_of_hoppers(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(FORMS[form], name=f"hopper_{form}", head_dim=64)
    problem = kernel_problems.build(case, dtype=torch.float16, device="cpu")
    assert poison.unseen(problem).any()
    found = []
    for values in ((0.0,), poison.NOT_FINITE):
        given = problems.rounded_problem(poison.with_unseen(problem, *values), RECIPES["block"])
        found.append(test_hopper_launch.in_torch(given, monkeypatch))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("recipe", ["block", "smooth"])
def test_a_row_without_keys_stays_0_if_its_query_is_nan(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a shift of its own, NaN too, is added at the end, and where a sink takes the row's weight."""
    case = Case(name=f"nan_queries_{recipe}", band=Band(right=-20), sinks=True, head_dim=64, heads_q=4, heads_kv=2)
    problem = kernel_problems.build(case, dtype=torch.float16, device="cpu")
    with torch.no_grad():
        problem.q[:, :, :20] = torch.nan
    given = problems.rounded_problem(problem, RECIPES[recipe])
    out, lse = test_hopper_launch.in_torch(given, monkeypatch)
    assert not out[:, :, :20].any()
    assert not out.isnan().any()
    sinks = problem.named["sinks"].float()[None, :, None].expand(2, 4, 20)
    torch.testing.assert_close(lse[:, :, :20], sinks, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
@pytest.mark.parametrize("name", OF_LENGTHS)
def test_hoppers_on_a_gpu(name: str, recipe: str) -> None:
    clean, dirty = (rounded_of_lengths(name, RECIPES[recipe], x, "cuda") for x in ((0.0,), poison.NOT_FINITE))
    assert_same(problems.outputs(dirty), problems.outputs(clean))


# ---- recipes ----------------------------------------------------------------------------------------------------------


def made(problem: kernel_problems.Problem, recipe: Fp8Recipe, seen: Tensor | None, steps: int = 1) -> dict[str, Tensor]:
    """Everything that a recipe makes of a problem's tensors, after some steps."""
    emitter: Any = problems.Eager()
    spec = dataclasses.replace(Call.from_text(problem.text).spec, fp8=recipe)
    nodes: Any = {"q": problem.q, "k": problem.k, "v": problem.v}
    for _ in range(steps):
        found: Any = quantise.emit(emitter, spec, Operands(**nodes), seen=seen)
    return dict(zip(quantise.names(spec), found.operands, strict=True)) | dict(emitter.buffers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("values", [poison.NOT_FINITE, (6e4, -3e4)], ids=["not finite", "large"])
def test_what_nobody_sees_changes_no_scale(recipe: str, values: tuple[float, ...]) -> None:
    """Neither what is not finite, nor numbers that are larger than all others."""
    problem = of_form("keys", device="cpu")
    seen = problems.seen_of(problem)
    found = [
        made(poison.with_unseen(problem, *given), RECIPES[recipe], seen, steps=3 if recipe == "delayed" else 1)
        for given in ((0.0,), values)
    ]
    for name, right in found[0].items():
        assert torch.equal(found[1][name].float(), right.float()), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_changes_no_scale_even_if_it_is_not_known_to_be_unseen(recipe: str) -> None:
    problem = of_form("documents", device="cpu")
    steps = 3 if recipe == "delayed" else 1
    found = [
        made(poison.with_unseen(problem, *given), RECIPES[recipe], None, steps) for given in ((0.0,), poison.NOT_FINITE)
    ]
    for name in ("descale_q", "descale_k", "descale_v", "q8"):
        assert torch.equal(found[1][name].float(), found[0][name].float()), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_seen_and_not_finite_stays_so(recipe: str) -> None:
    """Of v in every recipe, of q and k in those whose format has NaN: the rest of a tensor keeps its scale."""
    problem = of_form("causal", device="cpu")
    with torch.no_grad():
        problem.v[0, 0, 3, 1], problem.k[0, 0, 5, 2], problem.q[1, 0, 7, 0] = torch.inf, torch.nan, -torch.inf
    found = made(problem, RECIPES[recipe], problems.seen_of(problem))
    of_v = found["v8"].float().isnan()
    assert of_v.sum() == 1
    for name, (batch, row) in (("k8", (0, 5)), ("q8", (1, 7))):
        nan = found[name].float().isnan()
        has = RECIPES[recipe].qk_format == "fp8"
        assert bool(nan[batch, 0, row].any()) is has
        assert not nan.index_fill(2, torch.tensor([row]), False).any()
    assert all(found[f"descale_{name}"].isfinite().all() for name in "qkv")


# ---- which keys -----------------------------------------------------------------------------------------------------

K, Q, B = Index("k"), Index("q"), Index("b")
LENGTH = Load(tensor="lengths", at=(B,), kind="int")
FAR = 10**6

#: a mask's kinds, its sizes, and the keys of 70 that are seen, where the length is 30; None: no operand, since all are
SEEN: dict[str, tuple[tuple[Any, ...], Any, Any, range | None]] = {
    "causal": ((Causal(),), 70, 70, None),
    "causal, more queries": ((Causal(),), 90, 70, None),
    "causal, more keys": ((Causal(),), 40, 70, range(40)),
    "from the end": ((Causal(alignment=masks.Alignment.BOTTOM_RIGHT),), 40, 70, None),
    "symbolic": ((Causal(),), "s", "s", None),
    "symbolic and not equal": ((Causal(),), "s", "t", range(40)),
    "window": ((masks.SlidingWindow(left=9, right=0),), 70, 70, None),
    "window before": ((masks.SlidingWindow(left=-5, right=FAR),), 70, 70, range(5, 70)),
    "length": ((masks.KeyPadding(condition=ix.compare("<", K, LENGTH)),), 70, 70, range(30)),
    "bound": ((masks.KeyBound(bound=LENGTH, side="last"),), 70, 70, range(31)),
    "both": ((Causal(), masks.KeyBound(bound=LENGTH, side="last")), 20, 70, range(20)),
    "by query": ((masks.Formula(condition=ix.compare("<=", K, ix.add(Q, LENGTH))),), 70, 70, None),
    "documents": ((masks.Document(of_key=Load(tensor="ids", at=(B, K), kind="int")),), 70, 70, None),
}


@pytest.mark.parametrize("name", SEEN)
def test_which_keys_are_seen(name: str) -> None:
    kinds, seqlen_q, seqlen_kv, right = SEEN[name]
    applied = all(isinstance(kind, Causal) for kind in kinds)
    dense = Dense(shape=(2, 1, seqlen_q, seqlen_kv), dtype="bool")
    mask = MaskSpec(kinds=kinds, flag=Flag.READ) if applied else MaskSpec(kinds=kinds, dense=dense)
    found = visible_keys.keys(specs.make_spec(mask=mask, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv))
    if right is None:
        assert found is None
        return
    assert found is not None
    assert found.keys is not None
    sizes = {"Sq": seqlen_q if isinstance(seqlen_q, int) else 40, "Skv": 70, "b": 0}
    seen = [k for k in range(70) if ix.evaluate(found.keys, sizes | {"k": k}, lambda *_: 30)]
    assert seen == list(right)


def test_a_vector_of_keys_is_read_as_it_is() -> None:
    mask = MaskSpec(dense=Dense(shape=(2, 1, 1, 128), dtype="bool"), reason="not read")
    found = visible_keys.keys(specs.make_spec(mask=mask))
    assert found is not None
    assert found.keys_given


# ---- lowerings ------------------------------------------------------------------------------------------------------

LENGTHS_MASK = MaskSpec(
    kinds=(masks.KeyBound(bound=LENGTH, side="last"),), dense=Dense(shape=(2, 1, 1, 128), dtype="bool")
)
KEYS_MASK = dataclasses.replace(
    LENGTHS_MASK, kinds=(masks.KeyPadding(condition=Load(tensor="lengths", at=(B, K), kind="bool")),)
)


def emitted(name: str, mask: MaskSpec, recipe: Fp8Recipe) -> fx.Graph:
    """A lowering's nodes for a site with a mask that reads one tensor."""
    spec = dataclasses.replace(specs.make_spec(mask=mask), fp8=recipe)
    lengths = torch.zeros(2, dtype=torch.int64) if mask is LENGTHS_MASK else torch.zeros(2, 128, dtype=torch.bool)
    given = {n: torch.randn(2, 8, 128, 64).bfloat16() for n in "qkv"} | {"lengths": lengths}
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = {n: graph.placeholder(n) for n in given}
    for n, node in nodes.items():
        node.meta["example_value"] = mode.from_tensor(given[n], static_shapes=True)
    with mode:
        operands = Operands(q=nodes["q"], k=nodes["k"], v=nodes["v"], loads={"lengths": nodes["lengths"]})
        graph.output(by_name(name).emit(emitting.GraphEmitter(graph, Target.fake(sm=90)), spec, operands))
    return graph


@pytest.mark.parametrize("recipe", ["tensor", "block", "accurate", "static"])
@pytest.mark.parametrize(("name", "mask"), [("hopper_fp8", LENGTHS_MASK), ("reference_fp8", KEYS_MASK)])
def test_every_op_that_rounds_is_told(name: str, mask: MaskSpec, recipe: str) -> None:
    ops = torch.ops.attn_compiler
    graph = emitted(name, mask, RECIPES[recipe])
    told = {
        node.target: node.args[len(node.target._schema.arguments) - 1]
        for node in graph.nodes
        if node.target in (ops.round_fp8.default, ops.largest_fp8.default, ops.mean_fp8.default)
    }
    (seen,) = set(told.values())
    assert seen.meta["example_value"].shape == (2, 128)
    assert len(told) == {"tensor": 2, "accurate": 2}.get(recipe, 1)
    if recipe == "static":
        (of_positions,) = {node.args[0] for node in graph.nodes if node.target is torch.where and node.args[2] == 0.0}
        assert of_positions.args[0].args[0] is seen
