"""Libraries' attention ops: no such library is installed, so ops with their names and arguments stand in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.graph import opaque_calls
from tests.passes.compiling import Compiled, compiled

SCHEMAS = (
    "flash_attn::_flash_attn_other_forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> Tensor",
    "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v) -> Tensor",
    "xformers_flash3::efficient_attention_forward_cutlass(Tensor query, Tensor key, Tensor value) -> Tensor",
    "vllm::unified_attention(Tensor query, Tensor key, Tensor value, str layer_name) -> Tensor",
    "somebodys::fused_attn(Tensor q, Tensor k, Tensor v) -> Tensor",
    "somebodys::mix(Tensor q, Tensor k, Tensor v) -> Tensor",
    "somebodys::attn_scale(Tensor x) -> Tensor",
    "somebodys::attn_backward(Tensor q, Tensor k, Tensor v) -> Tensor",
)


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    made = []
    for schema in SCHEMAS:
        namespace, rest = schema.split("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(rest)
        library.impl(rest.split("(")[0], lambda q, *_: q.clone(), "CompositeExplicitAutograd")
        made.append(library)
    yield
    for library in made:
        library._destroy()


def _run(function: Callable[..., Any]) -> Compiled:
    run = compiled(function)
    q = torch.randn(1, 6, 2, 8)
    torch.testing.assert_close(run(q), function(q))
    return run


@pytest.mark.parametrize(
    ("name", "call", "library", "remedy"),
    [
        ("flash_attn::_flash_attn_other_forward", lambda op, q: op(q, q, q, 1.0, True), "flash_attn", "'sdpa'"),
        ("flash_attn_3::fwd", lambda op, q: op(q, q, q), "flash_attn", "'sdpa'"),
        ("xformers_flash3::efficient_attention_forward_cutlass", lambda op, q: op(q, q, q), "xFormers", "diffusers"),
        ("vllm::unified_attention", lambda op, q: op(q, q, q, "layers.0"), "vLLM", "'sdpa'"),
        ("somebodys::fused_attn", lambda op, q: op(q, q, q), "an op of its own", "'sdpa'"),
    ],
)
def test_a_library_s_attention_is_a_miss_with_a_remedy(
    name: str, call: Callable[..., Tensor], library: str, remedy: str
) -> None:
    namespace, op = name.split("::")
    run = _run(
        lambda q: (
            call(getattr(getattr(torch.ops, namespace), op), q) + call(getattr(getattr(torch.ops, namespace), op), q)
        )
    )
    (miss,) = run.report.misses
    assert (miss.anchor, len(miss.modules)) == (name, 2)
    assert library in miss.reason.observed
    assert remedy in str(miss.reason.remedy)
    assert "no attention was found" not in str(run.report)
    assert miss.source is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda q: torch.ops.somebodys.mix(q, q, q),
        lambda q: torch.ops.somebodys.attn_scale(q),
        lambda q: torch.ops.somebodys.attn_backward(q, q, q),
    ],
    ids=["another name", "one tensor", "a backward"],
)
def test_what_is_no_attention_is_not_told(call: Callable[[Tensor], Tensor]) -> None:
    assert not _run(call).report.misses


def test_kernels_that_took_a_site_s_place_are_not_told() -> None:
    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    for lowering in ("sdpa_cpu_flash", "reference"):
        run = compiled(function, lowering=lowering)
        run(torch.randn(1, 2, 8, 8))
        assert run.site.decision.lowering == lowering


def test_every_library_says_what_helps() -> None:
    for library in opaque_calls.LIBRARIES:
        assert opaque_calls.reason(f"{library.namespaces[0]}::attention").remedy == library.remedy
