"""Twins of ops that launch Triton kernels: taken apart into launches that Inductor compiles, they compute what the ops do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import attn_compiler.lowerings
from attn_compiler.lowerings.shared.launching.packaged_ops import twin
from attn_compiler.lowerings.shared.ops import listing
from tests.lowerings.kernel_cases import BY_NAME, Case
from tests.lowerings.kernel_problems import Problem, build, planned

OWN = torch.ops.attn_compiler
LAUNCH = torch.ops.higher_order.triton_kernel_wrapper_functional
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a package is tested on the GPU, and not its graph")

#: one for each part of a plan, in sizes that are odd
CASES = (
    *("plain", "causal_from_end", "causal_more_keys", "window", "keys_left", "keys_none", "documents", "rows"),
    *("mask_bqk", "mask_k", "unlisted_keys", "bias_hqk_causal", "softcap_keys", "sinks", "head_dims_80_48"),
)


def _problem(case: Case, **changes: Any) -> Problem:
    """Without gradients."""
    return build(dataclasses.replace(case, needs_grad=False, bias_grad=False, **changes))


def _compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[fx.Graph]]:
    """A function as Inductor would get it, and the graphs that it would get, which run as they are."""
    graphs: list[fx.Graph] = []

    def compiler(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
        graphs.append(gm.graph)
        return gm

    return torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True), graphs


def _marked(tensors: Sequence[Tensor], problem: Problem) -> None:
    """Batch and lengths are symbolic."""
    sizes = {problem.case.batch, problem.case.seqlen_q, problem.case.seqlen_kv} - {1}
    for x in tensors[:3]:
        torch._dynamo.mark_dynamic(x, [axis for axis in (0, 2) if x.shape[axis] > 1])
    for x in tensors[3:]:
        torch._dynamo.mark_dynamic(x, [axis for axis, size in enumerate(x.shape) if size in sizes and size > 2])


def _launches(graph: fx.Graph) -> list[fx.Node]:
    assert not [node for node in graph.nodes if getattr(node.target, "namespace", None) == "attn_compiler"]
    return graph.find_nodes(op="call_function", target=LAUNCH)


def _run(problem: Problem, tensors: Sequence[Tensor]) -> tuple[Any, Any, list[fx.Graph]]:
    """What the op computes, what its twin does where it is taken apart, and the graph of that."""
    torch._dynamo.reset()
    op = twin(OWN.triton.default)
    run, graphs = _compiled(lambda q, k, v, *further: op(q, k, v, list(further), problem.text))
    q, k, v, *operands = tensors
    with torch.no_grad(), planned(problem.plan):
        return OWN.triton(q, k, v, operands, problem.text), run(q, k, v, *operands), graphs


def _tensors(problem: Problem) -> list[Tensor]:
    return [x.detach() for x in (problem.q, problem.k, problem.v, *problem.operands)]


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_launch_in_a_graph_computes_what_the_op_does(name: str, is_symbolic: bool) -> None:
    problem = _problem(BY_NAME[name])
    tensors = _tensors(problem)
    if is_symbolic:
        _marked(tensors, problem)
    expected, found, (graph,) = _run(problem, tensors)
    for got, want in zip(found, expected, strict=True):
        # The interpreter has scales in 64 bits where they are members of a launch's tuples.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert got.stride() == want.stride()
    (launch,) = _launches(graph)
    assert launch.kwargs["tensors_to_clone"] == ["Out", "Lse"]
    assert any(isinstance(size, fx.Node) for size in launch.kwargs["grid"][0]) == is_symbolic


@interpreted
def test_one_graph_serves_other_sizes_and_adds_no_guard() -> None:
    problem = _problem(BY_NAME["causal"])
    tensors = _tensors(problem)
    _marked(tensors, problem)
    torch._dynamo.reset()
    op = twin(OWN.triton.default)
    run, graphs = _compiled(lambda q, k, v: op(q, k, v, [], problem.text))
    with torch.no_grad(), planned(problem.plan):
        for batch, length in ((2, 70), (3, 33), (5, 128)):
            q, k, v = (torch.randn(batch, x.shape[1], length, x.shape[3]) for x in tensors)
            for x in (q, k, v):
                torch._dynamo.mark_dynamic(x, [0, 2])
            expected = OWN.triton(q, k, v, [], problem.text)
            assert all(torch.equal(got, want) for got, want in zip(run(q, k, v), expected, strict=True))
    assert len(graphs) == 1


@interpreted
def test_what_kernels_can_not_read_is_copied_in_the_graph() -> None:
    """k's elements of a head are not side by side."""
    problem = _problem(BY_NAME["plain"])
    q, k, v = _tensors(problem)
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    expected, found, (graph,) = _run(problem, [q, k, v])
    assert torch.equal(found[0], expected[0])
    (launch,) = _launches(graph)
    copied = launch.kwargs["kwargs"]["K"]
    assert copied.target == torch.ops.aten.clone.default
    assert copied.meta["val"].stride(3) == 1


@interpreted
def test_a_mask_that_is_repeated_is_not_copied_for_its_bytes() -> None:
    problem = _problem(BY_NAME["mask_bqk"], few_pairs=True)
    q, k, v, mask = _tensors(problem)
    mask = mask[:1].expand(*mask.shape)
    assert mask.stride(0) == 0
    expected, found, (graph,) = _run(problem, [q, k, v, mask])
    assert torch.equal(found[0], expected[0])
    (launch,) = _launches(graph)
    given = launch.kwargs["kwargs"]["Mask"].meta["val"]
    assert (given.dtype, given.stride(0), launch.kwargs["kwargs"]["masking_mask_b"]) == (torch.uint8, 0, 0)


@interpreted
@pytest.mark.parametrize("by_key", [False, True])
def test_lists_of_tiles_are_two_launches(by_key: bool) -> None:
    keys = torch.ones(3, 200, dtype=torch.bool)
    keys[0, 70:], keys[1, :130], keys[2] = False, False, False
    further = (None, None, None, 150, 200, listing.OPEN, 0, False, 32, 64, by_key, False)
    torch._dynamo.reset()
    op = twin(OWN.tile_lists.default)
    run, graphs = _compiled(lambda keys: op(None, keys, *further))
    with torch.no_grad():
        found, expected = run(keys), listing.listed(None, keys, *further)
    # The last list means nothing, and of a list what its counts say.
    assert torch.equal(found[:, :, :-1, : listing.HEAD], expected[:, :, :-1, : listing.HEAD])
    for got, want in zip(found[:, 0, :-1].flatten(0, 1), expected[:, 0, :-1].flatten(0, 1), strict=True):
        count = listing.HEAD + int(want[0])
        assert torch.equal(got[:count], want[:count])
    bounds, lists = _launches(graphs[0])
    assert lists.kwargs["kwargs"]["OfKeys"].args == (bounds, "OfKeys")


def test_a_twin_is_made_once_and_only_of_what_launches() -> None:
    assert twin(OWN.triton.default) is twin(OWN.triton.default)
    assert twin(OWN.held.default) is None
    assert twin(torch.ops.aten.add.Tensor) is None
    assert attn_compiler.lowerings.by_name("triton").cannot_package() == []


@interpreted
def test_without_a_compilation_a_twin_computes_as_its_op() -> None:
    problem = _problem(BY_NAME["causal"])
    q, k, v = _tensors(problem)
    with planned(problem.plan):
        found = twin(OWN.triton.default)(q, k, v, [], problem.text)
        expected = OWN.triton(q, k, v, [], problem.text)
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))
