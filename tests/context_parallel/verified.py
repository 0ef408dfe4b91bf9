"""Models of models.py that are verified on several ranks, as they are and with a fault, run in each process of a group."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from attn_compiler import CompileFailed, ContextParallel, VerificationMismatch
from attn_compiler.context_parallel import collectives as torch_collectives, rank_sync
from attn_compiler.passes.context_parallel import exchanging
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.reporting import verifications as results
from attn_compiler.verifying import Verification, ranks, verifications
from tests.context_parallel import models
from tests.context_parallel.against_one import LENGTH, Run


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One model that is verified. fault: of FAULTS, or "". dtype: of the model."""

    run: Run
    fault: str = ""
    dtype: torch.dtype = torch.float64

    @property
    def name(self) -> str:
        return " · ".join(filter(None, (self.run.name, str(self.dtype), self.fault)))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """found: by the first call. error: the text of what it raised. site, what: of a mismatch. again: what was found by a second call."""

    found: tuple[Verification, ...] = ()
    error: str | None = None
    site: str | None = None
    what: str | None = None
    again: tuple[Verification, ...] = ()


def _of_text(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Mapping[str, torch.Tensor], model: models.Model
) -> torch.Tensor:
    """Keys of a text beside the sequence, which every rank has as a whole."""
    text = data["text"]
    keys, values = (p(text).unflatten(-1, (model.heads_kv, -1)).transpose(1, 2) for p in (model.k, model.v))
    return F.scaled_dot_product_attention(q, keys, values) + F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _text(_: int) -> models.Batch:
    shape = (models.BATCH, 7, models.WIDTH)
    return {"text": torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))}


REPLICATED = "keys that every rank has"
CASES: Mapping[str, models.Case] = {**models.EVERY, REPLICATED: models.Case(attend=_of_text, data=_text)}


def outcomes(every: list[Checked]) -> list[Outcome]:
    """To be called on every rank of a group."""
    found = []
    for one in every:
        with FAULTS[one.fault]():
            found.append(_outcome(one))
    return found


def _outcome(one: Checked) -> Outcome:
    torch._dynamo.reset()
    attn_compiler.reset()
    results.forget()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cp = ContextParallel(
        mesh,
        method=one.run.method,  # type: ignore[arg-type]
        load_balance=one.run.load_balance,  # type: ignore[arg-type]
        replicated=("text",),
    )
    case = CASES[one.run.case]
    model, batch = models.build(case).to(one.dtype), models.batch(case, LENGTH)
    batch = {name: x.to(one.dtype) if x.is_floating_point() else x for name, x in batch.items()}
    own = cp.positions(LENGTH // cp.size)
    part = {name: x if name == "text" else x[:, own].contiguous() for name, x in batch.items()}
    options = {"context_parallel": cp, "inner": one.run.inner, "verify": True}
    compiled = torch.compile(model, backend="attn_compiler", options=options)
    try:
        compiled(**part).sum().backward()
    except VerificationMismatch as error:
        return Outcome(error=str(error), site=error.site, what=error.what)
    except CompileFailed as error:
        return Outcome(error=str(error))
    found = verifications()
    results.forget()
    compiled(**part)
    return Outcome(found=found, again=verifications())


# ---- faults --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _positions_off_by_rank() -> Iterator[None]:
    """Rank 1 takes its queries to stand one further than they do; rank 0's stand where they do. The ranks' graphs are equal."""
    right, exchange = GraphLayout._positions, exchanging.exchange

    def further(self: GraphLayout, builder: Any, positions: Any) -> Any:
        return builder.call(torch.add, positions, self.rank(builder, torch.device("cpu")))

    def of_layout(self: GraphLayout, builder: Any, length: int, device: torch.device) -> Any:
        return further(self, builder, right(self, builder, length, device))

    def of_heads(builder: Any, layout: GraphLayout, *qkv: Any) -> Any:
        met = exchange(builder, layout, *qkv)
        return dataclasses.replace(met, queries=further(layout, builder, met.queries))

    with mock.patch.object(GraphLayout, "_positions", of_layout), mock.patch.object(exchanging, "exchange", of_heads):
        yield


@contextlib.contextmanager
def _rank_0_twice() -> Iterator[None]:
    """Rank 1 takes itself for rank 0 when the compiled graph runs."""
    with mock.patch.object(torch_collectives, "rank_of", return_value=0):
        yield


@contextlib.contextmanager
def _swapped_on_rank_1(*, of_masks: bool) -> Iterator[None]:
    """Rank 1 puts what it gets together in another order: q, k and v, or what masks read. (Of both, attention would be what it was.)"""
    right = torch_collectives.joined

    def joined(by_rank: torch.Tensor, axis: int, balanced: bool) -> torch.Tensor:
        is_wrong = dist.get_rank() == 1 and by_rank.is_floating_point() != of_masks
        return right(by_rank.flip(0) if is_wrong else by_rank, axis, balanced)

    with mock.patch.object(torch_collectives, "joined", joined):
        yield


@contextlib.contextmanager
def _scores_read_twice_as_large() -> Iterator[None]:
    """The scale is read wrongly, so that the rewritten graph and what it is held against agree, and are no attention of the model's."""
    right = ranks.AsRead.run

    def run(self: ranks.AsRead, *given: Any) -> torch.Tensor:
        score = dataclasses.replace(self.spec.score, scale=2 * self.spec.score.scale)
        wrong = dataclasses.replace(self, spec=dataclasses.replace(self.spec, score=score))
        return right(wrong, *given)

    with mock.patch.object(ranks.AsRead, "run", run):
        yield


@contextlib.contextmanager
def _check_fails_on_rank_1() -> Iterator[None]:
    """Before it meets the others at the second attention."""
    right, calls = rank_sync.agree, []

    def agree(group: str, subject: str, said: str, *, seconds: float) -> None:
        calls.append(subject) if subject.startswith("the attention") else None
        if dist.get_rank() == 1 and len(calls) == 2:
            raise MemoryError("out of luck")
        right(group, subject, said, seconds=seconds)

    with mock.patch.object(rank_sync, "agree", agree):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "": contextlib.nullcontext,
    "positions off by the rank": _positions_off_by_rank,
    "rank 0 twice": _rank_0_twice,
    "pieces swapped on rank 1": functools.partial(_swapped_on_rank_1, of_masks=False),
    "masks swapped on rank 1": functools.partial(_swapped_on_rank_1, of_masks=True),
    "scores read twice as large": _scores_read_twice_as_large,
    "the check fails on rank 1": _check_fails_on_rank_1,
}
