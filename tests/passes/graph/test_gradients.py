"""Gradients of a graph: who wants them, and runs of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.graph import gradient_runs, gradients, unit as units_of
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import CPU_FLASH, Compiled, captured, compiled, mark, mirror_of
from tests.passes.graph.test_saved import SHAPE, attend, learned

# A gradient that the model stops must not come back through what is read from further up.
B, H, HKV, S, D = 2, 4, 2, 6, 8
aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def _check(function: Callable[..., Tensor], *shapes: tuple[int, ...], **options: Any) -> Compiled:
    """Output and gradients equal eager's, and None where eager's are."""
    eager, own = _leaves(*shapes), _leaves(*shapes)
    run = compiled(function, **options)
    wanted, got = function(*eager), run(*own)
    torch.testing.assert_close(got, wanted)
    assert got.requires_grad == wanted.requires_grad
    if wanted.requires_grad:
        wanted.sin().sum().backward()
        got.sin().sum().backward()
    for mine, right in zip(own, eager, strict=True):
        assert (mine.grad is None) == (right.grad is None)
        if right.grad is not None:
            torch.testing.assert_close(mine.grad, right.grad)
    return run


Q, KV = (B, H, S, D), (B, HKV, S, D)


def test_a_learned_bias_of_scores_without_a_gradient() -> None:
    """Found by the fuzzer: PyTorch's CPU flash refuses a mask that requires a gradient, also where nobody asks for it."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT + bias
        with torch.no_grad():
            scores = scores * 1.5
        return scores.softmax(-1) @ v.detach() + bias.sum()

    run = _check(function, Q, Q, Q, (1, 1, S, S), lowering="sdpa_cpu_flash")
    assert run.report.num_sites == 1


def test_weights_made_without_gradients() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            weights = F.softmax(q @ k.mT, -1)
        return weights @ v

    run = _check(function, Q, Q, Q)
    assert CPU_FLASH not in run.calls
    (miss,) = run.report.misses
    assert miss.reason.rule == "the gradient of the output reaches the scores"


def test_weights_detached() -> None:
    run = _check(lambda q, k, v: F.softmax(q @ k.mT, -1).detach() @ v, Q, Q, Q)
    assert CPU_FLASH not in run.calls


@pytest.mark.parametrize(
    "make",
    [lambda k: k.repeat_interleave(2, 1), lambda k: k.repeat_interleave(2, 1) * 0.5],
    ids=["repeated", "repeated and scaled"],
)
def test_keys_repeated_without_gradients_get_none(make: Callable[[Tensor], Tensor]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            repeated = make(k)
        return F.softmax(q @ repeated.mT, -1) @ v

    run = _check(function, Q, KV, Q)
    assert CPU_FLASH in run.calls
    assert not run.site.spec.k.requires_grad


def test_bias_copied_without_gradients_is_a_mask() -> None:
    def function(q: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            mask = bias.expand(B, -1, -1, -1).contiguous()
        return F.softmax(q @ q.mT * 0.25 + mask, -1) @ q

    run = _check(function, Q, (1, H, S, S), lowerings=["math"])
    assert run.site.spec.score.bias is None
    assert run.site.decision.lowering == "math"


def test_bias_with_a_gradient_is_a_bias() -> None:
    run = _check(lambda q, bias: F.softmax(q @ q.mT * 0.25 + bias, -1) @ q, Q, (1, H, S, S))
    assert run.site.spec.score.bias is not None


def test_whole_attention_without_gradients_is_lowered_inside_of_it() -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        with torch.no_grad():
            k = kv.repeat_interleave(2, 1)
            out = sdpa(q, k, k)
        return out + q

    run = _check(function, Q, KV)
    assert not run.site.spec.needs_grad
    assert run.site.spec.k.shape == KV
    assert CPU_FLASH in run.calls


def test_gradients_switched_on_again_inside() -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        with torch.no_grad():
            scaled = kv * 2
            with torch.enable_grad():
                out = sdpa(q, scaled.repeat_interleave(2, 1), scaled.repeat_interleave(2, 1))
        return out

    run = _check(function, Q, KV)
    assert run.site.spec.needs_grad
    assert run.site.spec.q.requires_grad
    assert not run.site.spec.k.requires_grad


def test_grad_mode_set_for_good() -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        first = sdpa(q, k, k)
        torch.set_grad_enabled(True)
        return sdpa(q, k, k) + first

    run = _check(function, Q, Q)
    needs = {site.spec.needs_grad for site in run.report.sites}
    assert needs == {False, True}
    assert run.calls.count(CPU_FLASH) == 2


def test_a_mask_is_combined_once_in_each_grad_mode() -> None:
    """Made under no_grad, it would take the gradient from the layers outside."""

    def layer(x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(x @ x.mT * 0.25 + bias + mask, -1) @ x

    def function(x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            first = layer(x, bias, mask)
        return layer(layer(x, bias, mask), bias, mask) + first

    run = compiled(function, lowering="reference")
    eager, own = (_leaves(Q, (1, H, S, S), (B, 1, S, S)) for _ in range(2))
    for leaves, compute in ((eager, function), (own, run)):
        compute(*leaves).sin().sum().backward()
    torch.testing.assert_close([t.grad for t in own], [t.grad for t in eager], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_called_without_gradients_though_parameters_want_them(mode: Callable[[], torch.no_grad]) -> None:
    layer = torch.nn.Linear(H * D, 3 * H * D)

    def function(x: Tensor) -> Tensor:
        q, k, v = layer(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return sdpa(q, k, v)

    x = torch.randn(B, S, H * D)
    run = compiled(function)
    with mode():
        torch.testing.assert_close(run(x), function(x))
    assert not run.site.spec.needs_grad
    assert CPU_FLASH in run.calls


def test_inference_mode_inside_of_the_graph() -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        with torch.inference_mode():
            k = kv.repeat_interleave(2, 1)
            out = sdpa(q, k, k)
        return q + out

    run = _check(function, Q, KV)
    assert not run.site.spec.needs_grad
    assert CPU_FLASH in run.calls


def test_sinks_are_found_without_gradients_though_they_want_one() -> None:
    sinks = torch.randn(H, requires_grad=True)

    def function(q: Tensor) -> Tensor:
        column = sinks.view(1, H, 1, 1).expand(B, H, S, 1)
        return F.softmax(torch.cat([q @ q.mT, column], -1), -1)[..., :-1] @ q

    q = torch.randn(Q)
    run = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(run(q), function(q))
    assert run.site.spec.score.sinks is not None


def test_known_stops_below_and_stopped_at() -> None:
    def function(x: Tensor) -> Tensor:
        kept = x.sin()
        with torch.no_grad():
            lost = kept.cos()
        return kept + lost.tan()

    (x,) = _leaves((2, 3))
    mirror = mirror_of(function, x)
    of_target = {node.target: node for node in mirror.graph.nodes}
    targets = (aten.sin.default, aten.cos.default, aten.tan.default, aten.add.Tensor)
    sin, cos, tan, out = (of_target[target] for target in targets)
    assert [gradients.carries(mirror, n) for n in (sin, cos, tan, out)] == [True, False, False, True]
    assert gradients.stops_below(mirror, sin, [tan, cos])
    assert not gradients.stops_below(mirror, sin, [out])
    assert not gradients.stops_below(mirror, cos, [tan])
    assert gradients.stopped_at(mirror, [out, tan, cos, sin]) is cos
    assert gradients.stopped_at(mirror, [sin, out]) is None


# What autograd saves of a few nodes.


def saved_inputs(function: Callable[..., Any], *inputs: Tensor) -> set[str]:
    """The names of the inputs whose memory autograd saves for the function."""
    gm, _ = captured(function, *inputs)
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    found = gradient_runs.run_on_fakes(nodes, mode)
    assert found is not None
    return {str(n.name).strip("l_") for n in gm.graph.nodes if n.op == "placeholder" and found.saves(n)}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (attend, {"q", "k", "v"}),
        (lambda q, k, v: attend(q * 2, k, v), {"k", "v"}),
        (lambda q, k, v: attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {"k", "v"}),
        (lambda q, k, v: attend(q.detach(), k, v), {"q", "v"}),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), {"q", "k", "v"}),
        (lambda q, k, v: attend(q, k.view(SHAPE), v), {"q", "k", "v"}),
    ],
    ids=["products", "scaled", "copied by the product", "without a gradient of q", "a kernel", "a view"],
)
def test_what_the_model_saves(function: Callable[..., Any], names: set[str]) -> None:
    assert saved_inputs(function, *learned(SHAPE, SHAPE, SHAPE)) == names


def test_a_mask_is_saved_where_it_chooses_and_not_where_it_is_added() -> None:
    q = torch.randn(SHAPE, requires_grad=True)
    scores, mask = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(6, 6)
    assert saved_inputs(lambda x, m: x + m, scores, mask) == set()
    assert saved_inputs(lambda x, m: torch.where(m, x, 0.0), scores, mask > 0) == {"m"}
    assert "m" in saved_inputs(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), q, mask)


def test_what_can_not_be_run_is_not_known() -> None:
    """Then nothing counts as saved by the model, and everything as saved by a kernel."""
    gm, _ = captured(lambda x: x + 1, torch.randn(3, requires_grad=True))
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor) or [
        n for n in gm.graph.nodes if n.op == "call_function"
    ]
    node.args = (*node.args, "no third one", "nor a fourth")
    assert gradient_runs.run_on_fakes([node], mode) is None


@pytest.mark.parametrize("dynamic", [(), (0, 2)], ids=["known", "symbolic"])
def test_alike_sites_are_run_once(dynamic: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first and the third site the keys are not saved: the product copies them. The second one is alike but for that."""

    def three(a: Tensor, b: Tensor, c: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(a * 2, a.mT.contiguous().mT, v), attend(b * 2, b, v), attend(c * 2, c.mT.contiguous().mT, v)

    gm, _ = captured(three, *(mark(x, dynamic) for x in learned(SHAPE, SHAPE, SHAPE, SHAPE)))
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    ends = [0, *(i + 1 for i, n in enumerate(calls) if "matmul" in str(n.target) and "softmax" in str(n.args[0]))]
    sites = [calls[i:j] for i, j in itertools.pairwise(ends)]
    assert len(sites) == 3
    ran: list[int] = []
    run = gradient_runs._run

    def watched(nodes: Any, mode: Any) -> Any:
        ran.append(len(nodes))
        return run(nodes, mode)

    plain = [gradient_runs.run_on_fakes(nodes, mode) for nodes in sites]
    monkeypatch.setattr(gradient_runs, "_run", watched)
    known: dict[Any, gradient_runs.AlikeRun] = {}
    for one, other in zip([gradient_runs.run_on_fakes(nodes, mode, known) for nodes in sites], plain, strict=True):
        assert one is not None
        assert other is not None
        assert [one.saves(n) for n in gm.graph.nodes] == [other.saves(n) for n in gm.graph.nodes]
    assert len(ran) == 2


def test_hooks_of_others_see_nothing() -> None:
    """A checkpoint around compiled code counts what is saved."""
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        x = torch.randn(3, requires_grad=True)
        found = torch_tracing.saved_for_backward(lambda: x.exp())
    assert len(found) == 1
    assert not seen
