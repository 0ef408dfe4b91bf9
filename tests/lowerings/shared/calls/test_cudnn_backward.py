from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_compiler import Fp8Recipe
from attn_compiler.lowerings.shared.calls import cudnn_backward
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, dense, make_spec, words

H200 = Target.fake(sm=90)


@pytest.mark.parametrize("mask", [MaskSpec(), CAUSAL], ids=["full", "causal"])
def test_it_serves_what_cudnn_does(mask: MaskSpec) -> None:
    assert cudnn_backward.why_not(make_spec(mask=mask), H200) == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(changes=(Softcap(cap=30.0),)), "softcap"),
        (make_spec(mask=dense(2, 1, 128, 128)), "no tensor joins the scores"),
        (make_spec(mask=BOTTOM_RIGHT, seqlen_q=64), "top left"),
        (make_spec(dropout_p=0.1), "no dropout"),
    ],
    ids=["softcap", "mask", "bottom right", "dropout"],
)
def test_what_it_refuses(spec: AttentionSpec, reason: str) -> None:
    assert reason in words(cudnn_backward.why_not(spec, H200))


def test_gradients_lie_as_q_k_and_v_do() -> None:
    spec = make_spec(mask=CAUSAL)
    text = Call(spec=spec, tiles=tile_table.tiles(spec, H200)).to_text()
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 128, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 2, 2))
        out, lse = torch.empty_like(q), torch.empty(2, 8, 128)
        op = torch.ops.attn_compiler.sdpa_cudnn_backward
        *gradients, further = op(out, lse, q, k, v, [], out, lse, text)
        assert [x.stride() for x in gradients] == [q.stride(), k.stride(), v.stride()]
        assert further == []


def test_graphs_are_its_own_and_read_one_layout() -> None:
    """PyTorch tells graphs apart by the bits of dropout's probability, and not by how out and its gradient lie."""
    spec = make_spec(mask=CAUSAL)
    text = Call(spec=spec, tiles=tile_table.tiles(spec, H200)).to_text()
    q = torch.zeros(2, 8, 128, 64, dtype=torch.bfloat16)
    nothing = (q, q, q)
    with mock.patch.object(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", return_value=nothing
    ) as aten:
        cudnn_backward.gradients(q, q[..., 0], q, q, q, [], q, q[..., 0].float(), text)
    dropout = aten.call_args.args[13]
    assert dropout == 0
    assert math.copysign(1, dropout) == -1
    lies = cudnn_backward.grad_out_as_read(q)
    assert lies.stride() == ops.empty_outputs(q, q)[0].stride()


@pytest.mark.gpu
def test_after_a_backward_whose_output_lies_otherwise() -> None:
    """Of SDPA's own, with q, k and v as here: its output lies as q does, ours does not."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper_fp8 is for sm90")
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    upstream = torch.randn_like(tensors[0])
    exact = [x.detach().float().requires_grad_() for x in tensors]
    right = torch.autograd.grad(_causal(*exact), exact, upstream.float())
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        usual = torch.autograd.grad(_causal(*tensors), tensors, upstream)
    options = {"fp8_recipe": Fp8Recipe(), "lowering": "hopper_fp8", "inner": "aot_eager", "strict": True}
    compiled = torch.compile(_causal, backend="attn_compiler", options=options)
    for gradients, most in ((usual, 0.01), (torch.autograd.grad(compiled(*tensors), tensors, upstream), 0.08)):
        for found, wanted in zip(gradients, right, strict=True):
            assert float((found.float() - wanted).norm()) < most * float(wanted.norm())


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
