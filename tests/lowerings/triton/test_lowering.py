"""The Triton lowering without its kernels: what it refuses, and that its nodes and operands are the attention that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.lowerings.triton.lowering import TritonAttention
from attn_compiler.spec.target import Target
from tests import cases
from tests.interpreted_target import triton_interpreted
from tests.lowerings import any_length, emitting, plan_math
from tests.lowerings.specs import make_spec, words
from tests.passes.compiling import Compiled, compiled, mark

H200 = Target.fake()
INTERPRETED = Target.fake(device="cpu", triton_interpreted=True)
TRITON = TritonAttention()


# ---- the machine --------------------------------------------------------------------------------------------------


# ---- what it takes ------------------------------------------------------------------------------------------------


def test_demands_aligned_strides() -> None:
    demand = TRITON.demand(make_spec())
    assert (demand.last_stride_one, demand.alignment, demand.zero_strides) == (True, 16, True)


# ---- what it emits ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _stand_in() -> Iterator[None]:
    """The leaf op, spelled out in PyTorch's own ops: kernels have tests of their own."""
    library = plan_math.define("stand_in")
    with mock.patch.object(torch.ops.attn_compiler, "triton", torch.ops.stand_in.triton, create=True):
        yield
    del library


#: without dropout, which no reference has, and without two tensors for one place
CASES = [case for case in cases.CASES if not case.dropout_p and not (case.mask and case.bias)]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_computes_the_attention(case: cases.Case) -> None:
    if case.dtype == torch.float64:
        pytest.skip("no kernel computes in float64")
    inputs = cases.build(case, needs_grad=False)
    reasons = words(TRITON.why_not(inputs.spec, INTERPRETED))
    # The stand-in is no interpreter.
    assert not reasons or (case.dtype == torch.bfloat16 and "interpreter" in reasons)
    found = emitting.emit(TRITON, inputs)(*emitting.arguments(inputs))
    expected = emitting.emit(by_name("reference"), inputs)(*emitting.arguments(inputs))
    assert found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), atol=1e-5 if case.dtype == torch.float32 else 2e-2)


def test_the_call_says_all_that_was_decided() -> None:
    inputs = cases.build(next(case for case in cases.CASES if case.mask is not None))
    module = emitting.emit(TRITON, inputs)
    (leaf,) = [n for n in module.graph.nodes if n.target is torch.ops.stand_in.triton.default]
    call = Call.from_text(leaf.args[4])
    assert call.spec == inputs.spec
    assert call.tiles.forward.queries % 32 == 0


# ---- from a model's code ------------------------------------------------------------------------------------------


@pytest.fixture
def _interpreted() -> Iterator[None]:
    with triton_interpreted():
        yield


def _padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Two layers that mask alike: causal from the end, and padding."""
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    queries = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_kv - seqlen_q)
    mask = (torch.arange(seqlen_kv, device=q.device) <= queries) & padding[:, None, None, :].bool()
    first = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return torch.nn.functional.scaled_dot_product_attention(first, k, v, attn_mask=mask)


def _tensors(seqlen_q: int, seqlen_kv: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator) for n in (seqlen_q, seqlen_kv, seqlen_kv))
    padding = torch.ones(2, seqlen_kv, dtype=torch.int64)
    padding[0, -3:] = 0
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), padding]


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_padded_model_forward_and_backward(dynamic: bool) -> None:
    function = compiled(_padded, lowering="triton", verify=True)
    for lengths in ((9, 21), (40, 130), (70, 200)) if dynamic else ((40, 530),):
        given, own = ([mark(t, lengths) if dynamic else t for t in _tensors(*lengths)] for _ in range(2))
        found, expected = function(*given), _padded(*own)
        assert torch.allclose(found, expected, atol=1e-5)
        found.square().sum().backward()
        expected.square().sum().backward()
        for ours, theirs in zip(given[:3], own[:3], strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)
    assert len(function.graphs) == 1
    assert function.site.decision.lowering == "triton"
    # Both layers read the same lists, and nothing is left of the model's own mask.
    assert function.calls.count("tile_lists") == 2
    assert function.calls.count("triton") == 2
    assert "scaled_dot_product_attention" not in function.calls


@pytest.mark.in_turns(3)
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("form", any_length.FORMS, ids=lambda form: form.name)
def test_one_graph_serves_every_length_after_the_first(form: any_length.Form) -> None:
    found: list[Compiled] = []

    def compile_(function: Callable[..., Any]) -> Compiled:
        found.append(compiled(function, lowering="triton"))
        return found[0]

    any_length.check(form, compile_, device="cpu", dtype=torch.float32, head_dim=16, within=1e-5)
    assert [len(report.sites) for report in found[0].reports] == [1, 1]
    sites = [report.sites[0] for report in found[0].reports]
    assert [isinstance(site.spec.seqlen_q, int) for site in sites] == [True, False]
    assert {site.decision.lowering for site in sites} == {"triton"}
    assert sites[1].spec.mask.reason is None


def _assert_same(mine: Any, eager: Any, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Outputs and gradients of two calls."""
    found, expected = mine(*ours), eager(*theirs)
    assert torch.allclose(found, expected, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-4)


def _positioned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    bias = table[distance.clamp(-4, 4) + 4].permute(2, 0, 1)[None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.usefixtures("_interpreted")
def test_a_learned_table_is_gathered_once_for_each_distance() -> None:
    def given() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [*_tensors(9, 21)[:3], torch.randn(9, 3).requires_grad_()]

    function = compiled(_positioned, lowering="triton")
    _assert_same(function, _positioned, given(), given())
    assert str(function.site.spec.score.added).startswith("relative bias table[f(k - q), h]")
    # And once more into the copies that the kernels read.
    assert (function.calls.count("gathered"), function.calls.count("index")) == (1, 1)


def _counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """A cache's length is counted up after the mask was made of it, and before the attention."""
    mask = torch.arange(k.shape[2]) <= filled
    filled.add_(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None, None])


@pytest.mark.usefixtures("_interpreted")
def test_a_length_that_is_counted_up_is_read_as_it_was() -> None:
    q, k, v, _ = (x.detach() for x in _tensors(1, 21))
    function = compiled(_counted, lowering="triton", verify=True)
    for length in (0, 7):
        ours, theirs = torch.tensor(length), torch.tensor(length)
        assert torch.allclose(function(q, k, v, ours), _counted(q, k, v, theirs), atol=1e-5)
        assert torch.equal(ours, theirs)
    assert "keys up to filled" in function.site.spec.mask.words
    assert function.site.spec.mask.out_of_reach == ()


def _of_one_tensor(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """DeepSeek V4: what is read as keys is read as values, too."""
    return torch.nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("is_one", [True, False])
def test_keys_that_are_the_values_are_read_once(is_one: bool) -> None:
    def given() -> list[torch.Tensor]:
        q, k, *_ = _tensors(70, 70)
        return [q, k[:, :1].detach().requires_grad_()]

    function = compiled(_of_one_tensor if is_one else lambda q, kv: _of_one_tensor(q, kv * 1.0), lowering="triton")
    _assert_same(function, _of_one_tensor, given(), given())


def _beside_a_table(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Two layers of a vision model, which gather one bias."""
    at = torch.arange(k.shape[2])
    bias = table[(at[:, None] * 5 + at * 3) % len(table)].permute(2, 0, 1)[None]
    once = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return torch.nn.functional.scaled_dot_product_attention(once, k, v, attn_mask=bias)


@pytest.mark.usefixtures("_interpreted")
def test_rows_of_a_learned_bias_are_copied_once_for_all_layers() -> None:
    def given() -> list[torch.Tensor]:
        q, *_ = _tensors(133, 133)
        k, v = (torch.randn_like(q).detach().requires_grad_() for _ in range(2))
        return [q, k, v, torch.randn(9, q.shape[1]).requires_grad_()]

    torch.manual_seed(0)
    ours = given()
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    function = compiled(_beside_a_table, lowering="triton")
    _assert_same(function, _beside_a_table, ours, theirs)
    assert function.calls.count("slice_scatter") == 1
    assert any("rows of 144 numbers" in note for note in function.report.sites[0].notes)
