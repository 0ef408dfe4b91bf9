"""One argument of F.scaled_dot_product_attention changed, and masks that only look causal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_compiler
from tests.near_miss.checking import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    SHAPE,
    Case,
    Cases,
    check,
    condition,
    described,
    missed,
    normal,
    qkv,
    refused,
    tensors,
)

CASES = Cases()
attention = F.scaled_dot_product_attention
kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def lengths(queries: int, keys: int, *more: Tensor) -> list[Tensor]:
    kv = (BATCH, HEADS, keys, HEAD_DIM)
    return [*tensors((BATCH, HEADS, queries, HEAD_DIM), kv, kv), *more]


# ---- arguments ------------------------------------------------------------------------------------------------------


@CASES.near_miss(described("scale 0.353553"))
def good(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(described("scale 0", lowering="reference", because="the scale is positive"))
def no_scale_at_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, scale=0.0)


@CASES.near_miss(described("scale -0.3", lowering="reference", because="the scale is positive"))
def negative_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, scale=-0.3)


@CASES.near_miss(described("causal"), inputs=partial(lengths, 3, 6))
def causal_with_fewer_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True)


@CASES.near_miss(described("causal"), inputs=partial(lengths, 6, 3))
def causal_with_more_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True)


@CASES.near_miss(refused("0.5"))
def dropout_left_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, dropout_p=0.5)


@CASES.near_miss(described("scale 0.353553"), inputs=partial(qkv, dtype=torch.float64))
def float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(
    described("scale 0.353553"), inputs=lambda: tensors(SHAPE, (BATCH, 2, *SHAPE[2:]), (BATCH, 1, *SHAPE[2:]))
)
def groups_of_k_and_of_v_differ(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, enable_gqa=True)


@CASES.near_miss(described("scale 0.353553"), inputs=lambda: tensors(SHAPE, (1, 1, *SHAPE[2:]), (BATCH, 1, *SHAPE[2:])))
def k_and_v_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(described("scale 0.353553"), inputs=lambda: tensors(*[SHAPE[1:]] * 3))
def three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(described("scale 0.353553"), inputs=lambda: tensors(*[(2, *SHAPE)] * 3))
def five_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(described("scale 0.353553"), inputs=lambda: tensors(*[SHAPE[2:]] * 3))
def two_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(
    described(lowering="reference", because="head_dim_v 5"), inputs=lambda: tensors(SHAPE, SHAPE, (*SHAPE[:3], 5))
)
def narrower_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(described("bias", lowering="reference"), inputs=lambda: qkv(normal(LENGTH, LENGTH, grad=True)))
def bias_with_a_gradient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attention(q, k, v, attn_mask=bias)


@CASES.near_miss(described("dense bool[2, 1, 1, 6]"), inputs=lambda: qkv(condition(BATCH, 1, 1, LENGTH)))
def padding(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return attention(q, k, v, attn_mask=kept)


@CASES.near_miss(described("scale 0.353553"))
def kernel_chosen_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        return attention(q, k, v)


@CASES.near_miss(described("scale 0.353553"))
def k_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k.detach(), v)


@CASES.near_miss(described("scale 0.353553"), inputs=lambda: tensors(SHAPE, (BATCH, 2, *SHAPE[2:]), SHAPE))
def k_repeated_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        k = k.repeat_interleave(2, 1)
    return attention(q, k, v)


@CASES.near_miss(
    described(lowering="reference", because="observed seqlen_kv 0"),
    inputs=lambda: tensors(SHAPE, *[(BATCH, HEADS, 0, HEAD_DIM)] * 2),
)
def no_key_at_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(*[(2, 2, 4, 5)] * 3), dynamic=True)
def as_many_heads_as_batch_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One symbol for both; a size that is divided by itself is spelled otherwise, and is the same."""
    return attention(q, k, v, scale=0.3)


# ---- masks that are read --------------------------------------------------------------------------------------------


def masked(kept: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, attn_mask=kept)


@CASES.near_miss(described("causal (proved)"))
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(LENGTH)
    return masked(positions[:, None] >= positions, q, k, v)


@CASES.near_miss(described("dense bool"))
def strictly_causal_but_for_the_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(LENGTH)
    return masked((positions[:, None] > positions) | (positions == 0), q, k, v)


@CASES.near_miss(described("dense bool"))
def one_key_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1), q, k, v)


@CASES.near_miss(described("dense bool"))
def causal_backwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(), q, k, v)


@CASES.near_miss(described("dense bool"))
def causal_of_the_transposed_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().mT, q, k, v)


@CASES.near_miss(described("dense bool"), inputs=partial(lengths, 3, 6))
def last_rows_of_a_causal_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[3:], q, k, v)


@CASES.near_miss(described("dense bool"), inputs=lambda: lengths(6, 6))
def last_rows_of_a_longer_causal_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A square again, but its diagonal does not start in a corner."""
    return masked(torch.ones(9, 9, dtype=torch.bool).tril()[-LENGTH:, :LENGTH], q, k, v)


@CASES.near_miss(described("dense bool"), inputs=lambda: tensors(*[(2, 2, 2, HEAD_DIM)] * 3))
def diagonal_over_heads_instead_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(torch.ones(2, 2, dtype=torch.bool).tril()[:, None], q, k, v)


@CASES.near_miss(described("dense bool"))
def positions_that_wrap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A difference in uint8 is never below zero: nothing is masked."""
    positions = torch.arange(LENGTH, dtype=torch.uint8)
    return masked((positions[:, None] - positions) >= 0, q, k, v)


@CASES.near_miss(described("dense bool"))
def difference_that_wraps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(LENGTH)
    return masked((positions[:, None] - positions).to(torch.uint8) >= 0, q, k, v)


@CASES.near_miss(described("dense bool"))
def number_that_wraps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compared with uint8, -1 is 255: nothing is larger, and only the diagonal is left."""
    zeros = torch.zeros(LENGTH, LENGTH, dtype=torch.uint8)
    return masked((zeros > -1) | torch.eye(LENGTH, dtype=torch.bool), q, k, v)


@CASES.near_miss(described("dense bool"), inputs=lambda: tensors(*[(1, 1, 300, 4)] * 3))
def positions_that_stop_counting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A running sum in bfloat16 stays at 256."""
    positions = torch.ones(300, dtype=torch.bfloat16).cumsum(0)
    return masked(positions[:, None] >= positions, q, k, v)


@CASES.near_miss(described("dense bool"), inputs=lambda: tensors(*[(1, 1, 300, 4)] * 3))
def positions_that_are_rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(300).bfloat16().long()
    return masked(positions[:, None] >= positions, q, k, v)


@CASES.near_miss(described("none"))
def truth_values_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """True + True is True, and equal to one."""
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return masked((everything.tril() + everything) == 1, q, k, v)


@CASES.near_miss(described("dense additive"))
def causal_bias_scaled_away(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.full((LENGTH, LENGTH), -1e5).triu(1)
    return ((q @ k.mT * 3e4 + bias) * 1e-5).softmax(-1) @ v


@CASES.near_miss(described("dense additive"))
def causal_bias_that_is_too_small(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(torch.full((LENGTH, LENGTH), -3.0).triu(1), q, k, v)


@CASES.near_miss(described("dense additive"))
def causal_bias_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 - torch.full((LENGTH, LENGTH), 1e9).triu(1)).softmax(-1) @ v


@CASES.near_miss(
    described("dense bool"), inputs=lambda: qkv(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), grad=False)
)
def causal_mask_written_before(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:, 1] = True
    return masked(mask, q, k, v)


@CASES.near_miss(described("dense bool"), inputs=partial(qkv, grad=False))
def diagonal_filled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[:, 0] = True
    mask.fill_diagonal_(True)
    return masked(mask, q, k, v)


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(torch.tensor(2)))
def causal_from_a_number_of_the_input(q: Tensor, k: Tensor, v: Tensor, offset: Tensor) -> Tensor:
    positions = torch.arange(LENGTH)
    return masked(positions[:, None] + offset >= positions, q, k, v)


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(torch.arange(LENGTH).flip(0)))
def causal_in_positions_of_the_input(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return masked(positions[:, None] >= positions, q, k, v)


# ---- PyTorch's own kernels, called by their ops ---------------------------------------------------------------------


@CASES.near_miss(described("scale 0.353553"))
def kernel_of_the_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(q, k, v)[0]  # type: ignore[no-any-return]


@CASES.near_miss(missed("of the kernel's outputs only the attention's is used", "logsumexp is used by"))
def kernel_whose_logsumexp_is_used(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = kernel(q, k, v)
    return out, lse.detach()


@CASES.near_miss(described("scale 0.353553"))
def kernel_whose_logsumexp_nobody_uses_in_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = kernel(q, k, v)
    _ = (lse * 0.5).to(torch.float16)
    return out  # type: ignore[no-any-return]


@CASES.near_miss(described("dense additive float32"), inputs=lambda: qkv(normal(BATCH, 1, LENGTH, LENGTH)))
def kernel_with_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return kernel(q, k, v, attn_mask=mask)[0]  # type: ignore[no-any-return]


@CASES.near_miss(described("causal"), inputs=partial(lengths, 3, 6))
def kernel_causal_with_fewer_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(q, k, v, 0.0, True)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        pytest.param(
            "as many queries as keys",
            lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k[:, :, :4], v[:, :, :4], 0.0, True),
            id="flash",
        ),
        pytest.param(
            "as many queries as keys",
            lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(
                q[:, :, :4], k, v, None, False, 0.0, True
            ),
            id="cudnn",
        ),
        pytest.param(
            "go together",
            lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(q, k[:, :2], v[:, :2], None, False),
            id="heads",
        ),
        pytest.param(
            "go together",
            lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k[:1], v[:1]),
            id="batch",
        ),
        pytest.param(
            "added to the scores",
            lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, torch.ones(*SHAPE[:2], LENGTH, LENGTH, dtype=torch.bool), False
            ),
            id="bool",
        ),
    ],
)
def test_kernels_of_gpus_that_mean_something_else(rule: str, call: Callable[..., tuple[Tensor, ...]]) -> None:
    """They are matched wherever they run. This machine has no such kernel, so only the report is looked at."""
    attn_compiler.reset()
    options: Any = {"inner": "eager", "strict": True}
    compiled = torch.compile(lambda *x: call(*x)[0], backend="attn_compiler", fullgraph=True, options=options)
    with contextlib.suppress(NotImplementedError):
        compiled(*qkv(grad=False))
    (report,) = attn_compiler.reports()
    missed(rule)(report)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda q, k, v: masked(torch.ones(6, 6, dtype=torch.uint8), q, k, v), id="mask dtype"),
        pytest.param(lambda q, k, v: masked(torch.ones(6, 5), q, k, v), id="mask shape"),
        pytest.param(lambda q, k, v: attention(q, k[..., :4], v), id="head dim"),
        pytest.param(lambda q, k, v: attention(q, k[:, :3], v, enable_gqa=True), id="groups"),
        pytest.param(lambda q, k, v: attention(q.long(), k.long(), v.long()), id="whole numbers"),
    ],
)
def test_errors_stay_errors(change: Callable[..., Tensor]) -> None:
    """What SDPA refuses is refused, not computed."""
    options: Any = {"inner": "aot_eager", "strict": True}
    compiled = torch.compile(change, backend="attn_compiler", fullgraph=True, options=options)
    for function in (change, compiled):
        with pytest.raises(RuntimeError):
            function(*qkv(grad=False))
