from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler.lowerings import sdpa_cudnn_backward, triton_tiles_table
from attn_compiler.lowerings.triton_plan import Call
from attn_compiler.masks import MaskSpec
from attn_compiler.scores import Softcap
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, dense, make_spec, words

H200 = Target.fake(sm=90)


@pytest.mark.parametrize("mask", [MaskSpec(), CAUSAL], ids=["full", "causal"])
def test_it_serves_what_cudnn_does(mask: MaskSpec) -> None:
    assert sdpa_cudnn_backward.why_not(make_spec(mask=mask), H200) == []


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
    assert reason in words(sdpa_cudnn_backward.why_not(spec, H200))


def test_gradients_lie_as_q_k_and_v_do() -> None:
    spec = make_spec(mask=CAUSAL)
    text = Call(spec=spec, tiles=triton_tiles_table.tiles(spec, H200)).to_text()
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 128, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 2, 2))
        out, lse = torch.empty_like(q), torch.empty(2, 8, 128)
        op = torch.ops.attn_compiler.sdpa_cudnn_backward
        *gradients, further = op(out, lse, q, k, v, [], out, lse, text)
        assert [x.stride() for x in gradients] == [q.stride(), k.stride(), v.stride()]
        assert further == []
