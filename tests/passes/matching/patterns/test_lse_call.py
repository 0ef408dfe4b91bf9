"""Attention whose logsumexp is read, as the passes write it: matched, lowered with both outputs, and differentiated through both."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse
from attn_compiler.passes.graph import mirror, unit
from attn_compiler.passes.graph.site import Refused
from attn_compiler.passes.matching.patterns import lse_call
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.scores import Softcap
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import Compiled, captured, compiled
from tests.passes.matched_sites import matched

B, H, HKV, Q, N, D, DV = 2, 4, 2, 24, 40, 16, 32
SCALE = 0.25


def exact(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """In float64, one query at a time over the keys that it has: nothing is ever -inf minus -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * SCALE
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    allowed = torch.ones(scores.shape, dtype=torch.bool)
    if mask is not None:
        allowed &= mask if mask.dtype == torch.bool else mask != -torch.inf
        scores = scores if mask.dtype == torch.bool else scores + mask.masked_fill(mask == -torch.inf, 0.0)
    if causal:
        allowed &= torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    outs, lses = [], []
    for place in range(q.shape[0] * q.shape[1] * q.shape[2]):
        b, h, i = place // (q.shape[1] * q.shape[2]), place // q.shape[2] % q.shape[1], place % q.shape[2]
        seen = allowed[b, h, i].nonzero()[:, 0]
        if not len(seen):
            outs.append(q.new_zeros(v.shape[3]))
            lses.append(q.new_tensor(-torch.inf))
            continue
        own = scores[b, h, i, seen]
        lses.append(torch.logsumexp(own, 0))
        outs.append(torch.softmax(own, 0) @ v[b, h, seen])
    shape = (*q.shape[:3],)
    return torch.stack(outs).view(*shape, -1), torch.stack(lses).view(shape)


def inputs(dtype: torch.dtype = torch.float32, *, heads_kv: int = HKV, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((B, H, Q, D), (B, heads_kv, N, D), (B, heads_kv, N, DV))
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def empty_rows() -> Tensor:
    """A mask of truth values in which some queries of one batch row, and all of another head, see no key."""
    mask = torch.rand(B, H, Q, N, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0, :, ::3] = False
    mask[1, 1] = False
    return mask


def both(out: Tensor, lse: Tensor) -> Tensor:
    """A number that both outputs go into. A row's lse counts where it is finite, as a merge of parts uses it."""
    weight = torch.linspace(-1, 1, lse.numel(), dtype=torch.float64).view(lse.shape)
    return (out.double() ** 3).sum() + (torch.exp(lse.double() - 2.0) * weight).sum()


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach().double()).norm() / wanted.double().norm())


def check(
    function: Callable[..., Any], like: Callable[..., Any], given: list[Tensor], bound: float, **options: Any
) -> Compiled:
    run = compiled(function, **options)
    got, wanted = run(*given), like(*given)
    for mine, right in zip(got, wanted, strict=True):
        finite = right != -torch.inf
        assert torch.equal(mine == -torch.inf, ~finite)
        assert relative(mine[finite], right[finite]) < bound
    leaves = [x for x in given if x.requires_grad]
    if leaves:
        for mine, right in zip(*(torch.autograd.grad(both(*x), leaves) for x in (got, wanted)), strict=True):
            assert relative(mine, right) < 4 * bound
    return run


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attention_with_lse(q, k, v, scale=SCALE)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return attention_with_lse(q, k, v, mask, scale=SCALE)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return attention_with_lse(q, k, v, mask, scale=SCALE, softcap=1.5)


def causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attention_with_lse(q, k, v, None, True, scale=SCALE)


LOWERINGS = pytest.mark.parametrize(
    ("lowering", "dtype", "bound"),
    [
        ("math", torch.float64, 1e-12),
        ("reference", torch.float64, 1e-12),
        ("untouched", torch.float64, 1e-12),
        ("math", torch.float32, 2e-6),
        ("triton", torch.float32, 2e-6),
        ("triton", torch.float16, 4e-3),
        ("math", torch.bfloat16, 2e-2),
    ],
)


@LOWERINGS
def test_queries_without_keys_have_no_part_in_anything(lowering: str, dtype: torch.dtype, bound: float) -> None:
    run = check(
        masked, lambda q, k, v, mask: exact(q, k, v, mask), [*inputs(dtype), empty_rows()], bound, lowering=lowering
    )
    assert run.site.decision.lowering == lowering
    assert run.site.spec.lse == "differentiated"
    assert ("scaled_dot_product_attention_with_lse" in run.calls) == (lowering == "untouched")


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["math", "triton", "untouched"])
@pytest.mark.parametrize("heads_kv", [1, H])
def test_a_causal_flag_and_a_softcap(lowering: str, heads_kv: int) -> None:
    run = check(causal, lambda q, k, v: exact(q, k, v, causal=True), inputs(heads_kv=heads_kv), 2e-6, lowering=lowering)
    assert run.site.spec.mask.is_causal
    given = [*inputs(heads_kv=heads_kv), empty_rows()]
    run = check(capped, lambda q, k, v, m: exact(q, k, v, m, softcap=1.5), given, 2e-6, lowering=lowering)
    assert run.site.spec.score.changes == (Softcap(cap=1.5),)


@pytest.mark.parametrize("lowering", ["math", "triton", "reference", "untouched"])
def test_numbers_are_added_to_the_scores(lowering: str) -> None:
    added = torch.randn(1, H, Q, N).masked_fill(~empty_rows()[:1], -torch.inf)
    run = check(masked, lambda q, k, v, m: exact(q, k, v, m), [*inputs(), added], 2e-6, lowering=lowering)
    assert run.site.decision.lowering == lowering


@pytest.mark.parametrize("lowering", ["math", "triton"])
def test_what_no_query_sees_may_hold_anything(lowering: str) -> None:
    def of_seen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        return attention_with_lse(q, k, v, seen[:, None, None, :].expand(-1, 1, Q, -1), scale=SCALE)

    q, k, v = inputs()
    seen = torch.arange(N).expand(B, N) < torch.tensor([[N], [0]])
    seen = seen & (torch.arange(N) % 7 != 0)
    with torch.no_grad():
        k[~seen[:, None].expand(-1, HKV, -1)] = torch.nan
        v[~seen[:, None].expand(-1, HKV, -1)] = torch.inf
    run = compiled(of_seen, lowering=lowering)
    out, lse = run(q, k, v, seen)
    assert torch.isfinite(out).all()
    assert torch.equal(lse == -torch.inf, (torch.arange(B) == 1)[:, None, None].expand(B, H, Q))
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(both(out, lse), (q, k, v)))


def test_decoding_gives_it_too() -> None:
    q, k, v = inputs(grad=False)
    mask = empty_rows()[:, :, :2]
    run = check(masked, lambda q, k, v, m: exact(q, k, v, m), [q[:, :, :2], k, v, mask], 2e-6, lowering="decode")
    assert run.site.decision.lowering == "decode"
    assert run.site.spec.lse == "read"


def test_one_that_nothing_reads_is_none() -> None:
    run = compiled(lambda q, k, v: attention_with_lse(q, k, v, scale=SCALE)[0], lowering="sdpa_cpu_flash")
    q, k, _ = inputs()
    run(q, k, k)
    assert run.site.spec.lse == "unread"
    assert run.site.decision.lowering == "sdpa_cpu_flash"


def test_others_leave_the_site_as_it_is() -> None:
    run = check(plain, exact, inputs(), 2e-6, lowering="sdpa_cpu_flash")
    (refusal,) = run.site.decision.refusals
    assert Code.LSE_READ in {reason.code for reason in refusal.reasons}
    assert run.site.decision.lowering == "untouched"


@pytest.mark.in_turns
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("lowering", ["math", "triton"])
def test_compiled_graphs_hand_on_both_gradients(inner: str, lowering: str) -> None:
    given = [*inputs(), empty_rows()]
    check(masked, lambda q, k, v, m: exact(q, k, v, m), given, 2e-6, lowering=lowering, inner=inner)


def test_the_gradient_of_the_lse_alone() -> None:
    leaves = inputs()
    mask = empty_rows()
    run = compiled(masked, lowering="triton")
    for mine, right in zip(
        *(
            torch.autograd.grad(torch.exp(lse.double()).sum(), leaves[:2])
            for _, lse in (run(*leaves, mask), exact(*leaves, mask))
        ),
        strict=True,
    ):
        assert relative(mine, right) < 1e-5


def test_who_writes_to_it_gets_a_copy() -> None:
    """The kernel's backward reads its own lse."""
    leaves = inputs()
    run = compiled(plain, lowering="triton")
    out, lse = run(*leaves)
    total = (out**3).sum() + torch.exp(lse - 2.0).sum()
    with torch.no_grad():
        lse.data.zero_()
    assert "lse" in {copy.operand for copy in run.site.copies}
    out, lse = exact(*leaves)
    wanted = torch.autograd.grad((out**3).sum() + torch.exp(lse - 2.0).sum(), leaves)
    # What exp saves is its own result.
    for mine, right in zip(torch.autograd.grad(total, leaves), wanted, strict=True):
        assert relative(mine, right) < 1e-5


def test_a_batch_and_length_that_are_symbols() -> None:
    run = compiled(masked, lowering="math", dynamic=True)
    for batch, queries in ((2, 24), (1, 17)):
        q, k, v = (x.detach()[:batch] for x in inputs())
        got = run(q[:, :, :queries], k, v, empty_rows()[:batch, :, :queries])
        wanted = exact(q[:, :, :queries], k, v, empty_rows()[:batch, :, :queries])
        for mine, right in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.double(), right, atol=2e-6, rtol=2e-5)


# ---- near misses ---------------------------------------------------------------------------------------------------------


def test_an_lse_that_is_read_alone_is_left() -> None:
    run = compiled(lambda q, k, v: attention_with_lse(q, k, v, scale=SCALE)[1], lowering="math")
    given = inputs(grad=False)
    torch.testing.assert_close(run(*given), plain(*given)[1])
    (miss,) = run.report.misses
    assert miss.reason.code == Code.OTHER_OUTPUT


def test_an_lse_that_is_taken_out_first_is_left() -> None:
    """A kernel stands where the output stood."""
    gm, _ = captured(plain, *inputs(grad=False))
    out, lse = (node for node in gm.graph.nodes if node.target is operator.getitem)
    out.prepend(lse)
    mode = torch_tracing.fake_mode_of_values(unit.examples(gm))
    assert mode is not None
    with torch_tracing.tracing_in(mode):
        found = mirror.build(gm)
    (anchor,) = (node for node in found.graph.nodes if node.target in lse_call.ANCHORS)
    with pytest.raises(Refused) as refused:
        lse_call.match(found, anchor)
    assert "taken out of it first" in refused.value.reason.observed


def test_a_query_that_is_shut_out_with_a_number_is_left() -> None:
    """Its lse is that of numbers, and no kernel sees those."""

    def shut(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        added = torch.zeros(B, 1, Q, N).masked_fill(~real[:, None, :, None], -1e30)
        return attention_with_lse(q, k, v, added, scale=SCALE)

    q, k, v = inputs(grad=False)
    real = torch.arange(Q).expand(B, Q) < 20
    run = compiled(shut, lowering="math")
    got, wanted = run(q, k, v, real), shut(q, k, v, real)
    (miss,) = run.report.misses
    assert miss.reason.code == Code.KEYLESS_ROWS
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_match_names_both_outputs() -> None:
    found, match = matched(plain, *inputs(grad=False))
    assert match.pattern == lse_call.NAME
    assert match.lse is not None
    assert match.outputs == (match.out, match.lse.node)
    assert match.lse.dims == match.out_dims[:-1]
    assert not match.lse.is_part
    assert found.dynamo_node(match.lse.node) is not None
    _, unread = matched(lambda q, k, v: plain(q, k, v)[0], *inputs(grad=False))
    assert unread.outputs == (unread.out,)
