"""Attentions over slots of a cache that ranks share, compiled on each rank of a group, against the same without a compiler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting import verifications as results
from attn_compiler.torch_private import inductor as torch_inductor

#: batch rows, heads, heads of k and v, width
B, HEADS, HEADS_KV, WIDTH = 2, 4, 2, 8
POSITIONS, FILLED = 12, 7

#: (q, k, v, data) -> out, in (B, H, S, D); k and v have all positions
Attend = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """queries: how many. attend: of whole keys. slots: makes them of what a rank keeps; None: both are gathered as the cache does it.
    symbol: of q, k and v, the axis whose size is a symbol: that of rows, or of k and v that of positions."""

    attend: Attend
    queries: int = 1
    rows: int = B
    heads_kv: int = HEADS_KV
    grad: bool = False
    slots: Callable[[Tensor, Tensor, Mapping[str, Tensor], ContextParallel], tuple[Tensor, Tensor]] | None = None
    inner: str = "aot_eager"
    verify: bool = False
    symbol: int | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """error: the largest difference from what the same gives without a compiler. calls: names of ops in the graph. masks, notes: of all
    sites. specs: their texts. checked: outputs of sites that `verify` compared."""

    error: float
    calls: tuple[str, ...]
    masks: tuple[str, ...]
    notes: tuple[str, ...]
    specs: tuple[str, ...]
    checked: int


def _places(q: Tensor, k: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Positions of queries (Q, 1) and of keys (1, N)."""
    own = torch.arange(q.shape[2], device=q.device) + data["start"]
    return own[:, None], torch.arange(k.shape[2], device=q.device)[None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: object) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1], **given)  # type: ignore[arg-type]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) / math.sqrt(q.shape[-1])


def _weighted(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v.repeat_interleave(scores.shape[1] // v.shape[1], 1)


def everything(q: Tensor, k: Tensor, v: Tensor, data: Mapping[str, Tensor]) -> Tensor:
    return _sdpa(q, k, v, None)


def filled(q: Tensor, k: Tensor, v: Tensor, data: Mapping[str, Tensor]) -> Tensor:
    """As a model with a static cache masks: what comes after the query is not there yet."""
    i, j = _places(q, k, data)
    return _sdpa(q, k, v, (j <= i)[None, None])


def _padded(q, k, v, data):
    i, j = _places(q, k, data)
    return _sdpa(q, k, v, (j <= i) & data["real"][:, None, None, :])


def _added(q, k, v, data):
    i, j = _places(q, k, data)
    return _weighted(_scores(q, k) + torch.where(j <= i, 0.0, -math.inf), v)


def _near(q, k, v, data):
    """Of two neighbours a rank has one, or none of the single key that the first query sees."""
    i, j = _places(q, k, data)
    return _sdpa(q, k, v, (j <= i) & (i - j < 1))


def _no_keys(q, k, v, data):
    """The last query has no key on any rank."""
    i, j = _places(q, k, data)
    return _sdpa(q, k, v, (j <= i) & (i < data["start"] + 2))


def _alibi(q, k, v, data):
    i, j = _places(q, k, data)
    bias = data["slopes"][:, None, None] * (j - i)
    return _sdpa(q, k, v, bias[None].masked_fill(j > i, -math.inf))


def _learned(q, k, v, data):
    i, j = _places(q, k, data)
    bias = data["table"][(j - i).clamp(-3, 3) + 3].permute(2, 0, 1)[None]
    return _weighted((_scores(q, k) + bias).masked_fill(j > i, -math.inf), v)


def _softcap(q, k, v, data):
    i, j = _places(q, k, data)
    return _weighted((torch.tanh(_scores(q, k) / 2.0) * 2.0).masked_fill(j > i, -math.inf), v)


def _sunk(q, k, v, data):
    i, j = _places(q, k, data)
    scores = _scores(q, k).masked_fill(j > i, -math.inf)
    column = data["sinks"].view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _given_mask(q, k, v, data):
    """Ready-made, as `generate` hands them over, with a head's own."""
    return _sdpa(q, k, v, data["mask"])


def _wide(q, k, v, data):
    return filled(q.float(), k.float(), v.float(), data).double()


def _turned(kept_k: Tensor, kept_v: Tensor, data: Mapping[str, Tensor], cp: ContextParallel) -> tuple[Tensor, Tensor]:
    """Rotated where they are read."""
    k, v = (_keys(x, cp) for x in (kept_k, kept_v))
    return k * torch.cos(torch.arange(POSITIONS, dtype=k.dtype))[:, None], v


def _exchanged(
    kept_k: Tensor, kept_v: Tensor, data: Mapping[str, Tensor], cp: ContextParallel
) -> tuple[Tensor, Tensor]:
    """Positions and width in another order."""
    k, v = (_keys(x, cp) for x in (kept_k, kept_v))
    return k, v.flip(2)


def _written(kept_k: Tensor, kept_v: Tensor, data: Mapping[str, Tensor], cp: ContextParallel) -> tuple[Tensor, Tensor]:
    """After what all ranks keep was gathered."""
    k, v = (_keys(x, cp) for x in (kept_k, kept_v))
    kept_v.mul_(2.0)
    return k, v


def _part(kept_k: Tensor, kept_v: Tensor, data: Mapping[str, Tensor], cp: ContextParallel) -> tuple[Tensor, Tensor]:
    """Of the filled positions alone."""
    k, v = (_keys(x, cp)[:, :, :FILLED] for x in (kept_k, kept_v))
    return k, v


#: by the name of a group, that of another one with the same ranks
_OTHERS: dict[str, str] = {}


def _of_others(
    kept_k: Tensor, kept_v: Tensor, data: Mapping[str, Tensor], cp: ContextParallel
) -> tuple[Tensor, Tensor]:
    k, v = (torch_collectives.keys_of_slots(x, cp.size, _OTHERS[cp.group_name]) for x in (kept_k, kept_v))
    return k, v


def _weights_read(q, k, v, data):
    i, j = _places(q, k, data)
    weights = _scores(q, k).masked_fill(j > i, -math.inf).softmax(-1)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1) + weights.mean()


def _keys(x: Tensor, cp: ContextParallel) -> Tensor:
    found: Tensor = torch_collectives.keys_of_slots(x, cp.size, cp.group_name)
    return found


RIGHT: Mapping[str, Case] = {
    "everything": Case(attend=everything),
    "filled": Case(attend=filled),
    "filled, several queries": Case(attend=filled, queries=3),
    "filled, one row": Case(attend=filled, rows=1),
    "filled, one head of keys": Case(attend=filled, heads_kv=1),
    "filled, as many heads": Case(attend=filled, heads_kv=HEADS),
    "filled, verified": Case(attend=filled, queries=2, inner="eager", verify=True),
    "filled, Inductor": Case(attend=filled, inner="inductor"),
    "left padding": Case(attend=_padded),
    "added": Case(attend=_added, queries=2),
    "keys of one rank": Case(attend=_near, queries=3),
    "no keys": Case(attend=_no_keys, queries=3),
    "causal flag": Case(attend=lambda q, k, v, data: _sdpa(q, k, v, None, is_causal=True), queries=POSITIONS),
    "ALiBi": Case(attend=_alibi, queries=2),
    "learned bias": Case(attend=_learned, queries=2),
    "softcap": Case(attend=_softcap, queries=2),
    "sinks": Case(attend=_sunk, queries=2),
    "sinks, verified": Case(attend=_sunk, inner="eager", verify=True),
    "filled, any number of rows": Case(attend=filled, symbol=0, rows=3),
    "mask from outside": Case(attend=_given_mask, queries=2),
}
#: name -> (case, what the report says)
KEPT: Mapping[str, tuple[Case, str]] = {
    "rotated where they are read": (Case(attend=filled, slots=_turned), "not what the cache gives"),
    "other values": (
        Case(attend=filled, slots=lambda kept_k, kept_v, data, cp: (_keys(kept_k, cp), data["values"])),
        "not what the cache gives",
    ),
    "in another order": (Case(attend=everything, slots=_exchanged), "not what the cache gives"),
    "written": (Case(attend=filled, slots=_written), "the cache is written to"),
    "of another group": (Case(attend=filled, slots=_of_others), "other ranks than ContextParallel's"),
    "a part of the positions": (Case(attend=everything, slots=_part), "not"),
    "weights are read": (Case(attend=_weights_read), "weights are read"),
    "any number of positions": (Case(attend=_added, symbol=2), "not known when the graph is compiled"),
    "a gradient": (Case(attend=filled, grad=True), "it has a gradient"),
}


def measured(names: list[str]) -> dict[str, Found]:
    """To be called on every rank of a group."""
    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    _OTHERS[cp.group_name] = dist.new_group().group_name
    cases = {**RIGHT, **{name: case for name, (case, _) in KEPT.items()}}
    return {name: _measured(cases[name], cp) for name in names}


def mismatch() -> str:
    """To be called on every rank of a group: what `verify` says where each rank masks as if it were the first."""

    def first(self: GraphLayout, builder: GraphBuilder, device: torch.device) -> fx.Node:
        return builder.call(torch.zeros, (), dtype=torch.int64, device=device)

    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    with mock.patch.object(GraphLayout, "rank", first), pytest.raises(VerificationMismatch) as caught:
        _measured(RIGHT["filled, verified"], cp)
    return str(caught.value)


def _measured(case: Case, cp: ContextParallel) -> Found:
    torch._dynamo.reset()
    attn_compiler.reset()
    results.forget()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q = random(case.rows, HEADS, case.queries, WIDTH).requires_grad_(case.grad)
    whole = [random(case.rows, case.heads_kv, POSITIONS, WIDTH) for _ in range(2)]
    own = [x[:, :, cp.rank :: cp.size].contiguous() for x in whole]
    data = {
        "start": torch.tensor(FILLED - 1 - (case.queries - 1) * (case.queries < POSITIONS)).clamp(min=0),
        "real": torch.arange(POSITIONS) >= torch.tensor([0, 3, 5])[: case.rows, None],
        "slopes": 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64),
        "table": random(7, HEADS),
        "sinks": random(HEADS),
        "values": whole[1],
        "mask": random(case.rows, HEADS, case.queries, POSITIONS) > -0.3,
    }

    def call(q: Tensor, kept_k: Tensor, kept_v: Tensor, data: dict[str, Tensor]) -> Tensor:
        if case.slots is not None:
            k, v = case.slots(kept_k, kept_v, data, cp)
        else:
            k, v = _keys(kept_k, cp), _keys(kept_v, cp)
        return case.attend(q, k, v, data)

    graphs: list[fx.GraphModule] = []
    expected = call(q, *(x.clone() for x in own), data)
    options = {"context_parallel": cp, "inner": case.inner, "verify": case.verify}
    with _noted(graphs):
        compiled = torch.compile(call, backend="attn_compiler", options=options, fullgraph=True)
        given = [q, *(x.clone() for x in own)]
        if case.symbol is not None:
            for x in given[case.symbol == 2 :]:
                torch._dynamo.mark_dynamic(x, case.symbol)
        with torch.set_grad_enabled(case.grad):
            out = compiled(*given, data)
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    return Found(
        error=float((out - expected).abs().max()),
        calls=tuple(target_name(node) for gm in graphs for node in gm.graph.nodes if node.op == "call_function"),
        masks=tuple(site.spec.mask.words for site in sites),
        notes=tuple(note for site in sites for note in site.notes),
        specs=tuple(site.spec.to_text() for site in sites),
        checked=sum(x.subject == "output" and x.skipped is None for x in attn_compiler.verifications()),
    )


class _noted:
    """Keeps the graphs that an inner compiler is given."""

    def __init__(self, graphs: list[fx.GraphModule]) -> None:
        self.graphs = graphs

    def __enter__(self) -> None:
        self.before = torch_inductor.compile_with_backend

        def kept(name: str, gm: fx.GraphModule, inputs: object) -> object:
            self.graphs.append(gm)
            return self.before(name, gm, inputs)  # type: ignore[arg-type]

        torch_inductor.compile_with_backend = kept  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        torch_inductor.compile_with_backend = self.before
