"""A model's own Triton kernel among the steps of an attention: a call without a result, that only writes to what it is given.

Dynamo captures it as a higher-order call, which needs no GPU to be put into a graph by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses import FakeTensorMode

from attn_compiler.options.options import Options
from attn_compiler.passes import run_pipeline
from attn_compiler.reporting.report import Report

SHAPE = (2, 4, 6, 8)


def attention(written: str) -> fx.GraphModule:
    """q, k, v -> out as Dynamo would capture it, with a kernel that is given the value of that name once it exists."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def call(name: str, function: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(function, args)
        with mode:
            node.meta["example_value"] = function(*fx.map_arg(args, lambda n: n.meta["example_value"]))
        return kernel(name, node)

    def kernel(name: str, node: fx.Node) -> fx.Node:
        if name == written:
            given = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
            graph.call_function(triton_kernel_wrapper_mutation, (), {**given, "kwargs": {"x": node}})
        return node

    q, k, v = (graph.placeholder(name) for name in "qkv")
    for node in (q, k, v):
        with mode:
            node.meta["example_value"] = torch.empty(SHAPE)
    scores = call("scores", torch.matmul, q, call("turned k", torch.transpose, k, -1, -2))
    kernel("k", k)
    weights = call("weights", torch.softmax, scores, -1)
    out = call("out", torch.matmul, weights, v)
    kernel("k afterwards", k)
    graph.output((out,))
    return fx.GraphModule({}, graph)


def report_of(written: str) -> Report:
    return run_pipeline(attention(written), Options(strict=True, lowering="sdpa_cpu_flash"))


@pytest.mark.parametrize("written", ["nothing", "turned k", "k afterwards", "out"])
def test_writes_before_and_after_are_none_of_its_business(written: str) -> None:
    (site,) = report_of(written).sites
    assert site.decision.lowering == "sdpa_cpu_flash"


@pytest.mark.parametrize(
    ("written", "observed"),
    [("scores", "triton_kernel_wrapper_mutation reads"), ("k", "written in place")],
)
def test_writes_in_between_are_seen(written: str, observed: str) -> None:
    report = report_of(written)
    (miss,) = report.misses
    assert not report.sites
    assert observed in miss.reason.observed


def test_weights_that_are_written_are_made() -> None:
    (site,) = report_of("weights").sites
    assert site.decision.lowering == "untouched"
    assert site.spec.returns_weights
