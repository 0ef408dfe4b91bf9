"""On a GPU: lengths that change from call to call, forward and backward, of the kernels for Hopper, of Triton's, and of what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

import attn_compiler
from attn_compiler.lowerings import by_name
from attn_compiler.spec.target import Target
from tests.lowerings import any_length
from tests.lowerings.any_length import FORMS, Form

pytestmark = pytest.mark.gpu

#: odd, shorter than a tile, multiples of tiles; the second one makes the graph for all
LENGTHS = (640, 333, 1024, 77, 2111)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("lowering", ["hopper", "triton", None])
def test_one_graph_serves_every_length_after_the_first(lowering: str | None, form: Form, head_dim: int) -> None:
    target = Target.current("cuda")
    reasons = by_name(lowering or "triton").unavailable(target)
    if reasons:
        pytest.skip(str(reasons[0]))
    torch._dynamo.reset()
    attn_compiler.reset()
    options: dict[str, Any] = {"strict": True} | ({} if lowering is None else {"lowering": lowering})

    def compile_(function: Callable[..., Any]) -> Any:
        return torch.compile(function, backend="attn_compiler", options=options)

    any_length.check(
        form, compile_, device="cuda", dtype=torch.bfloat16, head_dim=head_dim, within=0.03, lengths=LENGTHS
    )
    first, others = (report.sites for report in attn_compiler.reports())
    assert [len(first), len(others)] == [1, 1]
    assert isinstance(first[0].spec.seqlen_q, int)
    assert isinstance(others[0].spec.seqlen_q, str)
    chosen = others[0].decision.lowering
    if lowering is not None:
        assert chosen == lowering
        return
    assert others[0].evidence is not None
    assert others[0].evidence.length.startswith("any, chosen as for 4096")
    # No kernel of PyTorch's: they would read a mask for each pair, and take no sinks and no softcap.
    assert chosen != "untouched"
    assert form.name == "causal" or not chosen.startswith("sdpa_")
