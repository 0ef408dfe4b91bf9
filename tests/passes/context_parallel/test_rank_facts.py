"""What a rank says of itself: a line for each option, and for what tells its call apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from attn_compiler import ContextParallel
from attn_compiler.options.options import Options
from attn_compiler.passes.context_parallel import rank_facts
from tests.meshes import fake_mesh


def _lines(options: dict[str, Any], rank: int = 0, **description: Any) -> set[str]:
    with fake_mesh(2, rank=rank) as mesh:
        return set(rank_facts.of_options(Options(context_parallel=ContextParallel(mesh, **description), **options)))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "method": ({}, {"method": "ring"}),
    "load_balance": ({}, {"load_balance": None}),
    "replicated": ({}, {"replicated": ("image",)}),
    "allow": ({}, {"allow": ("length",)}),
    "packed": ({}, {"packed": True}),
    "gather_limit": ({}, {"gather_limit": 1}),
    "verify": ({"verify": True}, {}),
    "lowering": ({"lowering": "math"}, {}),
    "lowerings": ({"lowerings": ("math",)}, {}),
    "inner": ({"inner": "eager"}, {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_option_has_a_line(name: str) -> None:
    options, description = OTHERS[name]
    differ = _lines({}) ^ _lines(options, **description)
    assert {line.partition(":")[0] for line in differ} == {name}


def test_the_same_options_say_the_same_on_every_rank() -> None:
    assert _lines({}, rank=0) == _lines({}, rank=1)
    assert _lines({}, load_balance="auto") == _lines({}, load_balance="head_tail")
    assert _lines({}, allow=("a", "b")) == _lines({}, allow=("b", "a", "a"))
    assert _lines({"dump_dir": "somewhere", "cache_rewrites": False}) == _lines({})


def _graph(**values: Any) -> fx.Graph:
    graph = fx.Graph()
    for name, value in values.items():
        graph.placeholder(name).meta["example_value"] = value
    return graph


def test_a_call_is_told_by_its_inputs() -> None:
    graph = _graph(
        l_x_=torch.zeros(2, 8, 4).transpose(0, 1).requires_grad_(),
        l_ids_=torch.zeros(2, 8, dtype=torch.int32),
        l_number_=7,
        l_self_modules_q_parameters_weight_=nn.Parameter(torch.zeros(4, 4)),
    )
    with torch.no_grad():
        assert rank_facts.of_call(graph) == [
            "with gradients: False",
            "l_x_: torch.float32 (8, 2, 4), strides (4, 32, 1), requires a gradient",
            "l_ids_: torch.int32 (2, 8), strides (8, 1)",
        ]
