"""Decoding with multi-head latent attention: steps of DeepSeek-like models beside Inductor's, and on a GPU the attention alone.

    python -m benchmarks.bench_mla                          # CPU: one thread, the process's own time; writes results/mla_cpu.csv
    python -m benchmarks.bench_mla --device cuda            # writes results/mla_h200.csv
    python -m benchmarks.bench_mla --device cuda --cases 'v3*' --what attention --tried
    python -m benchmarks.bench_mla --device cuda --cases 'heads*' --out benchmarks/results/mla_heads_h200.csv   # of many heads
    python -m benchmarks.bench_mla --dry-run                # all of it on a CPU, tiny, nothing is written

Steps: both sides in one process, in turn, on one model and one cache; on a GPU in bfloat16 with mode="reduce-overhead". `error` is the
largest difference of our logits from those of the model in float32, relative to the largest, `own_error` Inductor's.

Attention: microseconds of the GPU for one layer, from CUDA graphs that hold one call for each of many caches, which together are larger
than the L2 cache. gb_per_s: of the filled part of the cache. `copy` rows are what a copy of memory reaches in the same run; `of_bound` is
the share of what binds, that or 989 TFLOP/s of products. `rule` rows have the schedule that is picked, `triton` rows that of the Triton
kernel where the kernel for Hopper is picked, and `tried` rows others of the Triton kernel. Cases `heads*` have no steps.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from attn_compiler.lowerings.decode import latent_schedule, plan
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule
from attn_compiler.spec.attention import AttentionSpec, LatentSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import ScoreSpec
from attn_compiler.spec.target import Target
from benchmarks import bench_decode, harness
from benchmarks.harness import Bench, arg

SCHEDULE = ("rows", "keys", "warps", "stages", "splits", "hopper")
COLUMNS = (
    *("case", "heads", "rank", "rope", "batch", "length", "filled", "what", "side", *SCHEDULE),
    *("ms", "ratio", "us", "gb_per_s", "tflops", "of_bound", "error", "own_error", "failure"),
)
#: of an H200 in bfloat16, without sparsity
PEAK_TFLOPS = 989.0
#: (keys, warps, stages, programs of a multiprocessor) by rows of a tile
CANDIDATES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 8, 3, 1), (32, 4, 2, 4), (32, 4, 3, 2), (64, 4, 2, 2), (64, 8, 2, 2), (64, 4, 3, 1), (128, 8, 2, 1)),
    32: ((64, 8, 3, 1), (64, 8, 2, 1), (32, 8, 3, 1), (32, 4, 2, 2)),
    64: ((64, 8, 2, 1), (32, 8, 3, 1), (32, 8, 2, 1)),
}
_LEAST_KEYS = (64, 128, 256, 512)
_CACHES_TOGETHER = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """inner: of the feed-forward layers, those that one token uses. q_rank: None where q has one projection."""

    layers: int
    hidden: int
    inner: int
    heads: int
    q_rank: int | None = None
    rank: int = 512
    rope: int = 64
    nope: int = 128
    v: int = 128
    vocabulary: int = 32000

    @property
    def kept(self) -> int:
        """Numbers of a key in the cache."""
        return self.rank + self.rope


@dataclass(kw_only=True)
class Caches:
    """Static: latent (B, 1, S, rank) and rope (B, 1, S, rope) of each layer. length: (1,), how many are filled."""

    latent: list[Tensor]
    rope: list[Tensor]
    length: Tensor

    @staticmethod
    def filled(sizes: Sizes, batch: int, slots: int, dtype: torch.dtype, device: str, seed: int = 1) -> Caches:
        """Of random numbers. Their addresses stay what they are."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def made(width: int) -> list[Tensor]:
            shape = (batch, 1, slots, width)
            found = [
                torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
                for _ in range(sizes.layers)
            ]
            for tensor in found:
                torch._dynamo.mark_static_address(tensor)
            return found

        length = torch.zeros(1, dtype=torch.long, device=device)
        torch._dynamo.mark_static_address(length)
        return Caches(latent=made(sizes.rank), rope=made(sizes.rope), length=length)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        of_head = sizes.nope + sizes.rope
        if sizes.q_rank is None:
            self.q: nn.Module = nn.Linear(sizes.hidden, sizes.heads * of_head, bias=False)
        else:
            self.q = nn.Sequential(
                nn.Linear(sizes.hidden, sizes.q_rank, bias=False),
                nn.RMSNorm(sizes.q_rank),
                nn.Linear(sizes.q_rank, sizes.heads * of_head, bias=False),
            )
        self.kv_a = nn.Linear(sizes.hidden, sizes.kept, bias=False)
        self.norm = nn.RMSNorm(sizes.rank)
        self.kv_b = nn.Linear(sizes.rank, sizes.heads * (sizes.nope + sizes.v), bias=False)
        self.out = nn.Linear(sizes.heads * sizes.v, sizes.hidden, bias=False)

    def expanded(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of a cache."""
        sizes, (batch, _, slots, _) = self.sizes, latent.shape
        kv = self.kv_b(latent).view(batch, slots, -1, sizes.nope + sizes.v).transpose(1, 2)
        nope, v = torch.split(kv, [sizes.nope, sizes.v], dim=-1)
        k = kv.new_empty(*kv.shape[:-1], sizes.nope + sizes.rope)
        k[..., : sizes.nope].copy_(nope)
        k[..., sizes.nope :].copy_(rope.expand(-1, nope.shape[1], -1, -1))
        return k, v

    def forward(
        self, x: Tensor, latent: Tensor, rope: Tensor, at: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        sizes, (batch, length, _) = self.sizes, x.shape
        q = self.q(x).view(batch, length, -1, sizes.nope + sizes.rope).transpose(1, 2)
        nope, rotary = torch.split(q, [sizes.nope, sizes.rope], dim=-1)
        q = torch.cat((nope, _rotated(rotary, cos, sin)), dim=-1)
        new, new_rope = torch.split(self.kv_a(x), [sizes.rank, sizes.rope], dim=-1)
        latent.index_copy_(2, at, self.norm(new).view(batch, 1, length, sizes.rank))
        rope.index_copy_(2, at, _rotated(new_rope.view(batch, 1, length, sizes.rope), cos, sin))
        k, v = self.expanded(latent, rope)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=(sizes.nope + sizes.rope) ** -0.5)
        made: Tensor = self.out(out.transpose(1, 2).reshape(batch, length, -1))
        return made


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.before, self.between = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        x = x + self.attention(self.before(x), *given)
        inner = self.between(x)
        made: Tensor = x + self.down(silu(self.gate(inner)) * self.up(inner))
        return made


class Decoder(nn.Module):
    """With multi-head latent attention as transformers 5.24 writes it: the latent is cached, and k and v are made of the whole cache in
    each step. Of its own, since older releases cache k and v.

    One step: tokens (B, 1) to logits (B, 1, vocabulary). The caches get what is new, and their length counts on.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedded = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, latent: list[Tensor], rope: list[Tensor], length: Tensor) -> Tensor:
        x = self.embedded(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device) + length
        half = self.sizes.rope // 2
        frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = (at[:, None] * frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        slots = torch.arange(latent[0].shape[2], device=x.device)
        mask = (slots[None, :] <= at[:, None])[None, None].expand(tokens.shape[0], 1, -1, -1)
        length.add_(tokens.shape[1])
        for layer, own, own_rope in zip(self.layers, latent, rope, strict=True):
            x = layer(x, own, own_rope, at, cos, sin, mask)
        made: Tensor = self.head(self.norm(x))
        return made


V2_LITE = Sizes(layers=8, hidden=2048, inner=8 * 1408, heads=16)
V3 = Sizes(layers=4, hidden=7168, inner=9 * 2048, heads=128, q_rank=1536)
CPU = Sizes(layers=2, hidden=1024, inner=2048, heads=16, q_rank=512)
TINY = Sizes(layers=1, hidden=32, inner=32, heads=4, q_rank=16, rank=32, rope=8, nope=16, v=16, vocabulary=64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """length: slots of the cache. filled: how many hold keys."""

    name: str
    sizes: Sizes
    batch: int
    length: int
    filled: int

    @property
    def names(self) -> dict[str, str]:
        return {"case": self.name}

    @property
    def columns(self) -> dict[str, str]:
        shown = {"heads": self.sizes.heads, "rank": self.sizes.rank, "rope": self.sizes.rope}
        shown |= {"batch": self.batch, "length": self.length, "filled": self.filled}
        return self.names | {name: str(value) for name, value in shown.items()}


def _cases(name: str, sizes: Sizes) -> Iterator[Case]:
    for batch in (1, 16):
        yield Case(name=f"{name}_b{batch}_4k", sizes=sizes, batch=batch, length=4096, filled=4000)
        yield Case(name=f"{name}_b{batch}_32k_half", sizes=sizes, batch=batch, length=32768, filled=16384)
        yield Case(name=f"{name}_b{batch}_4k_64", sizes=sizes, batch=batch, length=4096, filled=64)


#: whose attention alone is timed: (heads, sequences, keys)
_HEADS = (
    *((128, batch, keys) for batch in (16, 64, 1) for keys in (4096, 32768)),
    *((64, 16, keys) for keys in (4096, 32768)),
    (16, 16, 4096),
)
HEADS_CASES = tuple(
    Case(
        name=f"heads{n}_b{batch}_{keys}", sizes=dataclasses.replace(V3, heads=n), batch=batch, length=keys, filled=keys
    )
    for n, batch, keys in _HEADS
)
GPU_CASES = (*_cases("v2_lite", V2_LITE), *_cases("v3", V3))
CPU_CASES = (
    Case(name="cpu_b1_1k", sizes=CPU, batch=1, length=1024, filled=900),
    Case(name="cpu_b1_1k_64", sizes=CPU, batch=1, length=1024, filled=64),
    Case(name="cpu_b4_1k", sizes=CPU, batch=4, length=1024, filled=900),
    Case(name="cpu_b1_4k", sizes=CPU, batch=1, length=4096, filled=4000),
)
SMALL = Sizes(layers=1, hidden=256, inner=256, heads=8, rank=128, rope=32, nope=32, v=32, vocabulary=64)
#: whose cache and weights fit into a CPU's own
SMALL_CASES = (Case(name="small_b1_256", sizes=SMALL, batch=1, length=256, filled=200),)
DRY_CASES = (Case(name="dry", sizes=TINY, batch=2, length=64, filled=50),)


class Stepper:
    """One model and one cache for all sides. Each step is the first one after `filled` keys."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Decoder(case.sizes).to(dtype).eval()
        self.caches = Caches.filled(case.sizes, case.batch, case.length, dtype, device)
        self.tokens = torch.full((case.batch, 1), 7, device=device)
        self._is_gpu = device != "cpu"

    def compiled(self, backend: str) -> harness.Step:
        """On a GPU with CUDA graphs."""
        settings = {"mode": "reduce-overhead"} if self._is_gpu else {}
        run = torch.compile(self.model, backend=backend, fullgraph=True, dynamic=False, **settings)

        @torch.no_grad()
        def step() -> Tensor:
            self.caches.length.fill_(self.case.filled)
            if self._is_gpu:
                torch.compiler.cudagraph_mark_step_begin()
            made: Tensor = run(self.tokens, self.caches.latent, self.caches.rope, self.caches.length)
            return made

        return step

    @torch.no_grad()
    def exact(self) -> Tensor:
        """Of the model in float32, in pieces of the batch: k and v of a long cache take much memory."""
        model = Decoder(self.case.sizes).to(self.tokens.device).eval()
        model.load_state_dict(self.model.state_dict())
        found = []
        for row in range(self.case.batch):
            latent, rope = ([x[row : row + 1].float() for x in of] for of in (self.caches.latent, self.caches.rope))
            self.caches.length.fill_(self.case.filled)
            found.append(model.float()(self.tokens[row : row + 1], latent, rope, self.caches.length))
        return torch.cat(found)


def step_rows(case: Case, device: str, seconds: float) -> Iterator[dict[str, str]]:
    """A row a side."""
    torch._dynamo.reset()
    same = {**case.columns, "what": "step"}
    made = Stepper(case, device)
    steps: dict[str, harness.Step] = {}
    for side in (harness.BASELINE, harness.BACKEND):
        try:
            steps[side] = made.compiled(side)
            steps[side]()
        except Exception as failure:  # noqa: BLE001 - the reason is the row
            del steps[side]
            yield {**same, "side": side, "failure": harness.failure(failure)}
    errors = {}
    try:
        exact = made.exact()
        errors = {side: bench_decode.error(step().clone(), exact) for side, step in steps.items()}
    except torch.OutOfMemoryError as failure:
        errors = dict.fromkeys(steps, float("nan"))
        print(f"{case.name}: no exact logits, {harness.failure(failure)}", file=sys.stderr)
    gc.collect()
    times = harness.interleave(steps, device, seconds=seconds, clock="process")
    for side, own in times.items():
        row = {**same, "side": side, "ms": f"{harness.percentiles(own)[1]:.4g}", "error": f"{errors[side]:.2g}"}
        if side == harness.BACKEND and harness.BASELINE in times:
            row |= {"ratio": f"{harness.ratio(times[harness.BASELINE], own):.3f}"}
            row |= {"own_error": f"{errors[harness.BASELINE]:.2g}"}
        yield row


def spec_of(case: Case, dtype: str) -> AttentionSpec:
    """As a site of the model has it, but for its mask, which is bounds of keys here."""
    sizes, batch, slots = case.sizes, case.batch, case.length

    def tensor(*shape: int) -> TensorSpec:
        strides = torch.empty(shape, device="meta").stride()
        return TensorSpec(shape=shape, strides=tuple(strides), dtype=dtype)

    of_head = sizes.nope + sizes.rope
    return AttentionSpec(
        q=tensor(batch, sizes.heads, 1, of_head), k=tensor(batch, sizes.heads, slots, of_head),
        v=tensor(batch, sizes.heads, slots, sizes.v), mask=MaskSpec(), score=ScoreSpec(scale=of_head**-0.5),
        device="cuda", out_dtype=dtype,
        latent=LatentSpec(
            latent=tensor(batch, 1, slots, sizes.rank), rope=tensor(batch, 1, slots, sizes.rope), nope=sizes.nope
        ),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Problem:
    """q: (B, H, 1, rank + rope). caches: of so many layers that the L2 cache holds few of them. All keys up to `filled` are used."""

    case: Case
    spec: AttentionSpec
    q: Tensor
    caches: list[tuple[Tensor, Tensor]]

    @staticmethod
    def of(case: Case, device: str, dtype: torch.dtype, together: int = _CACHES_TOGETHER) -> Problem:
        sizes = case.sizes
        generator = torch.Generator(device=device).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        used = case.batch * case.filled * sizes.kept * dtype.itemsize
        count = min(max(-(-together // used), 2), 64)
        shape = (case.batch, 1, case.length)
        caches = [(randn(*shape, sizes.rank), randn(*shape, sizes.rope)) for _ in range(count)]
        # Scores of order one.
        q = randn(case.batch, sizes.heads, 1, sizes.kept) * (sizes.nope + sizes.rope) ** 0.5 / sizes.kept**0.5
        name = str(dtype).removeprefix("torch.")
        return Problem(case=case, spec=spec_of(case, name), q=q, caches=caches)

    @property
    def bytes_used(self) -> int:
        return self.case.batch * self.case.filled * self.case.sizes.kept * self.q.element_size()

    @property
    def products(self) -> int:
        """Floating-point operations."""
        sizes = self.case.sizes
        return 2 * self.case.batch * sizes.heads * self.case.filled * (2 * sizes.rank + sizes.rope)

    def calls(self, schedule: Schedule) -> bench_decode.Calls:
        """`attn_compiler::decode_latent`, once for each cache. Its length is the filled part: a view of the cache."""
        call = DecodeCall(spec=self.spec, schedule=schedule, of_latent=True)
        text, filled = call.to_text(), self.case.filled

        def of(latent: Tensor, rope: Tensor) -> harness.Step:
            latent, rope = latent[:, :, :filled], rope[:, :, :filled]
            operands = [{"rope": rope}[name] for name in plan.plan_of(call).operands]

            def run() -> Tensor:
                out: Tensor = torch.ops.attn_compiler.decode_latent.default(self.q, latent, latent, operands, text)[0]
                return out

            return run

        return [of(*cache) for cache in self.caches]

    def expected(self) -> Tensor:
        """Of the first cache, in float32."""
        latent, rope = (x[:, 0, : self.case.filled].float() for x in self.caches[0])
        q, rank = self.q[:, :, 0].float(), self.case.sizes.rank
        scores = q[..., :rank] @ latent.mT + q[..., rank:] @ rope.mT
        return (torch.softmax(scores * self.spec.score.scale, -1) @ latent)[:, :, None]


def schedules(problem: Problem, target: Target) -> Iterator[Schedule]:
    """The one that is picked for the filled length first, then the Triton kernel's, if that is another, then others of that."""
    case = dataclasses.replace(problem.case, length=problem.case.filled)
    spec = spec_of(case, problem.spec.q.dtype)
    rule = latent_schedule.schedule(spec, target)
    yield rule
    rule = latent_schedule.of_triton(spec, target)
    seen = {_shown(latent_schedule.schedule(spec, target))}
    if _shown(rule) not in seen:
        seen.add(_shown(rule))
        yield rule
    tiles = case.batch * -(-case.sizes.heads // (rule.rows or 16))
    for keys, warps, stages, programs in CANDIDATES.get(rule.rows or 16, ()):
        for least in _LEAST_KEYS:
            found = dataclasses.replace(rule, keys=keys, warps=warps, stages=stages, least_keys=least)
            found = dataclasses.replace(found, programs=programs * max(target.processors, 1))
            found = dataclasses.replace(found, splits=plan.splits(found, tiles=tiles, seqlen_kv=case.filled))
            if _shown(found) not in seen:
                seen.add(_shown(found))
                yield found


def _shown(schedule: Schedule) -> tuple[str, ...]:
    return tuple(str(getattr(schedule, name)) for name in SCHEDULE)


def copy_row(device: str) -> tuple[dict[str, str], float]:
    """GB/s of reading and writing memory by a copy of 2 GiB, and a row of it."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    us = bench_decode.microseconds([lambda: target.copy_(source)] * 5)
    found = 2 * source.numel() * source.element_size() / us / 1e3
    return {"case": "copy", "what": "copy", "us": f"{us:.1f}", "gb_per_s": f"{found:.0f}"}, found


def attention_rows(case: Case, target: Target, copied: float, *, tried: bool) -> Iterator[dict[str, str]]:
    """The schedule that is picked first, and the Triton kernel's; others where they are asked for."""
    problem = Problem.of(case, "cuda", torch.bfloat16)
    rule, *others = schedules(problem, target)
    sides = [
        ("rule", rule),
        *(("triton" if rule.hopper and i == 0 else "tried", other) for i, other in enumerate(others)),
    ]
    for side, schedule in sides:
        if side == "tried" and not tried:
            return
        shown = dict(zip(SCHEDULE, _shown(schedule), strict=True))
        row = {**case.columns, "what": "attention", "side": side, **shown}
        try:
            calls = problem.calls(schedule)
            us = bench_decode.microseconds(calls)
            gb, tflops = problem.bytes_used / us / 1e3, problem.products / us / 1e6
            row |= {"us": f"{us:.2f}", "gb_per_s": f"{gb:.0f}", "tflops": f"{tflops:.0f}"}
            row["of_bound"] = f"{max(gb / copied, tflops / PEAK_TFLOPS):.3f}"
            row["error"] = f"{bench_decode.error(calls[0](), problem.expected()):.2g}"
        except Exception as failure:  # noqa: BLE001 - the reason is the row
            row["failure"] = harness.failure(failure)
        yield row


def rows_of(cases: Sequence[Case], given: Namespace) -> harness.Measured:
    """Attention first: it takes seconds."""
    if given.what != "step" and given.device == "cuda":
        row, copied = copy_row("cuda")
        yield [row]
        for case in cases:
            yield attention_rows(case, Target.current("cuda"), copied, tried=given.tried)
            torch.cuda.empty_cache()
    for case in cases if given.what != "attention" else ():
        if case in HEADS_CASES:
            continue
        if time.monotonic() > given.until:
            return
        yield step_rows(case, given.device, 0.0 if given.dry_run else given.seconds)
        harness.give_back(given.device)


def cases(given: Namespace) -> list[Case]:
    every = DRY_CASES if given.dry_run else (*GPU_CASES, *HEADS_CASES) if given.device == "cuda" else CPU_CASES
    return harness.picked(every, given.cases)


BENCH = Bench(
    doc=__doc__, results=lambda given: "mla_h200.csv" if given.device == "cuda" else "mla_cpu.csv", columns=COLUMNS,
    cases=cases, rows=rows_of, sides=(harness.BASELINE, harness.BACKEND), devices=("cpu", "cuda"), seconds=10.0,
    budget=540.0, dry=True, begin=lambda given: given.device == "cpu" and torch.set_num_threads(1),
    short=("case", "what", "side", *SCHEDULE, *"ms ratio us gb_per_s tflops of_bound error failure".split()),
    options=(
        harness.PATTERNS,
        arg("--what", choices=("step", "attention", "both"), default="both"),
        arg("--tried", action="store_true", help="other schedules of the attention, too"),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
