"""What a kernel reads again in the backward, written to after the attention: in the graph, by a graph that calls it, or by the user.

Each program is right in eager, whose autograd saved another tensor. Outputs, all gradients and what the inputs hold in the end are
eager's, in every lowering; and a copy is made only where one is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_compiler
from tests.near_miss.checking import BATCH, HEAD_DIM, HEADS, LENGTH, SHAPE, condition, normal, qkv, tensors

Write = Callable[[Sequence[Tensor], Sequence[Tensor]], None]

LOWERINGS = ("sdpa_cpu_flash", "reference", "math")
FEW = (BATCH, 2, LENGTH, HEAD_DIM)
BSHD = (BATCH, LENGTH, HEADS, HEAD_DIM)


@dataclass(frozen=True, kw_only=True)
class Case:
    """write: what the user does with the inputs and the outputs before the backward. copies: the operands that a kernel which saves
    all that it reads gets copies of."""

    function: Callable[..., Any]
    copies: tuple[str, ...]
    inputs: Callable[[], Sequence[Tensor]]
    write: Write | None = None


CASES: dict[str, Case] = {}


def near_miss(
    *copies: str, inputs: Callable[[], Sequence[Tensor]] = qkv, write: Write | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function is a case of its own name."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = Case(function=function, copies=copies, inputs=inputs, write=write)
        return function

    return add


def grouped() -> list[Tensor]:
    return tensors(SHAPE, FEW, FEW)


def with_mask(*more: Tensor) -> Callable[[], list[Tensor]]:
    return lambda: qkv(*(x.clone() for x in more))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def attend_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def own(*given: Tensor) -> list[Tensor]:
    """Tensors that the graph makes."""
    return [x + 1 for x in given]


@torch.library.custom_op("near_miss::age", mutates_args={"x"})
def age(x: Tensor) -> None:
    x.mul_(0.5)


# ---- written in the graph -------------------------------------------------------------------------------------------


@near_miss("k", "v", inputs=grouped)
def written_behind_the_repetition(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = own(k, v)
    out = attend_grouped(q, k, v)
    k.add_(1)
    v[:, :, 0].mul_(2)
    return out, k.exp()


@near_miss("k", "v", inputs=grouped)
def written_through_data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = own(k, v)
    out = attend_grouped(q, k, v)
    k.data.add_(1)
    v.data.view(-1).mul_(2)
    return out


@near_miss("k", inputs=grouped)
def written_through_data_of_an_expanded_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = own(k, v)
    repeated = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(SHAPE) for x in (k, v))
    out = attend(q, *repeated)
    k.data.zero_()
    return out


@near_miss("q")
def scaled_then_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q,) = own(q)
    out = attend(q * 0.5, k, v)
    q.sub_(3)
    return out + q.sum()


@near_miss("v")
def cloned_then_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (v,) = own(v)
    out = attend(q, k, v.clone())
    v.zero_()
    return out


@near_miss("k")
def made_contiguous_then_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (k,) = own(k)
    out = attend(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    k.data.fill_(2)
    return out


@near_miss("k")
def written_by_a_custom_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (k,) = own(k)
    out = attend(q, k * 0.5, v)
    with torch.no_grad():
        age(k)
    return out


@near_miss("q", "k", "v")
def copied_by_the_product_and_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A product whose operands do not lie one matrix after the other copies them, and saves the copies."""
    q, k, v = own(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    out = attend(*(x.transpose(1, 2) for x in (q, k, v)))
    for x in (q, k, v):
        x.data.neg_()
    return out


@near_miss("k", inputs=grouped)
def written_by_a_later_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second layer reads what the first left."""
    (k,) = own(k)
    first = attend_grouped(q, k, v * 1)
    k.data.mul_(0.5)
    return attend_grouped(first, k, v * 1)


@near_miss("q", "v", inputs=lambda: [normal(*SHAPE, grad=True), normal(*SHAPE, seed=5), normal(*SHAPE, seed=6)])
def frozen_keys_and_a_query_that_nobody_saved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only the query wants a gradient, so the product saves the keys alone; and the weights alone are saved for v's sake, which is none."""
    q = q + 1
    out = attend(q, k, v.clone())
    q.add_(1)
    v.mul_(2)
    return out


@near_miss("mask", inputs=with_mask(normal(LENGTH, LENGTH)))
def added_mask_written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
    mask.mul_(2)
    return out


@near_miss("mask", inputs=with_mask(normal(HEADS, LENGTH, LENGTH)))
def added_mask_written_through_data(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
    mask.data.zero_()
    return out


@near_miss("mask", inputs=with_mask(normal(LENGTH, LENGTH)))
def mask_that_shrinks_from_layer_to_layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    for _ in range(3):
        q = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
        mask.mul_(0.5)
    return q


@near_miss("mask", inputs=lambda: [*qkv(), normal(HEADS, LENGTH, LENGTH, grad=True)])
def learned_bias_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    bias = bias * 2
    out = (q @ k.mT * 0.3 + bias).softmax(-1) @ v
    bias.add_(1)
    return out + bias.sum()


@near_miss("sinks", inputs=lambda: [*qkv(), normal(HEADS, grad=True)])
def sinks_written(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    sink = sink * 2
    column = sink.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)
    out = torch.cat([q @ k.mT * 0.3, column], dim=-1).softmax(-1)[..., :-1] @ v
    sink.data.add_(3)
    return out


@near_miss("k")
def softcapped_and_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (k,) = own(k)
    out = ((q @ (k * 0.3).mT / 5).tanh() * 5).softmax(-1) @ v
    k.data.mul_(4)
    return out


@near_miss("q", inputs=lambda: [*qkv(), torch.tensor(0.4, requires_grad=True)])
def written_behind_a_factor(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """A factor that wants a gradient is multiplied on the query, which is saved for that."""
    (q,) = own(q)
    out = (q.clone() @ k.mT * factor).softmax(-1) @ v
    q.data.mul_(3)
    return out


@near_miss("out")
def output_written_in_the_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attend(q, k, v)
    part = out[:, :1]
    part += 1
    return out.exp()


@near_miss("k", "v", inputs=grouped)
def cache_of_a_called_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = own(k, v)
    out = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    k.zero_()
    v.data.zero_()
    return out


# ---- written by the graph that calls a body -------------------------------------------------------------------------


def checkpointed(body: Callable[..., Tensor], *args: Tensor) -> Tensor:
    result: Tensor = checkpoint(body, *args, use_reentrant=False)
    return result


@near_miss("out")
def output_of_a_body_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel's output has other strides than the model's, and is copied for that."""
    out = checkpointed(attend, q, k, v)
    out += q
    return out.exp()


def repeated_in_a_body_and_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (k,) = own(k)
    out = checkpointed(attend_grouped, q, k, v)
    k.add_(v)
    return out.exp()


def mask_of_two_bodies_written_in_between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.3 + mask).softmax(-1) @ v

    (mask,) = own(mask)
    q = checkpointed(masked, q, k, v, mask)
    mask.mul_(0.5)
    return checkpointed(masked, q, k, v, mask).exp()


def output_of_a_nested_body_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = checkpointed(lambda *given: checkpointed(attend, *given), q, k, v)
    out.mul_(2)
    return out.exp()


# ---- written by the user --------------------------------------------------------------------------------------------


def doubled(*positions: int, of_outputs: bool = False, silently: bool = False) -> Write:
    """Inputs or outputs are doubled in place."""

    def write(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for position in positions:
            written = (outputs if of_outputs else inputs)[position]
            target = written.data if silently else written
            with torch.no_grad():
                target.logical_not_() if target.dtype == torch.bool else target.mul_(2)

    return write


@near_miss("q", write=doubled(0))
def input_behind_a_scale_written_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q * 0.5, k, v)


@near_miss("k", "v", inputs=grouped, write=doubled(1, 2, silently=True))
def inputs_behind_repetitions_written_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_grouped(q, k, v)


@near_miss("k", "v", "out", inputs=grouped, write=doubled(1, 2, of_outputs=True))
def returned_cache_written_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k, v = own(k, v)
    return attend_grouped(q, k, v), k, v


@near_miss("k", "out", inputs=grouped, write=doubled(1, of_outputs=True, silently=True))
def returned_view_of_a_cache_written_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k, v = own(k, v)
    return attend_grouped(q, k, v), k.view(-1)


@near_miss("q", "k", "v", "out", inputs=lambda: tensors(BSHD, BSHD, BSHD), write=doubled(0, 1, 2))
def inputs_that_the_product_copies_written_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*(x.transpose(1, 2) for x in (q, k, v)))


@near_miss("mask", "out", inputs=with_mask(normal(LENGTH, LENGTH)), write=doubled(3))
def mask_written_by_the_user(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


@near_miss("mask", inputs=with_mask(condition(BATCH, 1, LENGTH, LENGTH)), write=doubled(3, silently=True))
def truth_values_written_by_the_user(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept)


@near_miss("sinks", inputs=lambda: [*qkv(), normal(HEADS, grad=True)], write=doubled(3))
def sinks_written_by_the_user(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    column = sink.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)
    return (torch.cat([q @ k.mT * 0.3, column], dim=-1).softmax(-1)[..., :-1] @ v).exp()


@near_miss("out", write=doubled(0, of_outputs=True))
def output_written_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


@near_miss("out", write=doubled(1, of_outputs=True))
def view_of_the_output_written_by_the_user(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = attend(q, k, v)
    return out.exp(), out.transpose(1, 2)


# ---- no copy --------------------------------------------------------------------------------------------------------


@near_miss(inputs=grouped)
def nobody_writes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = own(q, k, v)
    return attend_grouped(q * 0.5, k, v).exp()


@near_miss()
def the_model_saves_the_inputs_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A write would be an error in eager."""
    return attend(q, k, v).exp()


@near_miss(inputs=with_mask(normal(LENGTH, LENGTH)))
def a_called_attention_saves_all_that_it_is_given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@near_miss(inputs=lambda: [x.detach() for x in grouped()], write=doubled(0, 1, 2))
def no_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = attend_grouped(q * 0.5, k, v)
    k.add_(1)
    return out, k


@near_miss(inputs=with_mask(torch.ones(BATCH, LENGTH, dtype=torch.int64)), write=doubled(3))
def padding_that_a_mask_is_made_of(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    mask = (1.0 - padding[:, None, None, :].float()) * torch.finfo(torch.float32).min
    return ((q @ k.mT * 0.3 + mask).softmax(-1) @ v).exp()


@near_miss(inputs=lambda: tensors(SHAPE, SHAPE, SHAPE))
def written_before_and_never_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (k,) = own(k)
    k.mul_(2)
    return attend(q, k * 0.5, v).exp()


@near_miss(inputs=lambda: tensors(SHAPE, SHAPE, SHAPE))
def parameters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Read above a scale, as nothing writes to a parameter between the forward and the backward."""
    return attend(LEARNED.weight * 0.5, k, v).exp()


LEARNED = torch.nn.Module()
LEARNED.weight = torch.nn.Parameter(normal(*SHAPE, seed=4))


# ---- no kernel gives these gradients --------------------------------------------------------------------------------


def keys_that_the_product_saved_written_through_data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eager's gradient of the query is made with what was written, that of the keys with the weights from before."""
    (k,) = own(k)
    out = attend(q, k, v)
    k.data.mul_(2)
    return out


def values_that_the_product_saved_written_through_data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (v,) = own(v)
    out = attend(q * 0.5, k, v)
    v.data[:, :1].mul_(3)
    return out


def condition_that_was_saved_written_through_data(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    out = torch.where(kept, q @ k.mT * 0.3, -torch.inf).softmax(-1) @ v
    kept.data.logical_not_()
    return out


# ---- the check ------------------------------------------------------------------------------------------------------


def _run(function: Callable[..., Any], case: Case) -> list[Tensor | None]:
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in case.inputs()]
    given = [x.clone() for x in leaves]
    found = function(*given)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    results = [x.detach().clone() for x in outputs]
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs if x.requires_grad)
    if case.write is not None:
        case.write(given, outputs)
    if isinstance(loss, Tensor):
        loss.backward()
    return [*results, *(x.grad for x in leaves), *(x.detach() for x in given)]


def _check(case: Case, **options: Any) -> attn_compiler.reporting.report.Report:
    torch._dynamo.reset()
    attn_compiler.reset()
    compiled = torch.compile(
        case.function, backend="attn_compiler", fullgraph=True, options={"strict": True, **options}
    )
    expected, found = _run(case.function, case), _run(compiled, case)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    (report,) = attn_compiler.reports()
    assert not report.misses
    return report


def _copies(report: attn_compiler.reporting.report.Report, because: str = "") -> set[str]:
    return {copy.operand for site in report.sites for copy in site.copies if copy.why.endswith(because)}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_saves_all_that_it_reads(name: str) -> None:
    """An output whose strides are given back is a copy anyway."""
    case = CASES[name]
    report = _check(case, inner="aot_eager", lowering="reference")
    assert all(site.decision.lowering == "reference" for site in report.sites)
    assert _copies(report) - {"out"} == set(case.copies) - {"out"}
    assert _copies(report) >= set(case.copies)
    assert _copies(report, "the backward reads it") <= set(case.copies)


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["sdpa_cpu_flash", "math"])
@pytest.mark.parametrize("name", CASES)
def test_the_lowerings_of_a_cpu(name: str, lowering: str) -> None:
    """Flash saves its output, which products and a softmax do not: one that the user gets is copied."""
    case = CASES[name]
    report = _check(case, inner="aot_eager", lowerings=(lowering, "reference"))
    saved = {"out"} if lowering == "sdpa_cpu_flash" else set()
    assert _copies(report, "the backward reads it") <= set(case.copies) | saved


@pytest.mark.parametrize(
    "name",
    [
        "written_through_data",
        "input_behind_a_scale_written_by_the_user",
        "returned_cache_written_by_the_user",
        "mask_written_by_the_user",
        "output_written_by_the_user",
    ],
)
def test_inductor_does_not_make_the_copy_anew_in_the_backward(name: str) -> None:
    _check(CASES[name], lowering="reference")


#: what stands in checkpoints, and its inputs
BODIES: list[tuple[Callable[..., Any], Callable[[], Sequence[Tensor]]]] = [
    (repeated_in_a_body_and_written, grouped),
    (mask_of_two_bodies_written_in_between, with_mask(normal(LENGTH, LENGTH))),
    (output_of_a_nested_body_written, qkv),
]
_WAYS = [
    (*body, lowering, inner)
    for body in BODIES
    for lowering in ("reference", "math")
    for inner in ("aot_eager", "inductor")
]


def _is_soon_done(way: tuple[Callable[..., Any], Any, str, str]) -> bool:
    """All but Inductor's code of the lowering that is many ops: it has one body."""
    function, _, *how = way
    return how != ["math", "inductor"] or function is output_of_a_nested_body_written


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    ("function", "inputs", "lowering", "inner"),
    [pytest.param(*way, marks=[] if _is_soon_done(way) else [pytest.mark.slow]) for way in _WAYS],
)
def test_what_a_body_is_given_and_gives_back(
    function: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]], lowering: str, inner: str
) -> None:
    """Against the graph without kernels: eager runs a checkpoint again on what was written, or not at all."""
    case = Case(function=function, copies=(), inputs=inputs)
    torch._dynamo.reset()
    expected = _run(torch.compile(function, backend="aot_eager", fullgraph=True), case)
    torch._dynamo.reset()
    options = {"strict": True, "inner": inner, "lowering": lowering}
    found = _run(torch.compile(function, backend="attn_compiler", fullgraph=True, options=options), case)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (keys_that_the_product_saved_written_through_data, qkv),
        (values_that_the_product_saved_written_through_data, qkv),
        (condition_that_was_saved_written_through_data, with_mask(condition(LENGTH, LENGTH))),
    ],
)
def test_a_site_whose_gradients_no_kernel_gives_is_left_alone(
    function: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]]
) -> None:
    case = Case(function=function, copies=(), inputs=inputs)
    torch._dynamo.reset()
    attn_compiler.reset()
    options = {"strict": True, "inner": "aot_eager", "lowering": "reference"}
    found = _run(torch.compile(function, backend="attn_compiler", fullgraph=True, options=options), case)
    torch.testing.assert_close(found, _run(function, case), atol=2e-5, rtol=2e-5)
    (report,) = attn_compiler.reports()
    (miss,) = report.misses
    assert "through .data" in miss.reason.observed
