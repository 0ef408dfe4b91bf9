"""The inner compiler of a graph, with our passes on the graphs of AOTAutograd or without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from attn_compiler.compiling.attempts import StepFailed, step
from attn_compiler.options.options import Options
from attn_compiler.torch_private import compat as torch_compat, inductor as torch_inductor

if TYPE_CHECKING:
    from attn_compiler.lowerings.shared.launching.ahead import Ahead

log = logging.getLogger(__name__)


def _patches(gm: fx.GraphModule) -> dict[str, Any]:
    """Return our own settings of Inductor. GELU before a product of int8 on a CPU has three readers, and none computes it again."""
    is_quantised = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._int_mm.default)
    on_cpu = is_quantised and all(device.type == "cpu" for device in torch_compat.graph_devices(gm))
    return {"realize_opcount_threshold": 8} if on_cpu else {}


@dataclass(frozen=True, kw_only=True)
class Inner:
    """The inner compiler. patches: for Inductor. region: torch.compile's `name=`. ahead: compiles our own kernels."""

    options: Options
    patches: dict[str, Any]
    region: str | None
    ahead: Ahead | None

    def compile_rewritten(self, gm: fx.GraphModule, example_inputs: Sequence[Any], key: str) -> Callable[..., Any]:
        # Not in the pass: it does not run if a cache has the code, which calls these ops all the same.
        if self.options.context_parallel is not None:
            from attn_compiler.context_parallel import halo_ops, merge_ops  # noqa: F401
        from attn_compiler.lowerings.graph_ops import kept, rotary_tables
        from attn_compiler.lowerings.shared.ops.leaf_ops import without_autograd

        def joint_pass(graph: fx.Graph) -> None:
            without_autograd(graph)
            if self.options.keeps_attention:
                kept.keep_attention(graph)
            if self.options.sequence_group is not None:
                from attn_compiler.context_parallel import collectives

                collectives.gather_again(graph, self.options.sequence_group)
            try:
                with step("keep tables of cosines and sines"):
                    rotary_tables.keep_tables(graph)
            except StepFailed as failed:
                failed.warn(self.options, torch_compat.graph_name(), "they are computed where they are read")
            self._compile_ahead(graph)

        return self._compile(gm, example_inputs, key, joint_pass, self._last_pass())

    def _last_pass(self) -> torch_inductor.GraphPass | None:
        group = self.options.sequence_group
        if group is None:
            return None
        from attn_compiler.context_parallel import overlap

        return overlap.passes(group)

    def _compile_ahead(self, graph: fx.Graph) -> None:
        if self.ahead is None:
            return
        try:
            with step("compile kernels ahead of their launches"):
                self.ahead.read(graph)
        except StepFailed as failed:
            failed.warn(self.options, torch_compat.graph_name(), "they are compiled at their first launch")

    def compile_original(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile as the inner compiler alone does, with no pass and no key of ours."""
        return self._compile(gm, example_inputs, None, None)

    def _compile(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        key: str | None,
        joint_pass: torch_inductor.GraphPass | None,
        last_pass: torch_inductor.GraphPass | None = None,
    ) -> Callable[..., Any]:
        if self.options.inner == "inductor":
            given = {"cache_key": key, "joint_pass": joint_pass, "last_pass": last_pass, "region": self.region}
            patches = self.patches if key is None else _patches(gm) | self.patches
            return torch_inductor.compile_with_inductor(gm, example_inputs, patches=patches, **given)  # type: ignore[arg-type]
        if self.patches:
            log.warning("inner=%r ignores Inductor's options: %s", self.options.inner, ", ".join(self.patches))
        return torch_inductor.compile_with_backend(self.options.inner, gm, example_inputs)
