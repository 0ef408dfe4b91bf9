"""Records of rewrites and their keys: arguments, programs."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from attn_compiler.options.options import Options
from attn_compiler.passes.rewrites import arguments, key, record
from attn_compiler.passes.rewrites.key import Keyed
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.torch_private import caches as torch_caches
from tests.fuzz import comparing, searching
from tests.fuzz.comparing import Wrong
from tests.fuzz.discards import Left
from tests.fuzz.grammar.rules import RULES
from tests.fuzz.program import Program
from tests.fuzz.searching import Kind
from tests.passes.rewrites.watching import Seen, described, watched, without_times

MODE = FakeTensorMode()


def _graph() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    z = graph.call_method("cos", (y,))
    graph.output((z, y))
    gm = fx.GraphModule(nn.Module(), graph)
    for node in list(graph.nodes)[:-1]:
        with MODE:
            node.meta["example_value"] = torch.empty(2, 3)
        node.meta["stack_trace"] = f"line of {node.name}"
    return gm


def _keyed(gm: fx.GraphModule) -> Keyed:
    return key.make_key(gm, Options(), None)


def _named(gm: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in gm.graph.nodes}


def _rewritten(gm: fx.GraphModule) -> None:
    """cos(sin(x)) becomes tanh(x.t()).t(), in the name of cos; sin stays, and is given something else."""
    nodes = _named(gm)
    with gm.graph.inserting_before(nodes["sin"]):
        first = gm.graph.call_method("t", (nodes["x"],))
    with gm.graph.inserting_before(nodes["cos"]):
        second = gm.graph.call_function(torch.tanh, (first,))
        last = gm.graph.call_function(torch.ops.aten.t.default, (second,))
    for node, value in ((first, nodes["x"].meta["example_value"].t()), (second, MODE.from_tensor(torch.empty(3, 2)))):
        node.meta.update({**nodes["cos"].meta, "example_value": value})
    last.meta["example_value"] = None
    nodes["cos"].replace_all_uses_with(last)
    gm.graph.erase_node(nodes["cos"])
    nodes["sin"].args = (first,)
    nodes["sin"].meta["example_value"] = MODE.from_tensor(torch.empty(3, 2))


def test_what_was_done_is_done_again() -> None:
    one, other = _graph(), _graph()
    before = _keyed(one)
    _rewritten(one)
    one.recompile()
    edits = record.record_edits(before)
    again = _keyed(other)
    assert again.text == before.text
    record.apply(again, edits, MODE)
    assert described(other) == described(one)
    assert [node.name for node in other.graph.nodes] == ["x", "t", "sin", "tanh", "t_default", "output"]
    assert _named(other)["tanh"].meta["stack_trace"] == "line of cos"
    assert other.code == one.code
    other.graph.lint()


def test_nothing_done_is_no_edit() -> None:
    assert record.record_edits(_keyed(_graph())) == ()


def _new_buffer(gm: fx.GraphModule) -> None:
    gm.register_buffer("more", torch.ones(1))


def _moved(gm: fx.GraphModule) -> None:
    nodes = _named(gm)
    nodes["x"].prepend(nodes["sin"])


def _strange_function(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(_named(gm)["cos"]):
        gm.graph.call_function(print, ("hello",))


def _strange_origin(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(_named(gm)["cos"]):
        gm.graph.call_function(torch.tanh, (_named(gm)["x"],)).meta["stack_trace"] = "from nowhere"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_new_buffer, "kept from call to call"),
        (_moved, "changed places"),
        (_strange_function, "print"),
        (_strange_origin, "not known where the new node tanh is from"),
    ],
)
def test_what_can_not_be_told_is_refused(change: Any, said: str) -> None:
    gm = _graph()
    keyed = _keyed(gm)
    change(gm)
    with pytest.raises(Unkeyed, match=said):
        record.record_edits(keyed)


def _graph_key(change: Callable[[fx.GraphModule], Any] | None = None) -> fx.GraphModule:
    """x, y -> (softmax(x · weight), body(y)), as Dynamo writes it."""
    body_graph = fx.Graph()
    body_graph.output((body_graph.call_method("cos", (body_graph.placeholder("z"),)),))
    body = fx.GraphModule(nn.Module(), body_graph)
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product = graph.call_function(torch.mul, (x, graph.get_attr("weight")))
    softmax = graph.call_function(torch.softmax, (product,), {"dim": -1})
    wrap = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("wrap_body_0"), y))
    graph.output((softmax, wrap))
    root = nn.Module()
    root.weight, root.wrap_body_0 = nn.Buffer(torch.tensor([0.5, 2.0])), body
    gm = fx.GraphModule(root, graph)
    for module in (gm, gm.wrap_body_0):
        for node in module.graph.nodes:
            if node.op != "output" and not (node.op == "get_attr" and "body" in str(node.target)):
                with MODE:
                    node.meta["example_value"] = torch.empty(2)
            node.meta["stack_trace"] = f'File "model.py", line 1, in forward\n    {node.name}'
            node.meta["nn_module_stack"] = {"140": ("L['self'].layer", nn.Module)}
    if change is not None:
        change(gm)
    return gm


def _node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def _text(gm: fx.GraphModule, options: Options | None = None, known: Any = None) -> str:
    return key.make_key(gm, options or Options(), known).text


def _other_value(gm: fx.GraphModule) -> None:
    with MODE:
        _node(gm, "x").meta["example_value"] = torch.empty(2, dtype=torch.float64)


def _without_value(gm: fx.GraphModule) -> None:
    del _node(gm, "softmax").meta["example_value"]


def _other_body(gm: fx.GraphModule) -> None:
    _node(gm.wrap_body_0, "cos").target = "sin"


def _in_other_order(gm: fx.GraphModule) -> None:
    _node(gm, "wrap_body_0").append(_node(gm, "softmax"))


CHANGES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "function": lambda gm: setattr(_node(gm, "softmax"), "target", torch.log_softmax),
    "number": lambda gm: setattr(_node(gm, "softmax"), "kwargs", {"dim": 0}),
    "number's type": lambda gm: setattr(_node(gm, "softmax"), "kwargs", {"dim": -1.0}),
    "argument": lambda gm: setattr(_node(gm, "mul"), "args", (_node(gm, "y"), _node(gm, "weight"))),
    "name": lambda gm: setattr(_node(gm, "softmax"), "name", "attention"),
    "value": _other_value,
    "no value": _without_value,
    "an attribute's number": lambda gm: gm.weight.fill_(3.0),
    "an attribute's gradient": lambda gm: gm.weight.requires_grad_(),
    "an attribute's dtype": lambda gm: setattr(gm, "weight", nn.Buffer(torch.tensor([0.5, 2.0]).double())),
    "body": _other_body,
    "order": _in_other_order,
    "line": lambda gm: _node(gm, "mul").meta.update(stack_trace="elsewhere"),
    "module": lambda gm: _node(gm, "mul").meta.update(nn_module_stack={"140": ("L['self'].other", nn.Module)}),
}


def test_a_graph_has_one_key() -> None:
    # Dynamo's own key of a module is its address.
    other = _graph_key(lambda gm: _node(gm, "mul").meta.update(nn_module_stack={"7": ("L['self'].layer", nn.Linear)}))
    assert _text(_graph_key()) == _text(_graph_key()) == _text(other)


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_that_differs_has_another(change: str) -> None:
    assert _text(_graph_key(CHANGES[change])) != _text(_graph_key())


def test_what_else_is_known_and_asked_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        _text(_graph_key()),
        _text(_graph_key(), known=[None, ["causal"]]),
        _text(_graph_key(), Options(strict=True)),
        _text(_graph_key(), Options(lowering="math")),
    ]
    monkeypatch.setattr(torch_caches, "state", lambda devices: sorted(map(str, devices)))
    texts.append(_text(_graph_key()))
    assert len(set(texts)) == len(texts)
    same = (Options(verify=True), Options(dump_dir="x"), Options(check_invariants=False), Options(cache_rewrites=False))
    assert {_text(_graph_key(), options) for options in same} == {texts[-1]}


def test_large_attributes_go_by_what_passes_see_of_them() -> None:
    def large(number: float) -> Callable[[fx.GraphModule], Any]:
        return lambda gm: setattr(gm, "weight", nn.Buffer(torch.full((100,), number)))

    assert _text(_graph_key(large(1.0))) == _text(_graph_key(large(2.0)))


@pytest.mark.parametrize(
    "held", [object(), nn.Linear(1, 1), torch.empty(2).to_sparse()], ids=lambda x: type(x).__name__
)
def test_other_attributes_have_no_key(held: Any) -> None:
    def change(gm: fx.GraphModule) -> None:
        del gm.weight
        gm.weight = held

    with pytest.raises(Unkeyed, match="the graph reads weight, which is"):
        _text(_graph_key(change))


def test_modules_that_dynamo_did_not_look_into_have_no_key() -> None:
    def change(gm: fx.GraphModule) -> None:
        gm.add_submodule("layer", nn.Linear(2, 2))
        with gm.graph.inserting_before(_node(gm, "softmax")):
            gm.graph.call_module("layer", (_node(gm, "x"),))

    with pytest.raises(Unkeyed, match="calls a module"):
        _text(_graph_key(change))


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


# Programs of the fuzzer's grammar.
SEED = 18
QUICK = ("views", "masks written", "several masks", "score kinds", "caller writes", "checkpoints")


def _checked(program: Program) -> list[Seen]:
    with warnings.catch_warnings(), watched() as seen:
        warnings.simplefilter("ignore")
        comparing.check(program)
    return seen


def _hold(rule: str, examples: int, *, dynamic: bool = False) -> Counter[str]:
    """Whether a second compilation of each program of a rule is the first one again."""
    counted: Counter[str] = Counter()
    for drawn in searching.draw(Kind(rule=rule), seed=SEED, examples=examples + 1)[1:]:
        # A check of the first call wants the passes.
        program = dataclasses.replace(drawn, verify=False, others=(), dynamic=drawn.dynamic or dynamic)
        try:
            first = _checked(program)
        except (Left, Wrong):  # The fuzzer's matter, not the cache's.
            counted["left"] += 1
            continue
        for before, after in zip(first, _checked(program), strict=True):
            if not before.ran or before.report.not_kept:
                counted["not kept"] += 1
                continue
            assert (after.report.from_cache, after.ran) == (True, ()), program.source
            assert after.code == before.code, program.source
            assert after.nodes == before.nodes, program.source
            assert after.guards == before.guards, program.source
            assert without_times(after.report) == without_times(before.report), program.source
            counted["graphs"] += 1
    return counted


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("rule", QUICK)
def test_programs_of_some_rules(rule: str) -> None:
    assert _hold(rule, 2)["graphs"] >= 1


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("rule", QUICK)
def test_programs_with_symbolic_sizes(rule: str) -> None:
    assert _hold(rule, 4, dynamic=True)["graphs"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_programs_of_every_rule(rule: str, dynamic: bool) -> None:
    counted = _hold(rule, 10, dynamic=dynamic)
    assert counted["graphs"] >= (3 if dynamic else 5), counted
