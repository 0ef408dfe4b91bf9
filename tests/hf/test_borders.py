"""Graphs of each family that are cut before each layer: which of them get a mirror, and which outputs are read as masks.

An output that depends on a parameter is left out (passes/graph/mirroring.py). Here it is handed on, too, and no mask may be proved by it:
the rule would lose that mask. `pytest -m survey` runs all families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import attn_compiler
from attn_compiler.passes.graph import mirroring
from attn_compiler.passes.graph.unit import is_anchor_like
from attn_compiler.passes.recovering import borders
from attn_compiler.torch_private.known_masks import Known
from tests.hf.family import Family, Kwargs, Size
from tests.hf.packages import Unavailable
from tests.hf.survey import FAMILIES

OPTIONS = {"inner": "eager", "cache_rewrites": False, "strict": True, "lowerings": ["sdpa_cpu_flash", "math"]}
Rule = Callable[[fx.Graph], set[fx.Node]]

#: of the default run
FEW = ("bert", "sdpa")


@dataclass(kw_only=True, eq=False)
class Seen:
    """What was read at borders. left_out: Dynamo's values of outputs that the rule leaves out. told: facts of these and of others.

    relied_on: the facts that masks were proved by. in_vain: graphs without attention that get a mirror, of which nothing is known.
    """

    left_out: list[torch.Tensor] = field(default_factory=list)
    told: dict[bool, list[Known]] = field(default_factory=lambda: {True: [], False: []})
    relied_on: list[Known] = field(default_factory=list)
    in_vain: list[str] = field(default_factory=list)

    @property
    def lost(self) -> list[Known]:
        return [known for known in self.relied_on if _is_one_of(known, self.told[True])]


@contextmanager
def _all_handed_on(rule: Rule) -> Iterator[Seen]:
    """Hand on what a rule leaves out, too."""
    seen, crossed = Seen(), borders.crossed

    def none(graph: fx.Graph) -> set[fx.Node]:
        values = [node.meta["example_value"] for node in rule(graph) & set(graph.output_node().all_input_nodes)]
        seen.left_out += [x for x in values if not _is_one_of(x, seen.left_out)]
        return set()

    def crossing(border: borders.Border) -> Any:
        told, root = crossed(border), border.root
        if root is not None:
            given: Any = root.graph.output_node().args[0]
            for place, known in told:
                seen.told[_is_one_of(given[place].meta["example_value"], seen.left_out)].append(known)
            kept = [
                x for x in mirroring.handed_on(root.graph) if not _is_one_of(x.meta["example_value"], seen.left_out)
            ]
            if kept and not told and not any(map(is_anchor_like, root.graph.nodes)):
                seen.in_vain.append(str(root.graph))
        seen.relied_on += [known for facts in border.readers.relied_on.values() for known in facts.values()]
        return told

    with mock.patch.object(mirroring, "_of_parameters", none), mock.patch.object(borders, "crossed", crossing):
        yield seen


def _is_one_of(x: object, others: Sequence[object]) -> bool:
    return any(x is other for other in others)


def _padded(family: Family) -> Kwargs:
    size = Size()
    inputs = family.inputs(size)
    if family.mask:
        mask = torch.ones(size.batch, size.seqlen, dtype=torch.int64)
        mask[0, -3:] = 0
        inputs[family.mask] = mask == 0 if family.mask_true_is_padding else mask
    return inputs


def _seen(name: str, impl: str, rule: Rule = mirroring._of_parameters) -> Seen:
    torch._dynamo.reset()
    attn_compiler.reset()
    family = next(one for one in FAMILIES if one.name == name)
    try:
        model = family.build(impl).eval()
    except Unavailable as missing:
        pytest.skip(str(missing))
    for layers in (one for one in model.modules() if isinstance(one, nn.ModuleList)):
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())

    weight = nn.Parameter(torch.randn(1, 8))

    def choosing(**given: Any) -> list[torch.Tensor]:
        """Whole numbers and truth values of the last graph depend on a parameter."""
        floats = [
            x for x in pytree.tree_leaves(model(**given)) if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        logits = [x[..., None] @ weight for x in floats]
        return [made for x in logits for made in (x.argmax(-1), x > 0)]

    with torch.no_grad(), _all_handed_on(rule) as seen:
        torch.compile(choosing, backend="attn_compiler", options=OPTIONS)(**_padded(family))
    assert all(_is_one_of(known, seen.told[True] + seen.told[False]) for known in seen.relied_on)
    return seen


def test_the_rule_loses_no_mask_over_a_border() -> None:
    seen = _seen(*FEW)
    assert seen.left_out
    assert seen.relied_on
    assert not seen.lost


def test_a_rule_that_leaves_out_a_mask_loses_it() -> None:
    assert _seen(*FEW, rule=lambda graph: set(graph.nodes)).lost


@pytest.mark.survey
@pytest.mark.parametrize(("name", "impl"), [(family.name, impl) for family in FAMILIES for impl in family.impls])
def test_the_rule_loses_no_mask_of_any_family(name: str, impl: str) -> None:
    seen = _seen(name, impl)
    assert seen.left_out
    assert not seen.lost
    # Cosines and sines have the shape of a mask, and are made without a parameter.
    assert all("sin" in graph for graph in seen.in_vain)
