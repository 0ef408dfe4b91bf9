from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.passes.rewrites import arguments
from attn_compiler.passes.rewrites.refusing import Unkeyed

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 0.0, -0.0, 1.0, 0.1, math.inf, -math.inf, 1j, "1", "", "node"),
    *((), [], {}, (1,), [1], torch.Size([1]), (1, (2, [3.0])), {"dim": -1}, {1: "a"}),
    *(slice(None), slice(0, None, 2), slice(0.5), ...),
    *(torch.float32, torch.bool, torch.strided, torch.channels_last),
    *(torch.device("cpu"), torch.device("cuda"), torch.device("cuda:1"), torch.device("meta")),
]


def _data(x: Any) -> Any:
    return json.loads(json.dumps(arguments.data_of(x, lambda node: int(node.name[1:]))))


@pytest.mark.parametrize("x", VALUES, ids=repr)
def test_arguments_come_back_with_their_types(x: Any) -> None:
    back = arguments.value_of(_data(x), [])
    assert type(back) is type(x)
    assert repr(back) == repr(x)


def test_no_two_arguments_have_the_same_data() -> None:
    assert len({json.dumps(_data(x)) for x in VALUES}) == len(VALUES)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(arguments.value_of(_data(math.nan), []))


def test_nodes_go_by_their_places() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x0", "x1")]
    assert arguments.value_of(_data(([nodes[1]], {"like": nodes[0]})), nodes) == ([nodes[1]], {"like": nodes[0]})
    assert _data(nodes[1]) == ["node", 1]


@pytest.mark.parametrize(
    "x", [object(), print, torch.ones(1), torch.Generator(), range(3), {1, 2}], ids=lambda x: type(x).__name__
)
def test_what_is_no_plain_data_has_none(x: Any) -> None:
    with pytest.raises(Unkeyed, match="an argument is"):
        arguments.data_of((1, [x]), lambda _: 0)


@pytest.mark.parametrize("data", [["unknown", 1], ["dtype", "load"], ["layout", "float32"]], ids=str)
def test_data_of_nothing_is_refused(data: Any) -> None:
    with pytest.raises(Unkeyed, match="a record has the argument"):
        arguments.value_of(data, [])


def test_the_current_device_is_the_one_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_current_device", lambda: 1)
    data = _data(torch.device("cuda:1"))
    assert data != _data(torch.device("cuda:0"))
    monkeypatch.setattr(arguments, "_current_device", lambda: 3)
    assert arguments.value_of(data, []) == torch.device("cuda:3")
    assert data == _data(torch.device("cuda:3"))
