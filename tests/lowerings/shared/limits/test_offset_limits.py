"""What 32 bits can't count is refused by name; and on a GPU, what is not refused is right."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.limits import offset_limits
from attn_compiler.spec.target import Target
from tests.lowerings import specs
from tests.lowerings.fa4.test_lowering import H200 as WITH_FA4

H200 = Target.fake(sm=90)
LARGE: dict[str, Any] = {"batch": 33, "heads": 32, "heads_kv": 32, "seqlen_q": 32768, "seqlen_kv": 32768}


def why_not(name: str, spec: Any, target: Target = H200) -> str:
    return "; ".join(map(str, by_name(name).why_not(spec, target)))


def test_what_cute_can_not_count_is_refused() -> None:
    assert "offsets are of 32 bits" in why_not("fa4", specs.make_spec(**LARGE), WITH_FA4)
    assert not offset_limits.check_spans(specs.make_spec(**LARGE | {"batch": 32}))
    spec = specs.make_spec()
    far = dataclasses.replace(spec, k=dataclasses.replace(spec.k, strides=(2**31, 8192, 64, 1)))
    (reason,) = offset_limits.check_spans(far)
    assert reason.observed == f"k {2**31 + 7 * 8192 + 127 * 64 + 64}"
    assert not offset_limits.check_spans(specs.make_spec(**LARGE | {"batch": "s0"}))


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"mask": specs.dense(1, 1, 46344, 46344)}, True),
        ({"mask": specs.dense(46344, 46344)}, True),
        ({"mask": specs.dense(1, 1, 1, 46344)}, False),
        ({"mask": specs.CAUSAL}, False),
        ({"mask": specs.CAUSAL, "dropout_p": 0.5}, True),
    ],
)
def test_where_a_row_of_scores_begins(given: dict[str, Any], is_refused: bool) -> None:
    spec = specs.make_spec(batch=1, seqlen_q=46344, seqlen_kv=46344, **given)
    assert ("pairs of a head" in why_not("sdpa_efficient", spec)) is is_refused


def test_strides_of_the_efficient_kernel() -> None:
    spec = specs.make_spec()
    far = dataclasses.replace(spec, q=dataclasses.replace(spec.q, strides=(64, 2**31, 128, 1)))
    assert "strides of heads and positions" in why_not("sdpa_efficient", far)
    assert why_not("sdpa_efficient", spec) == ""


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def emptied() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def far_apart(x: Tensor) -> Tensor:
    """The same numbers with batch rows 4 GB apart: the second one lies beyond 2^31 elements."""
    stride = 2**31 - 2**31 % 1024 + 1024
    memory = torch.empty(stride + x[0].numel(), dtype=x.dtype, device=x.device)
    batch_row = x[0].stride()
    return memory.as_strided(x.shape, (stride, *batch_row)).copy_(x)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    "lowering", ["triton", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "cudnn", "fa4", "hopper_fp8", "triton_fp8"]
)
@pytest.mark.usefixtures("emptied")
def test_batch_rows_beyond_32_bits(lowering: str) -> None:
    """Forward and gradients of k that reaches beyond: right, or refused by name."""
    from attn_compiler import Fp8Recipe

    target = Target.current("cuda")
    if by_name(lowering).unavailable(target):
        pytest.skip("not on this machine")
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("takes 24 GB")
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda").bfloat16().transpose(1, 2) for _ in "qkv")
    options: dict[str, Any] = {"lowering": lowering, "strict": True}
    options |= {"fp8_recipe": Fp8Recipe(force=True)} if "fp8" in lowering else {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled: Any = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    found = []
    for far in (k, far_apart(k)):
        leaves = [x.detach().requires_grad_() for x in (q, far, v)]
        try:
            out = compiled(*leaves)
        except Exception as refused:
            if "32 bits" in str(refused):
                return
            raise
        found.append([out, *torch.autograd.grad(out.float().sum(), leaves)])
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)
