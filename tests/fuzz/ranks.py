"""Random models around an attention, each on two processes that share the sequence, held against one process that has all of it:

    python -m tests.fuzz.ranks --programs 500 --seed 1

A model is a few steps before an attention and after it. A step brings a number into hidden states, and numbers are made of the length, of
what counts positions, of the positions or of the model, so most models are no good on a part of a sequence. What counts is that none is
wrong: it is equal to one process, in outputs and gradients, or it is refused on every rank.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests import conftest  # noqa: F401 (what processes are started with)
from tests.distributed import processes

WIDTH, HEADS, BATCH, ROWS = 16, 2, 2, 64
#: of the whole sequence; ranks' parts divide WIDTH, are equal to it, and are neither
LENGTHS = (8, 16, 32, 24, 40)
#: a program that runs is equal below this, in float64
EXACT = 1e-9

#: (length, constant) -> a number of Python
NUMBERS: Mapping[str, Callable[[int, float], float]] = {
    "c": lambda s, c: c,
    "S": lambda s, c: s,
    "S - 1": lambda s, c: s - 1,
    "S // 2": lambda s, c: s // 2,
    "S + c": lambda s, c: s + c,
    "c * S": lambda s, c: c * s,
    "1 / S": lambda s, c: 1 / s,
    "log(S + c)": lambda s, c: math.log(s + abs(c)),
    "sqrt(S)": lambda s, c: math.sqrt(s),
    "sin(S)": lambda s, c: math.sin(s),
    "S % 4": lambda s, c: s % 4,
    "S % 5": lambda s, c: s % 5,
    "min(S, 3)": lambda s, c: min(s, 3),
    "S > 20": lambda s, c: float(s > 20),
}
#: (length, like) -> a tensor that counts positions, and a number of it
COUNTED: Mapping[str, Callable[[int, Tensor], Tensor]] = {
    "ones(S).sum()": lambda s, x: x.new_ones(s).sum(),
    "ones(S).mean()": lambda s, x: x.new_ones(s).mean(),
    "arange(S)[-1]": lambda s, x: torch.arange(s, device=x.device)[-1],
    "arange(S)[0]": lambda s, x: torch.arange(s, device=x.device)[0],
    "arange(S).max()": lambda s, x: torch.arange(s, device=x.device).max(),
    "eye(S).trace()": lambda s, x: torch.eye(s, dtype=x.dtype).trace(),
    "ones(S, 1).norm()": lambda s, x: x.new_ones(s, 1).norm(),
    "tensor(S)": lambda s, x: torch.tensor(float(s), dtype=x.dtype),
    "full((1,), S)": lambda s, x: x.new_full((1,), s),
    "zeros(S)[:1]": lambda s, x: x.new_zeros(s)[:1],
    "x.shape as a tensor": lambda s, x: torch.tensor(x.shape).prod().to(x.dtype) / 100,
}
#: (hidden states, number, positions) -> hidden states
SINKS: Mapping[str, Callable[[Tensor, float, Tensor], Tensor]] = {
    "times": lambda x, n, p: x * n,
    "plus": lambda x, n, p: x + n,
    "by": lambda x, n, p: x / (n + 0.5),
    "alpha": lambda x, n, p: torch.add(x, x.cos(), alpha=n),
    "addcmul": lambda x, n, p: torch.addcmul(x, x, x, value=n),
    "lerp": lambda x, n, p: torch.lerp(x, x.sin(), n / 50),
    "pow": lambda x, n, p: x.abs().clamp(0.1, 1.0) ** (n / 10),
    "clamp": lambda x, n, p: x.clamp(max=n / 10),
    "full_like": lambda x, n, p: x + torch.full_like(x, n),
    "masked": lambda x, n, p: x.masked_fill(x > 1, n),
    "where": lambda x, n, p: torch.where(x > 0, x, n),
    "positions equal": lambda x, n, p: x + (p == n)[..., None],
    "positions below": lambda x, n, p: x + (p < n)[..., None],
    "positions less": lambda x, n, p: x + (n - p)[..., None] * 0.01,
    "positions modulo": lambda x, n, p: x + (p % (n + 1))[..., None] * 0.01,
    "positions times": lambda x, n, p: x + torch.cos(p * n)[..., None],
    "features": lambda x, n, p: torch.cat((x[..., : int(abs(n)) % 7], x[..., int(abs(n)) % 7 :] * 2), -1),
    "epsilon": lambda x, n, p: F.layer_norm(x, (WIDTH,), eps=abs(n) + 0.01),
}
#: the same for tensors that hold one number
TENSOR_SINKS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "times": lambda x, n, p: x * n,
    "plus": lambda x, n, p: x + n,
    "minimum": lambda x, n, p: torch.minimum(x, n / 10),
    "positions equal": lambda x, n, p: x + (p == n)[..., None],
    "positions less": lambda x, n, p: x + (n - p)[..., None] * 0.01,
    "joined": lambda x, n, p: torch.cat((x[..., 1:], n.to(x.dtype).expand(*x.shape[:2], 1)), -1),
}
#: what keeps positions apart, or does not
OTHERS: Mapping[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "linear": lambda m, x, p: m.mix(x),
    "norm": lambda m, x, p: F.layer_norm(x, (WIDTH,)),
    "gelu": lambda m, x, p: F.gelu(x),
    "softmax of features": lambda m, x, p: x.softmax(-1),
    "table of positions": lambda m, x, p: x + m.table(p),
    "table by frequency": lambda m, x, p: x + F.embedding(p % 5, m.table.weight, scale_grad_by_freq=True),
    "flattened": lambda m, x, p: m.mix(x.reshape(-1, WIDTH)).view(x.shape),
    "heads": lambda m, x, p: x.unflatten(-1, (4, -1)).flip(2).flatten(2),
    "rotated": lambda m, x, p: x * torch.cos(p / 7)[..., None] + x.roll(1, -1) * torch.sin(p / 7)[..., None],
    "expanded": lambda m, x, p: x + m.table.weight[0].expand(x.shape[1], -1),
    "transposed view": lambda m, x, p: x.transpose(1, 2).reshape(x.shape),
    "batch between": lambda m, x, p: x.transpose(0, 1).reshape(x.shape),
    "rows of features": lambda m, x, p: x.reshape(BATCH, WIDTH, -1).transpose(1, 2).reshape(x.shape),
    "mean": lambda m, x, p: x - x.mean(1, keepdim=True),
    "cumsum": lambda m, x, p: x.cumsum(1),
    "reversed": lambda m, x, p: x.flip(1),
    "fours reversed": lambda m, x, p: x.view(BATCH, -1, 4, WIDTH).flip(2).reshape(x.shape),
    "means of fours": lambda m, x, p: x - x.view(BATCH, -1, 4, WIDTH).mean(2).repeat_interleave(4, 1),
    "last": lambda m, x, p: x + x[:, -1:],
    "own positions": lambda m, x, p: x + m.table(torch.arange(x.shape[1])),
    "in place": lambda m, x, p: x.clone().mul_(2).add_(1),
    "repeated": lambda m, x, p: x.repeat_interleave(2, 2).unflatten(2, (-1, 2)).mean(-1),
    "einsum": lambda m, x, p: torch.einsum("bsw,vw->bsv", x, m.mix.weight),
    "sum of all": lambda m, x, p: x / (1 + x.sum().abs()),
}
#: (number of queries, queries' numbers, keys', constant) -> a mask; None: causal by its flag
MASKS: Mapping[str, Callable[[int, Tensor, Tensor, int], Tensor] | None] = {
    "flag": None,
    "causal": lambda s, q, k, c: k <= q,
    "window": lambda s, q, k, c: (k <= q) & (q - k < c),
    "both sides": lambda s, q, k, c: (q - k).abs() <= c,
    "prefix": lambda s, q, k, c: (k <= q) | (k < c),
    "prefix of the length": lambda s, q, k, c: (k <= q) | (k < s // c),
    "all but some": lambda s, q, k, c: (k <= q) & (k < s - c),
    "bias": lambda s, q, k, c: (k - q).double() * (0.1 * c),
    "bias by length": lambda s, q, k, c: (k - q).double() * (c / s),
}


#: (hidden states, labels) -> what the model gives: its hidden states, some of them, or the sum of its losses
ENDINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hidden states": lambda x, y: x,
    "all but the first": lambda x, y: x[:, 1:],
    "all but the last": lambda x, y: x[:, :-1],
    "the last": lambda x, y: x[:, -1:],
    "the first half": lambda x, y: x[:, : x.shape[1] // 2],
    "fours": lambda x, y: x.view(BATCH, -1, 4, WIDTH),
    "sums of fours": lambda x, y: x.view(BATCH, -1, 4, WIDTH).sum(2),
    "losses": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "losses of the next": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum"),
    "mean loss": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
}

#: what is good on a part of a sequence: drawn more often, so that programs run
_PLAIN = [
    "linear",
    "norm",
    "gelu",
    "softmax of features",
    "table of positions",
    "flattened",
    "heads",
    "in place",
    "einsum",
]
#: views by the length: they mean something else where a rank has as many positions as a tensor has features
_OF_SHAPES = ("transposed view", "rows of features", "batch between")
_PLAIN_MASKS = ["flag", "causal", "window", "both sides", "prefix", "bias"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """kind: "number", "counted" or "other". source, sink: names in the tables. constant: of the number."""

    kind: str
    source: str
    sink: str = ""
    constant: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """before, after: steps around the attention. balanced: the order of positions. ending: its name. body: all but the ending is in the
    body of a checkpoint. packed: inputs come in an object. answered: the user answers for numbers of the length; there are none."""

    before: tuple[Step, ...]
    after: tuple[Step, ...]
    mask: str
    constant: int
    length: int
    method: str
    balanced: bool
    ending: str = "hidden states"
    body: bool = False
    packed: bool = False
    answered: bool = False


@dataclass
class Batch:
    x: Tensor
    positions: Tensor
    labels: Tensor


class Model(nn.Module):
    """Hidden states (B, S, WIDTH), position_ids (B, S) and labels (B, S) -> what its ending gives"""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.q, self.k, self.v, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(ROWS, WIDTH)

    def step(self, step: Step, x: Tensor, p: Tensor) -> Tensor:
        if step.kind == "other":
            return OTHERS[step.source](self, x, p)
        if step.kind == "number":
            return SINKS[step.sink](x, NUMBERS[step.source](x.shape[1], step.constant), p)
        return TENSOR_SINKS[step.sink](x, COUNTED[step.source](x.shape[1], x), p)

    def forward(self, batch: Batch | tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, position_ids, labels = (batch.x, batch.positions, batch.labels) if isinstance(batch, Batch) else batch
        if self.program.body:
            x = checkpoint(self.hidden_states, x, position_ids, use_reentrant=False)
        else:
            x = self.hidden_states(x, position_ids)
        return ENDINGS[self.program.ending](x, labels)

    def hidden_states(self, x: Tensor, position_ids: Tensor) -> Tensor:
        for step in self.program.before:
            x = self.step(step, x, position_ids)
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        make, at = MASKS[self.program.mask], torch.arange(x.shape[1])
        mask = None if make is None else make(x.shape[1], at[:, None], at[None], self.program.constant)
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(x.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + out.transpose(1, 2).flatten(2)
        for step in self.program.after:
            x = self.step(step, x, position_ids)
        return x


def drawn(seed: int, count: int) -> list[Program]:
    """The same for the same seed."""
    draw = random.Random(seed)
    return [_program(draw) for _ in range(count)]


def _program(draw: random.Random) -> Program:
    answered = draw.random() < 0.25
    steps = [_step(draw, numbers=not answered) for _ in range(draw.choice((1, 1, 2, 3)))]
    cut = draw.randrange(len(steps) + 1)
    return Program(
        before=tuple(steps[:cut]),
        after=tuple(steps[cut:]),
        mask=draw.choice([*_PLAIN_MASKS * 3, *([] if answered else MASKS)]),
        constant=draw.randint(2, 5),
        length=draw.choice(LENGTHS),
        method=draw.choice(("auto", "all_gather", "all_to_all", "ring")),
        balanced=draw.random() < 0.5,
        ending=draw.choice(["hidden states"] * 16 + ["losses"] * 2 + list(ENDINGS)),
        body=draw.random() < 0.25,
        packed=draw.random() < 0.25,
        answered=answered,
    )


def _step(draw: random.Random, *, numbers: bool) -> Step:
    """numbers: it may be one of the length."""
    kind = draw.choices(("number", "counted", "other"), (5, 2, 5) if numbers else (1, 0, 5))[0]
    if kind == "other":
        sources = [*_PLAIN * 2, *OTHERS] if numbers else [name for name in OTHERS if name not in _OF_SHAPES]
        return Step(kind=kind, source=draw.choice(sources))
    tables, sinks = (NUMBERS, SINKS) if kind == "number" else (COUNTED, TENSOR_SINKS)
    constant = draw.choice((0.3, 2.0, 7.0, 15.0, 16.0, -1.0))
    alike = ["c", "S % 4", "min(S, 3)"] * 5 if kind == "number" else ["arange(S)[0]"]
    source = draw.choice([*alike, *tables]) if numbers else "c"
    return Step(kind=kind, source=source, sink=draw.choice(list(sinks)), constant=constant)


def outcomes(programs: list[Program]) -> list[str]:
    """Of each program "equal", "refused: why", "discarded: why" (one process can't run it) or "wrong: by how much". On every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for program in programs:
        cp = ContextParallel(
            mesh,
            method=program.method,  # type: ignore[arg-type]
            load_balance="head_tail" if program.balanced else None,
            allow=("length",) if program.answered else (),
        )
        found.append(_outcome(program, cp))
    return found


def _outcome(program: Program, cp: ContextParallel) -> str:
    torch._dynamo.reset()
    attn_compiler.reset()
    model, length = Model(program).double(), program.length
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, WIDTH, (BATCH, length), generator=generator)
    positions = torch.arange(length).expand(BATCH, length).contiguous()
    try:
        wanted = model((x, positions, labels))
        weight = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
        (wanted * weight).sum().backward()
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return f"discarded: {type(error).__name__}"
    if not bool(wanted.isfinite().all()):
        return "discarded: not finite"
    gradients = _taken_gradients(model)
    own = cp.positions(length // cp.size)
    compiled = torch.compile(model, backend="attn_compiler", options={"context_parallel": cp, "inner": "eager"})
    parts = tuple(whole[:, own].contiguous() for whole in (x, positions, labels))
    try:
        out = compiled(Batch(*parts) if program.packed else parts)
    except ContextParallelUnsupported as error:
        return f"refused: {error.rule}"
    if wanted.shape[1:2] not in ((), (length,)):
        return "wrong: some positions of each rank are none of the whole sequence's"
    if wanted.dim():
        wanted, weight = wanted[:, own], weight[:, own]
    (out * weight).sum().backward()
    found = out.detach().clone()
    if not wanted.dim():
        dist.all_reduce(found)
    far = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))
    mine = _taken_gradients(model)
    for name, parameter in model.named_parameters():
        total = mine.get(name, torch.zeros_like(parameter)).to_dense()
        dist.all_reduce(total)
        expected = gradients.get(name, torch.zeros_like(parameter)).to_dense()
        far = max(far, float((total - expected).abs().nan_to_num(torch.inf).max() / expected.abs().max().clamp(min=1)))
    return "equal" if far < EXACT else f"wrong: {far:.3g}"


def _taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


#: programs of one pair of processes
_BATCH = 100


def run(seed: int, count: int) -> list[tuple[Program, list[str]]]:
    """Programs, with their outcome on each rank."""
    programs, found = drawn(seed, count), []
    for begin in range(0, count, _BATCH):
        some = programs[begin : begin + _BATCH]
        by_rank = processes.run(outcomes, some)
        found += [(program, [ranks[i] for ranks in by_rank]) for i, program in enumerate(some)]
    return found


def kind_of(ranks: list[str]) -> str:
    """One word for what all ranks said; "wrong" where one is, or where they differ."""
    kinds = {one.partition(":")[0] for one in ranks}
    return kinds.pop() if len(kinds) == 1 else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally: collections.Counter[str] = collections.Counter()
    for program, ranks in run(options.seed, options.programs):
        kind = kind_of(ranks)
        tally[kind] += 1
        if kind == "wrong":
            sys.stdout.write(f"{ranks}: {program}\n")
    sys.stdout.write(f"{dict(tally)}\n")
    sys.exit(1 if tally["wrong"] else 0)


if __name__ == "__main__":
    # Processes find what they run by its module's name.
    from tests.fuzz import ranks

    ranks.main()
