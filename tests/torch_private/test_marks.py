"""The marks on what a checkpoint made, as PyTorch puts them there and as it reads them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_compiler.torch_private import compat as torch_compat, marks

aten = torch.ops.aten
#: what the function below calls in its checkpoint, and around it
INSIDE, OUTSIDE = aten.sigmoid.default, aten.tanh.default


class Parted:
    """A backend that looks at the traced graph, marks `saved`, and keeps what becomes of it.

    left: of each op, whether it is left to the partitioner. policies: of each body, whether it has one of its own.
    """

    def __init__(self, saved: object = None) -> None:
        self.saved = saved
        self.left: dict[object, bool] = {}
        self.policies: list[bool] = []
        self.parts: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.policies = [marks.has_policy(body) for body in torch_compat.graph_modules(gm) if body is not gm]
        kept = make_boxed_compiler(self._kept)
        return aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=self._parted)(gm, inputs)

    def _kept(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.parts.append(gm)
        return gm

    def _parted(self, gm: fx.GraphModule, inputs: Any, **more: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self.left.setdefault(node.target, marks.is_left_to_partitioner(node))
            if node.target is self.saved:
                marks.must_save(node)
        return min_cut_rematerialization_partition(gm, inputs, **more)

    def calls(self, target: Any) -> list[int]:
        """Of an op, in the forward and in the backward."""
        return [len(part.graph.find_nodes(op="call_function", target=target)) for part in self.parts]


def _run(backend: Parted, policy: CheckpointPolicy | None = None, *, use_reentrant: bool = False) -> tuple[Tensor, ...]:
    more: dict[str, Any] = {}
    if policy is not None:
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)

    def inside(x: Tensor) -> Tensor:
        return x.sigmoid().exp() * 2

    def function(x: Tensor) -> Tensor:
        made: Tensor = checkpoint(inside, x.tanh(), use_reentrant=use_reentrant, **more)
        return made.sum()

    torch._dynamo.reset()
    inputs = [torch.linspace(-1, 1, 12).requires_grad_() for _ in range(2)]
    torch.compile(function, backend=backend, fullgraph=True)(inputs[0]).backward()  # type: ignore[no-untyped-call]
    function(inputs[1]).backward()  # type: ignore[no-untyped-call]
    grads = tuple(x.grad for x in inputs if x.grad is not None)
    torch.testing.assert_close(*grads)
    return grads


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_left_to_the_partitioner(use_reentrant: bool) -> None:
    backend = Parted()
    _run(backend, use_reentrant=use_reentrant)
    assert (backend.left[INSIDE], backend.left[OUTSIDE]) == (True, False)
    assert backend.calls(INSIDE) == [1, 1]
    assert backend.policies == [False]


def test_what_must_be_saved_is_not_computed_again() -> None:
    backend = Parted(INSIDE)
    _run(backend)
    assert backend.calls(INSIDE) == [1, 0]
    assert backend.calls(aten.exp.default) == [1, 1]


@pytest.mark.parametrize(
    ("policy", "is_left"),
    [
        (CheckpointPolicy.PREFER_RECOMPUTE, True),
        (CheckpointPolicy.MUST_RECOMPUTE, False),
        (CheckpointPolicy.MUST_SAVE, False),
    ],
)
def test_a_users_policy_is_seen(policy: CheckpointPolicy, is_left: bool) -> None:
    backend = Parted()
    _run(backend, policy)
    assert backend.left[INSIDE] == is_left
    assert backend.policies == [True]
