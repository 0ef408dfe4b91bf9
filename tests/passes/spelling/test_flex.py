"""FlexAttention's calls become kernels where their mods are understood, and stay themselves elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from attn_compiler.passes.spelling import flex
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.added_scores import Alibi
from tests.passes.compiling import CPU_FLASH, Compiled, captured, compiled, mark

B, H, HKV, S, D = 2, 4, 2, 24, 16
Function = Callable[..., Any]
BOTH = {"lowerings": ["sdpa_cpu_flash", "reference"]}
pytestmark = pytest.mark.usefixtures("unfused")


def _qkv(*, heads: int = H, length: int = S, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, n, length, D) for n in (H, heads, heads)]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def check(function: Function, inputs: list[Tensor], *, like: Function | None = None, **options: Any) -> Compiled:
    """Outputs are eager's of `function`, up to float32's rounding, with its strides; gradients those of `like` in float64."""
    run = compiled(function, **{**BOTH, **options})
    got = run(*inputs)
    wanted = function(*(x.detach() for x in inputs))
    assert got.stride() == wanted.stride()
    torch.testing.assert_close(got.detach(), wanted, atol=3e-6, rtol=3e-5)
    if like is not None:
        exact = like(*(x.double() for x in inputs))
        torch.testing.assert_close(got.double(), exact, atol=3e-6, rtol=3e-5)
        leaves = [x for x in inputs if x.requires_grad]
        grads = (torch.autograd.grad(x.sin().sum(), leaves) if leaves else () for x in (got, exact))
        pairs = zip(*grads, strict=True)
        for mine, right in pairs:
            torch.testing.assert_close(mine, right, atol=2e-5, rtol=1e-4)
    return run


def _is_lowered(run: Compiled) -> bool:
    return flex.OPERATION not in run.calls and CPU_FLASH in run.calls


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 5)


# ---- without a block mask -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_plain_call(grad: bool) -> None:
    run = check(flex_attention, _qkv(grad=grad), like=F.scaled_dot_product_attention if grad else None)
    assert run.site.pattern == "flex attention"
    assert run.site.spec.mask.words == "none"
    assert run.site.spec.needs_grad == grad
    assert not run.site.spec.decomposed
    assert _is_lowered(run)


def test_grouped_heads_and_a_scale() -> None:
    run = check(lambda q, k, v: flex_attention(q, k, v, scale=0.1, enable_gqa=True), _qkv(heads=HKV))
    assert run.site.spec.k.shape == (B, HKV, S, D)
    assert run.site.spec.score.scale == 0.1
    assert _is_lowered(run)


def test_one_tensor_for_all() -> None:
    assert _is_lowered(check(lambda q: flex_attention(q, q, q), _qkv()[:1]))


def test_heads_that_were_made_of_a_projection_are_joined_by_a_view() -> None:
    """FlexAttention's output lies as q does, so that this view is none of a copy."""

    def function(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (H, D)).transpose(1, 2)
        return flex_attention(heads, heads, heads).transpose(1, 2).view(x.shape)  # type: ignore[union-attr]

    assert _is_lowered(check(function, [torch.randn(B, S, H * D)]))


def test_bfloat16() -> None:
    inputs = _qkv(dtype=torch.bfloat16)
    run = compiled(flex_attention, **BOTH)
    got = run(*inputs)
    exact = F.scaled_dot_product_attention(*(x.double() for x in inputs))
    eager = flex_attention(*inputs)
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max()  # type: ignore[operator]
    assert got.dtype == torch.bfloat16
    assert run.site.spec.q.dtype == "bfloat16"


def test_in_autocast() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, k, v)

    run = compiled(function, **BOTH)
    got = run(*_qkv())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), F.scaled_dot_product_attention(*_qkv()), atol=2e-2, rtol=2e-2)
    assert run.site.spec.q.dtype == "bfloat16"


def test_sizes_that_vary() -> None:
    def function(x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))

    run = compiled(function, **BOTH)
    for length in (S, 13):
        x = mark(_qkv(length=length)[0], [length])
        torch.testing.assert_close(run(x), F.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert run.site.spec.mask.words == "causal (proved)"
    assert _is_lowered(run)


# ---- score_mod ------------------------------------------------------------------------------------------------------


def test_a_mask_in_score_mod_is_proved() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))

    run = check(function, _qkv(grad=True), like=lambda *x: F.scaled_dot_product_attention(*x, is_causal=True))
    assert run.site.spec.mask.words == "causal (proved)"
    assert _is_lowered(run)


def test_slopes_are_alibi() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i))

    run = check(function, [*_qkv(), torch.rand(H)])
    assert isinstance(run.site.spec.score.proved[0], Alibi)
    assert _is_lowered(run)


def test_softcap_by_the_reference() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: 20 * torch.tanh(s / 20))

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (20 * torch.tanh(q @ k.mT * D**-0.5 / 20)).softmax(-1) @ v

    run = check(function, _qkv(grad=True), like=exact)
    assert run.site.decision.lowering == "reference"
    assert "softcap 20" in run.site.spec.score.words


def test_a_learned_bias_gets_its_gradient() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[b, h, i, j])

    def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    inputs = [*_qkv(grad=True), torch.randn(B, H, S, S, requires_grad=True)]
    run = check(function, inputs, like=exact)
    assert run.site.spec.score.bias is not None
    assert flex.OPERATION not in run.calls


def test_a_tensor_that_is_looked_up_index_by_index() -> None:
    """As Hugging Face's score_mod reads a mask."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + mask[b][0][i][j])

    mask = torch.zeros(B, 1, S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    run = check(function, [*_qkv(), mask])
    assert flex.OPERATION not in run.calls


def test_a_score_mod_that_is_not_understood_stays() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * s)

    run = check(function, _qkv())
    assert not run.report.sites
    (miss,) = run.report.misses
    assert "mul" in miss.reason.observed or "mul" in miss.stopped_at
    assert run.calls.count(flex.OPERATION) == 1
    assert not {"softmax", "matmul"} & set(run.calls)


# ---- block masks ----------------------------------------------------------------------------------------------------


@pytest.mark.in_turns
@pytest.mark.parametrize("sizes", [(None, None), (B, None), (B, H)], ids=["one", "batch", "heads"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_block_mask_of_the_same_graph(sizes: tuple[int | None, int | None], grad: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, block_mask=create_block_mask(_causal, *sizes, S, S, device="cpu"))

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    run = check(function, _qkv(grad=grad), like=exact if grad else None)
    assert run.site.spec.mask.words == "causal (proved)"
    assert _is_lowered(run)


def test_documents_of_more_than_a_block() -> None:
    length = 200

    def function(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Any:
        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (document[b, i] == document[b, j]) & (i >= j)

        return flex_attention(q, k, v, block_mask=create_block_mask(mask_mod, B, None, length, length, device="cpu"))

    document = torch.arange(length).expand(B, length) // 60
    run = check(function, [*_qkv(length=length), document])
    assert "document" in run.site.spec.mask.words
    assert _is_lowered(run)


def test_two_layers_with_one_block_mask() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        block_mask = create_block_mask(_window, None, None, S, S, device="cpu")
        return flex_attention(flex_attention(q, k, v, block_mask=block_mask), k, v, block_mask=block_mask)

    run = check(function, _qkv())
    assert run.report.num_sites == 2
    assert run.calls.count(CPU_FLASH) == 2


# ---- what becomes of the call ---------------------------------------------------------------------------------------


def test_a_site_without_a_lowering_keeps_the_call() -> None:
    run = check(lambda q, k, v: flex_attention(q, k, v), _qkv(), lowerings=["sdpa_flash"])
    assert run.site.decision.lowering == "untouched"
    assert run.calls.count(flex.OPERATION) == 1
    assert not {"softmax", "matmul"} & set(run.calls)


def test_no_kernel_that_reads_the_whole_mask_takes_its_place_unasked() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, block_mask=create_block_mask(_window, None, None, S, S, device="cpu"))

    run = check(function, _qkv(), lowerings=None)
    assert run.site.decision.lowering == "untouched"
    assert "window" in run.site.spec.mask.words
    reasons = [str(reason) for refusal in run.site.decision.refusals for reason in refusal.reasons]
    assert any("an element for each score" in reason for reason in reasons)
    assert flex.OPERATION in run.calls


def _by_length(**further: Any) -> Function:
    return lambda q, k, v: flex_attention(q, k, v, scale=1 / k.shape[-2], **further)


SCALES: dict[str, Function] = {
    "a length's": _by_length(),
    "its root": lambda q, k, v: flex_attention(q, k, v, scale=k.shape[-2] ** -0.5),
    "its root, by torch": lambda q, k, v: flex_attention(q, k, v, scale=0.5 / torch.sym_sqrt(k.shape[-2])),
    "a batch's": lambda q, k, v: flex_attention(q, k, v, scale=0.5 / q.shape[0]),
    "two sizes'": lambda q, k, v: flex_attention(q, k, v, scale=q.shape[-2] / (q.shape[-1] * k.shape[-2] + 1)),
    "a view's": lambda q, k, v: flex_attention(q, k, v, scale=0.5 / q[:, :, 1:].shape[-2]),
    "with a score_mod": _by_length(score_mod=lambda s, b, h, i, j: s + i - j),
    "beside a mask of run time": lambda q, k, v: _by_length(score_mod=lambda s, b, h, i, j: s * (j <= i))(q, k, v),
    "with grouped heads": lambda q, k, v: _by_length(enable_gqa=True)(q, k[:, :HKV], v[:, :HKV]),
    "twice": lambda q, k, v: _by_length()(_by_length()(q, k, v), k, v),
    "in a checkpoint": lambda q, k, v: checkpoint(_by_length(), q, k, v, use_reentrant=False),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", SCALES)
def test_a_scale_of_run_time_is_named_and_no_argument_is_printed(name: str) -> None:
    inputs = _qkv()
    run = compiled(SCALES[name], dynamic=True)
    torch.testing.assert_close(run(*inputs), SCALES[name](*inputs), atol=3e-6, rtol=3e-5)
    assert run.report.misses
    for miss in run.report.misses:
        assert miss.reason.code is Code.FLEX_CALL
        assert "the scale is" in miss.reason.observed
        assert len(miss.reason.observed) < 120
        assert "GraphModule" not in miss.reason.observed
        assert "scale=" in str(miss.reason.remedy)


@pytest.mark.parametrize("scale", [None, lambda q: 1 / q.shape[-1], lambda q: q.shape[-1] ** -0.5])
def test_a_scale_of_a_fixed_head_dim_is_a_number(scale: Callable[[Tensor], float] | None) -> None:
    """Dynamo computes it of symbols with dynamic=True, and FlexAttention itself fixes the head dim."""
    run = compiled(
        lambda q, k, v: flex_attention(q, k, v, scale=None if scale is None else scale(q)), dynamic=True, **BOTH
    )
    inputs = _qkv()
    expected = F.scaled_dot_product_attention(*inputs, scale=None if scale is None else scale(inputs[0]))
    torch.testing.assert_close(run(*inputs), expected, atol=3e-6, rtol=3e-5)
    assert (run.report.num_sites, run.report.num_misses) == (1, 0)


def test_a_float_that_the_caller_gives_is_a_scale_of_run_time() -> None:
    run = compiled(lambda q, k, v, scale: flex_attention(q, k, v, scale=scale), dynamic=True)
    run(*_qkv(), 0.3)
    (miss,) = run.report.misses
    assert "known at run time only" in miss.reason.observed


def test_giving_back_leaves_the_graph_as_it_came() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + h)

    gm, _ = captured(function, *_qkv())
    before = [(node.op, str(node.target), str(node.args)) for node in gm.graph.nodes]
    found = flex.spell_flex(gm)
    assert len(list(gm.graph.nodes)) > len(before)
    flex.give_back(gm, found.spelled)
    gm.graph.lint()
    assert [(node.op, str(node.target), str(node.args)) for node in gm.graph.nodes] == before


def test_what_verification_holds_against_the_model() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, block_mask=create_block_mask(_causal, None, None, S, S, device="cpu"))

    check(function, _qkv(), verify=True)


def test_a_call_in_a_checkpoint() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(flex_attention, q, k, v, use_reentrant=False)

    assert _is_lowered(check(function, _qkv(grad=True), like=F.scaled_dot_product_attention))


@pytest.mark.further
def test_a_model_of_transformers_keeps_its_calls() -> None:
    """It makes its block mask in a graph of its own, so what the mask says is not known where it is used."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, attn_implementation="flex_attention", **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 64, (2, 20))
    run = compiled(lambda ids: model(ids, use_cache=False).logits)
    with torch.no_grad():
        torch.testing.assert_close(run(tokens), model(tokens, use_cache=False).logits)
    misses = [miss for report in run.reports for miss in report.misses]
    assert [(miss.anchor, len(miss.modules)) for miss in misses] == [(flex.OPERATION, 2)]
    assert "from outside of this graph" in misses[0].reason.observed
    assert "attn_implementation='sdpa'" in str(misses[0].reason.remedy)
