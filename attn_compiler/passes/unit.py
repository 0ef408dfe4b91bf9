"""What the pipeline works on: one GraphModule of Dynamo's (the graph itself, or a body nested in it) and what is known of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler import torch_compat, torch_tracing
from attn_compiler.options import Options
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.relevance import target_name
from attn_compiler.passes.site import Miss, Site
from attn_compiler.target import Target


@dataclass(kw_only=True, eq=False)
class Unit:
    """name: "" for the graph itself, else the path of the body. The passes fill in the rest, in the order of PIPELINE.

    current: the module whose site is being worked on, for messages. left_alone: why the whole graph is, if it is.
    targets: by device type, read when first needed.
    """

    graph_module: fx.GraphModule
    name: str
    options: Options
    mode: FakeTensorMode
    mirror: Mirror | None = None
    expanded: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    current: str = ""
    left_alone: str | None = None
    targets: dict[str, Target] = field(default_factory=dict)

    def target(self, device: str) -> Target:
        """The machine that a site on this device type will run on."""
        if device not in self.targets:
            self.targets[device] = Target.current(device)
        return self.targets[device]

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph


def units(graph_module: fx.GraphModule, options: Options, targets: dict[str, Target]) -> list[Unit]:
    """The graph module and every body that is nested in it and holds something that looks like attention."""
    targets = dict(targets)
    found = []
    for name, module in _bodies(graph_module, ""):
        if any(is_anchor_like(node) for node in module.graph.nodes):
            mode = torch_tracing.fake_mode_of_values(examples(module))
            if mode is not None:
                found.append(Unit(graph_module=module, name=name, options=options, mode=mode, targets=targets))
    return found


def _bodies(graph_module: fx.GraphModule, name: str) -> Iterator[tuple[str, fx.GraphModule]]:
    """Depth first, each body once. Backward bodies of autograd.Function have no placeholder values and are left out."""
    yield name, graph_module
    targets = {str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr"}
    for target in sorted(targets):
        body = getattr(graph_module, target, None)
        if isinstance(body, fx.GraphModule) and _has_values(body):
            yield from _bodies(body, f"{name}.{target}" if name else target)


def _has_values(graph_module: fx.GraphModule) -> bool:
    return all("example_value" in n.meta for n in graph_module.graph.nodes if n.op == "placeholder")


def examples(graph_module: fx.GraphModule) -> list[object]:
    return [n.meta.get("example_value") for n in graph_module.graph.nodes if n.op == "placeholder"]


_FUSED_CALLS = ("multi_head_attention", "transformer_encoder_layer_fwd")


def is_anchor_like(node: fx.Node) -> bool:
    """Whether a Dynamo node can hold an anchor. A cheap look at its name, so that other graphs never get a mirror."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = target_name(node)
    softmax = "softmax" in name and "log_softmax" not in name and "gumbel" not in name
    return softmax or "scaled_dot_product_attention" in name or any(call in name for call in _FUSED_CALLS)


def unsupported_tensor(graph_module: fx.GraphModule) -> str | None:
    """The kind of the first input that is more than a plain strided tensor, if there is one: such graphs are left alone."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor):
            kind = tensor_kind(value)
            if kind is not None:
                return f"{node.name} is {kind}"
    return None


def tensor_kind(value: torch.Tensor) -> str | None:
    """What a tensor is besides a plain strided one: a subclass such as DTensor, nested, or sparse; None if it is nothing else."""
    if value.is_nested:
        return "a nested tensor"
    if value.layout != torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    if torch_compat.is_wrapper_subclass(value):
        return f"a {type(value).__name__}"
    return None


def module_path(node: fx.Node) -> str:
    """The module that a Dynamo node comes from, as the model names it: "model.layers.3.self_attn"."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return clean_path(paths[-1]) if paths else "(no module)"


def source_line(node: fx.Node) -> str | None:
    """Where the model's code makes a Dynamo node: "modeling_llama.py:191"."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else None


def clean_path(path: str) -> str:
    """Dynamo's spelling of a module path without its sources and brackets."""
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    path = re.sub(r"_modules\.|modules\.", "", path)
    parts = [p for p in path.split(".") if p not in ("L", "G", "self", "fn", "_orig_mod", "module", "")]
    return ".".join(parts) or "(root)"
