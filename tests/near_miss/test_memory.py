"""One tensor written in place, or seen through another view, before, inside or after an attention; several attentions at once."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.near_miss.checking import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    SHAPE,
    Case,
    Cases,
    check,
    described,
    missed,
    normal,
    plain,
    qkv,
    tensors,
)

CASES = Cases()
FOLLOWED = "every axis and every step of the scores can be followed"
RESHAPED = "no tensor of the attention changes its shape in place"

#: (B, S, H, D): a kernel's output keeps that order in memory, where the model's own product makes (B, H, S, D)
BSHD = (BATCH, LENGTH, HEADS, HEAD_DIM)


def positions_first() -> list[Tensor]:
    return tensors(BSHD, BSHD, BSHD)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def attend_bshd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*(x.transpose(1, 2) for x in (q, k, v)))


# ---- operands -------------------------------------------------------------------------------------------------------


@CASES.near_miss(missed(FOLLOWED, "written in place"), inputs=plain)
def k_written_between_the_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).softmax(-1)
    k.zero_()
    return weights @ v


@CASES.near_miss(missed(FOLLOWED, "written in place"), inputs=plain)
def k_written_through_a_view_between_the_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = k[:, :, :1]
    weights = (q @ k.mT * 0.3).softmax(-1)
    first.add_(1)
    return weights @ v


@CASES.near_miss(missed(FOLLOWED, "written in place"), inputs=plain)
def k_written_by_an_activation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    F.relu(k, inplace=True)
    return scores.softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "written in place"), inputs=plain)
def k_given_as_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    torch.exp(v, out=k)
    return scores.softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"), inputs=plain)
def v_written_between_the_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The product with v reads what was written, and so does a kernel in its place."""
    weights = (q @ k.mT * 0.3).softmax(-1)
    v.mul_(2)
    return weights @ v


@CASES.near_miss(described("scale 0.3"), inputs=plain)
def k_written_after_both_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attend(q, k, v)
    k.zero_()
    return out


@CASES.near_miss(described("scale 0.3"), inputs=plain)
def k_cloned_then_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Read above the copy, k would be zero."""
    copy = k.clone()
    k.zero_()
    return attend(q, copy, v)


@CASES.near_miss(described("scale 0.3"), inputs=plain)
def copy_of_k_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    copy = k.clone()
    copy[:, :, 0].zero_()
    return attend(q, copy, v)


@CASES.near_miss(
    described("scale 0.3"), inputs=lambda: [*tensors(SHAPE, *[(BATCH, 2, LENGTH, HEAD_DIM)] * 2, grad=False)]
)
def repeated_k_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written after it was repeated, k differs from head to head."""
    k = k.repeat_interleave(2, 1)
    k[:, 0].mul_(2)
    return attend(q, k, v.repeat_interleave(2, 1))


@CASES.near_miss(described("scale 0.3"), inputs=plain)
def view_of_q_taken_before_it_was_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = k.mT
    k.mul_(2)
    return (q @ turned * 0.3).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "written in place"), inputs=lambda: plain(normal(LENGTH, LENGTH)))
def bias_written_between_the_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3 + bias).softmax(-1)
    bias.zero_()
    return weights @ v


@CASES.near_miss(described("dense additive"), inputs=lambda: plain(normal(LENGTH, LENGTH) > 0))
def mask_written_after_it_was_made(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """It was zeros and lowest numbers, and would be its condition."""
    mask = torch.where(kept, 0.0, -1e9)
    mask[..., 1] = 0.5
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


@CASES.near_miss(described("dense additive"), inputs=lambda: plain(normal(LENGTH, LENGTH) > 0))
def copy_of_a_mask_written(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    mask = torch.where(kept, 0.0, -1e9).expand(HEADS, -1, -1).clone()
    mask[1, :, :2] = 0.5
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


@CASES.near_miss(described("sinks", lowering="reference"), inputs=lambda: plain(normal(HEADS)))
def copy_of_the_sinks_written(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    column = sink.clone()
    column[:2].mul_(3)
    column = column.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)
    return torch.cat([q @ k.mT * 0.3, column], dim=-1).softmax(-1)[..., :-1] @ v


@CASES.near_miss(described("scale 0.3"), inputs=lambda: plain(torch.zeros(*SHAPE)))
def cache_filled_before_and_after(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
    cache[:, :, 2:4] = k[:, :, 2:4]
    out = attend(q, cache, v)
    cache[:, :, 4:] = k[:, :, 4:]
    return out


# ---- shapes changed in place ----------------------------------------------------------------------------------------


@CASES.near_miss(missed(RESHAPED, "transpose_"), inputs=lambda: [*tensors(BSHD, (HEAD_DIM, HEAD_DIM), SHAPE, SHAPE)])
def projection_transposed_in_place(x: Tensor, weight: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = F.linear(x, weight)
    q.transpose_(1, 2)
    return attend(q, k, v)


@CASES.near_miss(missed(RESHAPED, "transpose_"))
def output_transposed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attend(q, k, v)
    out.transpose_(1, 2)
    return out.reshape(BATCH, LENGTH, HEADS * HEAD_DIM).exp()


@CASES.near_miss(missed(RESHAPED, "unsqueeze_"), inputs=lambda: tensors(SHAPE[1:], SHAPE, SHAPE))
def axis_inserted_in_place(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = x * 2
    q.unsqueeze_(0)
    return attend(q, k, v)


# ---- the output -----------------------------------------------------------------------------------------------------


@CASES.near_miss(described("scale 0.3"), inputs=positions_first)
def output_returned_in_its_own_strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = attend_bshd(q, k, v)
    return out, out.transpose(1, 2)


@CASES.near_miss(described("scale 0.3"), inputs=positions_first)
def output_read_as_strided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_bshd(q, k, v).as_strided((BATCH, LENGTH), (HEADS * LENGTH * HEAD_DIM, 3)) * 2


@CASES.near_miss(described("scale 0.3"), inputs=positions_first)
def output_viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_bshd(q, k, v).view(BATCH, HEADS * LENGTH, HEAD_DIM).exp()


@CASES.near_miss(described("scale 0.3"), inputs=positions_first)
def output_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel keeps its output for the backward, which the model's own product does not."""
    out = attend_bshd(q, k, v)
    out += 1
    return out.exp()


@CASES.near_miss(described("scale 0.3"), inputs=positions_first)
def copy_of_the_output_written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A copy in the model; from the kernel's strides it would be the output itself."""
    out = attend_bshd(q, k, v)
    rows = out.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * HEAD_DIM)
    rows += 1
    return rows.exp(), out.sum((1, 3))


@CASES.near_miss(described("scale 0.3"), inputs=positions_first)
def residual_added_to_a_copy_of_the_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attend_bshd(q, k, v).transpose(1, 2).contiguous()
    out += q
    return out.exp()


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(BSHD, BSHD, BSHD, grad=False))
def the_output_itself_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`contiguous` gives the output itself in the model; of the kernel's strides it would make a copy."""
    out = attend_bshd(q, k, v)
    same = out.contiguous()
    same.mul_(2)
    return same.sum() + out.sum((1, 3))


# ---- several attentions ---------------------------------------------------------------------------------------------


@CASES.near_miss(described("scale 0.3", sites=3))
def outputs_are_the_next_operands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = attend(q, k, v)
    second = attend(first, k, v.flip(2))
    return attend(second, second, first)


@CASES.near_miss(described("scale 0.3", sites=2))
def agents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Agent attention: few queries read everything, then every query reads those."""
    agent = q[:, :, ::3]
    return attend(q, agent, attend(agent, k, v))


@CASES.near_miss(described("scale 0.3", sites=2))
def output_written_before_the_next(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attend(q, k, v)
    out.mul_(2)
    return attend(out, k, v)


@CASES.near_miss(
    described("dense additive", sites=2), inputs=lambda: tensors(*[(BATCH, HEADS, LENGTH, LENGTH)] * 3, grad=False)
)
def output_is_the_next_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attend(q, k, v), scale=0.1)


@CASES.near_miss(described("run-time factor", sites=2), inputs=lambda: plain(normal(1, 1, 1, 1)))
def output_is_the_next_scale(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return (q @ k.mT * attend(x, x, x).squeeze()).softmax(-1) @ v


@CASES.near_miss(
    described("dense bool", sites=2), inputs=lambda: qkv(torch.rand(LENGTH, LENGTH).fill_diagonal_(1) < 0.3)
)
def outputs_in_another_order_than_the_softmaxes(
    q: Tensor, k: Tensor, v: Tensor, masked: Tensor
) -> tuple[Tensor, Tensor]:
    """The mask that both share is needed where the second softmax's output is made: first."""
    first = (q @ k.mT * 0.3).masked_fill(masked, -math.inf).softmax(-1)
    second = (k @ q.mT * 0.3).masked_fill(masked, -math.inf).softmax(-1)
    out = second @ v
    return first @ v, out


@CASES.near_miss(
    described("dense bool", sites=2), inputs=lambda: plain(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
)
def mask_written_between_two_attentions(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    kept[..., 1].fill_(False)
    return first, F.scaled_dot_product_attention(q, k, v, attn_mask=kept)


@CASES.near_miss(described("scale 0.3", sites=2))
def one_of_two_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        target = attend(q, k, v)
    return (attend(q, k, v) - target * 2).square()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory(case: Case) -> None:
    check(case)


def test_inputs_that_share_memory() -> None:
    """A view of k, passed as an input of its own, is written between the products."""

    def attention(q: Tensor, k: Tensor, v: Tensor, part_of_k: Tensor) -> Tensor:
        scores = q @ k.mT
        part_of_k.mul_(0.2)
        return scores.softmax(-1) @ v

    def run(function: object) -> Tensor:
        q, k, v = plain()
        return function(q, k, v, k[:, :2])  # type: ignore[operator, no-any-return]

    options = {"inner": "aot_eager", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", fullgraph=True, options=options)
    torch.testing.assert_close(run(compiled), run(attention))
