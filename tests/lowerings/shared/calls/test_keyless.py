"""Rows without keys, attention by its definition, and gradients of learned tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.lowerings import homes
from attn_compiler.lowerings.shared.calls import by_definition
from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.calls.by_definition import philox
from attn_compiler.lowerings.shared.ops.leaf_ops import without_autograd
from attn_compiler.passes.writing import keyless_nodes
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import ALL, Case
from tests.lowerings.kernel_problems import Problem, build
from tests.lowerings.shared.kernels.test_keyless_rows import added, attention, problem, replaced, results
from tests.passes.compiling import compiled

pytest.importorskip("triton")


# The gradient of q and k from rows whose keys all got one number added, held against autograd of the definition in float64.
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_against_the_softmax_of_scores_beside_a_large_number(heads_kv: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, heads_kv, 9, d, dtype=torch.float64, requires_grad=True) for d in (8, 6))
    upstream = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    k_all, v_all = (x.repeat_interleave(4 // heads_kv, 1) for x in (k, v))
    # The number takes the digits of the scores, and their gradient passes on.
    scores = q @ k_all.mT * 0.3
    weights = (scores - scores.detach()).softmax(-1)
    exact = torch.autograd.grad(weights @ v_all, [q, k], upstream)
    out = torch.ops.attn_compiler.keyless_gradient(q, k, v, 0.3)
    assert out.shape == upstream.shape
    assert not out.any()
    found = torch.autograd.grad(out, [q, k], upstream)
    torch.testing.assert_close(found, exact)


def test_half_precision_has_gradients_of_its_own_dtype() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = torch.ops.attn_compiler.keyless_gradient(q, k, v, 0.5)
    assert out.dtype == torch.float32
    assert {x.dtype for x in torch.autograd.grad(out.sum(), [q, k])} == {torch.bfloat16}


def test_no_keys_at_all_give_no_gradient() -> None:
    q, k, v = (torch.randn(1, 2, n, 4, requires_grad=True) for n in (5, 0, 0))
    found = torch.autograd.grad(torch.ops.attn_compiler.keyless_gradient(q, k, v, 0.5).sum(), [q, k])
    assert torch.equal(found[0], torch.zeros_like(q))
    assert found[1].shape == k.shape


# When kernels give rows without keys themselves, and what serves where they fail.
SIZES = (2, 4, 2, 40, 30, 16, 16)


@pytest.mark.parametrize(
    ("masked", "trains", "by_kernel"), [(added, True, True), (added, False, False), (replaced, True, False)]
)
def test_kernels_give_rows_where_q_and_k_get_a_gradient_from_them(
    masked: object, trains: bool, by_kernel: bool
) -> None:
    """Elsewhere nodes cost less."""
    tensors, takes_part, _ = problem(SIZES, "cpu", torch.float32)
    run = compiled(lambda *given: attention(*given, masked), lowering="triton")
    with torch.set_grad_enabled(trains):
        run(*tensors, *takes_part)
    (graph,) = run.graphs
    assert ('"means":true' in graph.text.replace('\\"', '"')) == by_kernel
    assert ("mean" in graph.calls) != by_kernel
    assert keyless_nodes.NOTE in run.site.notes


def test_the_definition_has_them_too() -> None:
    """What serves where a kernel fails."""
    tensors, (queries, keys), grad = problem(SIZES, "cpu", torch.float64)
    expected = results(lambda *given: attention(*given, added), tensors, [queries, keys], grad)
    mask = queries[:, None, :, None] & keys[:, None, None, :]
    q, k, v = (x.detach() for x in tensors)
    given = by_definition.Attention(q=q, k=k, v=v, tensors={"mask": mask}, scale=0.2, means=-torch.inf)
    out, lse = by_definition.forward(given)
    grads = by_definition.backward(given, grad, torch.zeros_like(lse), out, lse)
    for one, other in zip((out, grads.q, grads.k, grads.v), expected, strict=True):
        torch.testing.assert_close(one, other)


# Attention by its definition, held against the oracle that kernels are held against.
def _results(problem: Problem) -> list[Tensor]:
    with kernel_problems.planned(problem.plan):
        attention = prepare(problem.text).attention(problem.q, problem.k, problem.v, problem.named)
    with torch.no_grad():
        out, lse = by_definition.forward(attention)
        if not problem.case.needs_grad:
            return [out, lse]
        grad_out, grad_lse = kernel_problems.upstream(problem, out, lse)
        grads = by_definition.backward(attention, grad_out, grad_lse, out, lse)
    return [out, lse, grads.q, grads.k, grads.v, *(grads.further[name] for name in problem.plan.differentiable)]


@pytest.mark.in_turns
@pytest.mark.parametrize("most", [1 << 25, 1 << 10], ids=["at once", "in parts"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_outputs_and_gradients(case: Case, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_definition, "_MOST_SCORES", most)
    problem = build(case)
    kernel_problems.assert_within_rule(_results(problem), problem)


def test_the_lse_of_all_parts_of_a_merged_attention() -> None:
    """Weights are those of the lse that is given, and minus delta takes the place of its gradient."""
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(4))
    wide_k, wide_v = (torch.cat((x, torch.randn_like(x)), 2).requires_grad_() for x in (k, v))
    whole = (q @ wide_k.mT).softmax(-1) @ wide_v
    right_k, right_v = torch.autograd.grad(whole, [wide_k, wide_v], grad_out)
    lse = torch.logsumexp(q @ wide_k.detach().mT, -1)
    minus_delta = -(whole.detach() * grad_out).sum(-1)
    part = by_definition.Attention(q=q, k=k, v=v, tensors={}, scale=1.0)
    found = by_definition.backward(part, grad_out, minus_delta, torch.zeros_like(grad_out), lse)
    torch.testing.assert_close(found.k, right_k[:, :, :7])
    torch.testing.assert_close(found.v, right_v[:, :, :7])


def test_nan_at_what_nobody_uses_gets_nowhere() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    keys = torch.tensor([[True, True, True, True, False, False]])
    clean = by_definition.Attention(q=q, k=k, v=v, tensors={"keys": keys}, scale=0.5)
    k_bad, v_bad = (torch.where(keys[:, None, :, None], x, torch.nan) for x in (k, v))
    bad = by_definition.Attention(q=q, k=k_bad, v=v_bad, tensors={"keys": keys}, scale=0.5)
    for one, other in zip(by_definition.forward(clean), by_definition.forward(bad), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_philox() -> None:
    """The known answers of Random123 for 4x32-10: zeros, ones and digits of pi (the fourth number of the counter is 0 here)."""
    zero = torch.zeros((), dtype=torch.int64)
    assert int(philox(torch.zeros(1, dtype=torch.int64), zero, zero, zero)) == 0x6627E8D5


# Elements of a learned table.
homes.define("gathered")
GATHERED: Any = torch.ops.attn_compiler.gathered
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _numbers(*shape: int, below: int, least: int = 0) -> Tensor:
    return torch.randint(least, below, shape, generator=torch.Generator().manual_seed(len(shape)))


#: the table's shape, and its indices
CASES: dict[str, tuple[tuple[int, ...], list[Tensor]]] = {
    "rows": ((7, 3), [_numbers(50, below=7)]),
    "rows of pairs": ((7, 3), [_numbers(9, 11, below=7)]),
    "elements": ((7, 3), [_numbers(1, 50, below=7), torch.arange(3)[:, None]]),
    "no further axis": ((9,), [_numbers(5, 4, below=9)]),
    "two further axes": ((5, 2, 3), [_numbers(60, below=5)]),
    "from the end": ((7, 3), [_numbers(50, below=7, least=-7), torch.tensor([-1])]),
    "int32": ((7, 3), [_numbers(50, below=7).int()]),
    "none": ((7, 3), [torch.zeros(0, dtype=torch.int64)]),
    "many": ((6, 4), [_numbers(5000, below=6)]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    shape, indices = CASES[name]
    at = [index.to(DEVICE) for index in indices]
    table = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype).requires_grad_()
    found = GATHERED(table, at)
    assert torch.equal(found, table[tuple(at)])
    grad = torch.randn(found.shape, device=DEVICE).to(dtype)
    exact = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    exact.index_put_(tuple(at), grad.double(), accumulate=True)
    first, second = (torch.autograd.grad(GATHERED(table, at), table, grad)[0] for _ in range(2))
    assert torch.equal(first, second)
    # The last rounding alone is that of the table.
    eps, sums = torch.finfo(dtype).eps, torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert (first.double() - exact).abs().max() <= eps * exact.abs().max() / 2 + 100 * sums * exact.abs().max() + 1e-30


def test_compiled_code_gathers_by_pytorchs_own_op() -> None:
    """Which Inductor fuses. The sums alone are an op of ours."""
    graph = fx.Graph()
    table, at = graph.placeholder("table"), graph.placeholder("at")
    node = graph.call_function(GATHERED.default, (table, [at]))
    graph.output(node)
    without_autograd(graph)
    given = torch.randn(5, 2), torch.tensor([3, 0, 3])
    assert node.target is torch.ops.aten.index.Tensor
    assert torch.equal(fx.GraphModule({}, graph)(*given), given[0][given[1]])
