"""What the Triton kernels are run on: a plan given part by part, random operands for it, and the same attention from its definition.

`build` makes the tensors of a `Case` on a device, with tiles of 32 to 64 or with those of the measured table. No spec has to be
thought of that would lead to the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.kernels.tile_parts import kept
from attn_compiler.lowerings.shared.parts import site_parts, tile_table, tiles as tile_lists
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan
from attn_compiler.lowerings.shared.parts.tiles import Masking
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import ScoreSpec, Softcap
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import plan_math
from tests.lowerings.kernel_cases import Case

#: without a GPU, Triton's interpreter (see tests/conftest.py)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SMALL = Tile(queries=32, keys=32, warps=4, stages=1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The tensors of a case. named: the operands by the plan's names. q, k, v and what is differentiable are leaves."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    named: dict[str, Tensor]
    plan: Plan
    text: str

    @property
    def operands(self) -> list[Tensor]:
        return [self.named[name] for name in self.plan.operands]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *(self.named[name] for name in self.plan.differentiable)]

    @property
    def labels(self) -> list[str]:
        """What `results` holds."""
        return ["out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in self.plan.differentiable)]


# ---- building -----------------------------------------------------------------------------------------------------


class _Draws:
    """Random tensors, the same ones on every device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def chance(self, *shape: int, of: float) -> Tensor:
        return (torch.rand(shape, generator=self._generator) < of).to(self.device)

    def below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(0, max(end, 1), shape, generator=self._generator, dtype=torch.int32).to(self.device)


def build(
    case: Case, *, dtype: torch.dtype = torch.float32, device: str = DEVICE, seed: int = 0, target: Target | None = None
) -> Problem:
    """target: take the tiles that the table gives for it."""
    draws = _Draws(device, dtype, seed)
    q, k, v = _in_memory(case, draws)
    named = _operands(case, draws)
    if "keys" in named:
        # What lies in the padding of a cache or a batch may be anything.
        unused = ~named["keys"][:, None, :, None]
        k, v = (_like(x, x.masked_fill(unused, torch.nan)) for x in (k, v))
    spec = _spec(case, q, k, v)
    with planned(case.plan):
        tiles = _small_tiles(case) if target is None else tile_table.tiles(spec, target)
    if case.plan.tiles:
        named |= lists(case, named, tiles, device)
    leaves = {name: named[name].requires_grad_() for name in case.plan.differentiable}
    q, k, v = (x.requires_grad_(case.needs_grad) for x in (q, k, v))
    text = Call(spec=spec, tiles=tiles).to_text()
    return Problem(case=case, q=q, k=k, v=v, named=named | leaves, plan=case.plan, text=text)


def _small_tiles(case: Case) -> Tiles:
    queries, keys = case.grad_kv
    return Tiles(forward=SMALL, grad_q=SMALL, grad_kv=dataclasses.replace(SMALL, queries=queries, keys=keys))


def _in_memory(case: Case, draws: _Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Logical BHSD in the strides that the case asks for."""
    width_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    if case.layout == "sb(h+2hg)d":
        # One projection of all three, split: the strides of a head are those of its neighbours too.
        joined = draws.normal(case.seqlen_q, case.batch, case.heads_q + 2 * case.heads_kv, case.head_dim)
        parts = joined.split([case.heads_q, case.heads_kv, case.heads_kv], dim=2)
        q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
        return q, k, v

    def one(heads: int, seqlen: int, width: int) -> Tensor:
        match case.layout:
            case "bshd":
                return draws.normal(case.batch, seqlen, heads, width).transpose(1, 2)
            case "bhsd":
                return draws.normal(case.batch, heads, seqlen, width)
            case "expanded_heads":
                return draws.normal(case.batch, 1, seqlen, width).expand(-1, heads, -1, -1)
            case "expanded_batch":
                return draws.normal(1, heads, seqlen, width).expand(case.batch, -1, -1, -1)
            case "slice":
                return draws.normal(case.batch, seqlen, heads, width + 3)[..., 1 : width + 1].transpose(1, 2)
        raise ValueError(f"no layout {case.layout!r}")

    q = one(case.heads_q, case.seqlen_q, case.head_dim)
    return q, one(case.heads_kv, case.seqlen_kv, case.head_dim), one(case.heads_kv, case.seqlen_kv, width_v)


def _like(x: Tensor, values: Tensor) -> Tensor:
    """The values in the strides of x, which has no zero strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(values)


def _shape(case: Case, axes: str) -> tuple[int, ...]:
    sizes = zip("bhqk", (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv), strict=True)
    return tuple(size if axis in axes else 1 for axis, size in sizes)


def _operands(case: Case, draws: _Draws) -> dict[str, Tensor]:
    """All but the lists of tiles."""
    batch, seqlen_q, seqlen_kv = case.batch, case.seqlen_q, case.seqlen_kv
    found: dict[str, Tensor] = {}
    if case.keys is not None:
        found["keys"] = _keys(case, draws)
    if case.rows:
        bounds = [draws.below(seqlen_kv, batch, seqlen_q), draws.below(seqlen_kv + 1, batch, seqlen_q)]
        found["rows"] = torch.stack(bounds)
    if case.documents:
        longer = draws.below(4, batch, max(seqlen_q, seqlen_kv)).sort(dim=1).values
        found["documents_q"], found["documents_k"] = (
            longer[:, :seqlen_q].contiguous(),
            longer[:, :seqlen_kv].contiguous(),
        )
    if case.mask is not None:
        found["mask"] = draws.chance(*_shape(case, case.mask), of=0.6)
    if case.bias is not None:
        found["bias"] = draws.normal(*_shape(case, case.bias))
    if case.distances is not None:
        found["distances"] = _distances(case, draws)
    if case.slopes:
        found["slopes"] = draws.normal(case.heads_q, dtype=torch.float32).abs() * 0.1
    if case.sinks:
        found["sinks"] = draws.normal(case.heads_q)
    if case.dropout_p:
        found["seed"] = torch.tensor([2**40 + 12345], dtype=torch.int64, device=draws.device)
    return found


def _keys(case: Case, draws: _Draws) -> Tensor:
    seqlen = case.seqlen_kv
    at, rows = torch.arange(seqlen), torch.arange(case.batch)[:, None]
    match case.keys:
        case "right":
            usable = at < seqlen - rows * seqlen // 2
        case "left":
            usable = at >= rows * seqlen // 2
        case "none":
            usable = (at < seqlen - 3) & (rows > 0)
        case "holes":
            return draws.chance(case.batch, seqlen, of=0.7)
        case _:
            raise ValueError(f"no keys {case.keys!r}")
    return usable.to(draws.device)


def _distances(case: Case, draws: _Draws) -> Tensor:
    """(heads, 8, L): the numbers, each time moved on by one."""
    count = max(case.seqlen_q + case.seqlen_kv - 1, 0)
    length = -(-(count + 1) // 8) * 8
    values = torch.nn.functional.pad(
        draws.normal(case.distances or 0, count, dtype=torch.float32), (0, length + 8 - count)
    )
    return torch.stack([values[:, p : p + length] for p in range(8)], 1).contiguous()


class Eager:
    """An emitter whose nodes are tensors."""

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def value(self, node: Any) -> Any:
        return node

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        return make()


def lists(
    case: Case, named: dict[str, Tensor], tiles: Tiles, device: str, *, ordered: bool = False
) -> dict[str, Tensor]:
    parts: dict[str, Any] = {name: named.get(name) for name in ("rows", "keys", "mask")}
    if case.documents:
        parts["documents"] = (named["documents_q"], named["documents_k"])
    masking = Masking(
        device=torch.device(device), seqlen_q=case.seqlen_q, seqlen_kv=case.seqlen_kv, band=case.band, **parts
    )
    emitter: Any = Eager()
    found: dict[str, Any] = {"tiles": tile_lists.lists(emitter, masking, tiles, by_key=False, ordered=ordered)}
    if case.needs_grad:
        found["tiles_by_key"] = tile_lists.lists(emitter, masking, tiles, by_key=True, ordered=ordered)
    return found


def _spec(case: Case, q: Tensor, k: Tensor, v: Tensor) -> AttentionSpec:
    def described(x: Tensor) -> TensorSpec:
        return TensorSpec(shape=tuple(x.shape), strides=tuple(x.stride()), dtype=_name(x.dtype))

    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    changes = () if case.softcap is None else (Softcap(cap=case.softcap),)
    return AttentionSpec(
        q=described(q),
        k=described(k),
        v=described(v),
        # Each case has a text of its own: what is compiled for one is kept by its text.
        mask=MaskSpec(reason=case.name),
        score=ScoreSpec(scale=scale, changes=changes, dropout_p=case.dropout_p),
        device=q.device.type,
        out_dtype=_name(q.dtype),
        needs_grad=case.needs_grad,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- running ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def planned(plan: Plan) -> Iterator[None]:
    """Every spec has this plan."""
    prepare.cache_clear()
    try:
        with mock.patch.object(site_parts, "make_plan", return_value=plan):
            yield
    finally:
        prepare.cache_clear()


def outputs(problem: Problem) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel."""
    with planned(problem.plan):
        found: tuple[Tensor, Tensor] = torch.ops.attn_compiler.triton(
            problem.q, problem.k, problem.v, problem.operands, problem.text
        )
    return found


def results(problem: Problem) -> list[Tensor]:
    """out, lse and, for one random upstream gradient of both, the gradients of all leaves."""
    out, lse = outputs(problem)
    with planned(problem.plan):
        return [out, lse, *_gradients(problem, out, lse, problem.leaves)]


def _gradients(problem: Problem, out: Tensor, lse: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    if not problem.case.needs_grad:
        return []
    return torch.autograd.grad([out, lse], leaves, upstream(problem, out, lse))


def upstream(problem: Problem, out: Tensor, lse: Tensor) -> list[Tensor]:
    """Random gradients of out and lse, the same for every dtype."""
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator).to(x.device) for x in (out, lse))
    # Rounded first, so that every dtype gets the same ones.
    grad_out = grad_out.to(problem.q.dtype).to(out.dtype)
    grad_lse = torch.where(lse == -torch.inf, 0.0, grad_lse).to(lse.dtype)
    return [grad_out, grad_lse]


def expected(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """What `results` should be, every step in `dtype`."""
    cast = [x.detach().to(dtype).requires_grad_(problem.case.needs_grad) for x in problem.leaves]
    further = dict(zip(problem.plan.differentiable, cast[3:], strict=True))
    q, k, v = cast[:3]
    out, lse = attention(problem, q, k, v, {**problem.named, **further})
    return [out, lse, *_gradients(problem, out, lse, cast)]


def attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in the dtype of q. A row without any allowed key gives 0 and -inf."""
    case, plan, sizes = problem.case, problem.plan, (q.shape[2], k.shape[2])
    if plan.keys:
        k, v = (x.masked_fill(~named["keys"][:, None, :, None], 0.0) for x in (k, v))
    k, v = (x.repeat_interleave(case.heads_q // case.heads_kv, 1) for x in (k, v))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    logits = q @ k.transpose(-1, -2) * scale
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    logits = logits + plan_math.added(plan, named, *sizes, dtype=q.dtype, device=q.device)
    allowed = plan_math.allowed(plan, named, *sizes, device=q.device).expand_as(logits)
    logits = torch.where(allowed, logits, torch.finfo(logits.dtype).min)
    joined = logits
    if plan.sinks:
        joined = torch.cat([logits, named["sinks"].to(q.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    weights = torch.where(allowed, joined.softmax(-1)[..., : sizes[1]], 0.0)
    lse = torch.logsumexp(joined, -1)
    lse = lse if plan.sinks else torch.where(allowed.any(-1), lse, -torch.inf)
    if plan.dropout:
        weights = torch.where(drawn(problem), weights / (1.0 - case.dropout_p), 0.0)
    return weights @ v, lse


def assert_within_rule(got: Sequence[Tensor], problem: Problem) -> None:
    """Hold `results` against the project's numeric rule (see tests/numerics.py)."""
    dtype = problem.q.dtype
    assert_close_to(got, expected(problem, numerics.exact_dtype(dtype)), expected(problem, dtype), problem)


def assert_close_to(got: Sequence[Tensor], exact: Sequence[Tensor], plain: Sequence[Tensor], problem: Problem) -> None:
    """The same, of what the rule compares with: as `results`, computed exactly and in the problem's dtype."""
    dtype = problem.q.dtype
    factor = numerics.FACTOR if problem.case.softcap is None else numerics.FACTOR_SOFTCAP
    assert len(got) == len(exact)
    for label, mine, right, usual in zip(problem.labels, got, exact, plain, strict=False):
        assert mine.shape == right.shape, f"{label}: shape {tuple(mine.shape)} instead of {tuple(right.shape)}"
        allowed = factor * numerics.worst(usual, right) + numerics.floor(_finite(right), dtype)
        found = numerics.worst(mine, right)
        assert found <= allowed, f"{label}: off by {found:.3g}, allowed {allowed:.3g}"


def _finite(x: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, 0.0, x.detach())


# ---- dropout ------------------------------------------------------------------------------------------------------


#: queries of a program: with all of some hundred, ptxas takes minutes
_DRAWN = 16


@triton.jit
def _draw(Keep, Seed, seqlen_q, seqlen_kv, dropout_p, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0)
    queries = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    keys = tl.arange(0, BLOCK_K)[None, :]
    keep = kept(tl.load(Seed), row.to(tl.int64), queries, keys, dropout_p)
    inside = (queries < seqlen_q) & (keys < seqlen_kv)
    tl.store(Keep + row.to(tl.int64) * seqlen_q * seqlen_kv + queries * seqlen_kv + keys, keep.to(tl.int8), mask=inside)


def drawn(problem: Problem) -> Tensor:
    """bool (B, Hq, Sq, Skv): which weights the kernels keep, drawn for all keys at once rather than tile by tile."""
    case = problem.case
    keep = torch.empty(
        (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv), dtype=torch.int8, device=problem.q.device
    )
    block_k = triton.next_power_of_2(case.seqlen_kv)
    numbers = (case.seqlen_q, case.seqlen_kv, case.dropout_p, _DRAWN, block_k)
    _draw[(case.batch * case.heads_q, triton.cdiv(case.seqlen_q, _DRAWN))](keep, problem.named["seed"], *numbers)
    return keep != 0
