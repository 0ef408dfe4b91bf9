"""The list of patterns: each is its file's, no anchor belongs to two, and each is looked for in Dynamo's graphs."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from torch import fx

from attn_compiler.passes.graph import unit
from attn_compiler.passes.matching import patterns
from attn_compiler.passes.matching.patterns import PATTERNS, Pattern, softmaxes


def test_every_file_with_anchors_is_in_the_list() -> None:
    names = [found.name for found in pkgutil.iter_modules(patterns.__path__, f"{patterns.__name__}.")]
    modules = [module for module in map(importlib.import_module, names) if hasattr(module, "ANCHORS")]
    assert {pattern.match for pattern in PATTERNS} == {module.match for module in modules}
    for pattern in PATTERNS:
        (module,) = (module for module in modules if module.match is pattern.match)
        assert (pattern.name, pattern.anchors) == (module.NAME, module.ANCHORS)


def test_an_anchor_starts_one_pattern() -> None:
    anchors = [anchor for pattern in PATTERNS for anchor in pattern.anchors]
    assert anchors
    assert len(set(anchors)) == len(anchors)
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_graph_that_calls_an_anchor_gets_a_mirror(pattern: Pattern) -> None:
    for anchor in pattern.anchors:
        assert isinstance(anchor, torch._ops.OpOverload)
        graph = fx.Graph()
        node = graph.call_function(anchor)
        if anchor in softmaxes.WRITTEN_OUT:
            # Alone it is no softmax.
            assert not unit.is_anchor_like(node)
            graph.call_function(torch.ops.aten.sum.dim_IntList, (node, [-1]))
        assert unit.is_anchor_like(node), anchor
