"""Decoding with multi-head latent attention: steps of DeepSeek-like models beside Inductor's, and on a GPU the attention alone.

    python -m benchmarks.bench_mla                          # CPU: one thread, the process's own time; writes results/mla_cpu.csv
    python -m benchmarks.bench_mla --device cuda            # writes results/mla_h200.csv
    python -m benchmarks.bench_mla --device cuda --cases 'v3*' --what attention --tried
    python -m benchmarks.bench_mla --device cuda --cases 'heads*' --out benchmarks/results/mla_heads_h200.csv   # of many heads
    python -m benchmarks.bench_mla --dry-run                # all of it on a CPU, tiny, nothing is written

Steps: both sides in one process, in turn, on one model (benchmarks/mla_model.py) and one cache; on a GPU in bfloat16 with
mode="reduce-overhead". `error` is the largest difference of our logits from those of the model in float32, relative to the largest,
`own_error` Inductor's.

Attention: microseconds of the GPU for one layer, from CUDA graphs that hold one call for each of many caches, which together are larger
than the L2 cache. gb_per_s: of the filled part of the cache. `copy` rows are what a copy of memory reaches in the same run; `of_bound`
is the share of what binds, that or 989 TFLOP/s of products. `rule` rows have the schedule that is picked, `triton` rows that of the Triton
kernel where the kernel for Hopper is picked, and `tried` rows others of the Triton kernel. Cases `heads*` have no steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attn_compiler.lowerings.decode import latent_schedule, plan
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule
from attn_compiler.spec.attention import AttentionSpec, LatentSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import ScoreSpec
from attn_compiler.spec.target import Target
from benchmarks import bench_decode, harness
from benchmarks.mla_model import Caches, Decoder, Sizes

RESULTS = Path(__file__).parent / "results"
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
    def columns(self) -> dict[str, str]:
        shown = {"heads": self.sizes.heads, "rank": self.sizes.rank, "rope": self.sizes.rope}
        shown |= {"batch": self.batch, "length": self.length, "filled": self.filled}
        return {"case": self.name} | {name: str(value) for name, value in shown.items()}


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
        name=f"heads{heads}_b{batch}_{keys}",
        sizes=dataclasses.replace(V3, heads=heads),
        batch=batch,
        length=keys,
        filled=keys,
    )
    for heads, batch, keys in _HEADS
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


# ---- steps --------------------------------------------------------------------------------------------------------


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
            yield {**same, "side": side, "failure": _words(failure)}
    errors = {}
    try:
        exact = made.exact()
        errors = {side: bench_decode.error(step().clone(), exact) for side, step in steps.items()}
    except torch.OutOfMemoryError as failure:
        errors = dict.fromkeys(steps, float("nan"))
        Console(stderr=True).print(f"{case.name}: no exact logits, {_words(failure)}")
    gc.collect()
    times = harness.interleave(steps, device, seconds=seconds, clock="process")
    for side, own in times.items():
        row = {**same, "side": side, "ms": f"{harness.percentiles(own)[1]:.4g}", "error": f"{errors[side]:.2g}"}
        if side == harness.BACKEND and harness.BASELINE in times:
            row |= {"ratio": f"{harness.ratio(times[harness.BASELINE], own):.3f}"}
            row |= {"own_error": f"{errors[harness.BASELINE]:.2g}"}
        yield row


# ---- the attention alone ------------------------------------------------------------------------------------------


def spec_of(case: Case, dtype: str) -> AttentionSpec:
    """As a site of the model has it, but for its mask, which is bounds of keys here."""
    sizes, batch, slots = case.sizes, case.batch, case.length

    def tensor(*shape: int) -> TensorSpec:
        strides = torch.empty(shape, device="meta").stride()
        return TensorSpec(shape=shape, strides=tuple(strides), dtype=dtype)

    of_head = sizes.nope + sizes.rope
    return AttentionSpec(
        q=tensor(batch, sizes.heads, 1, of_head),
        k=tensor(batch, sizes.heads, slots, of_head),
        v=tensor(batch, sizes.heads, slots, sizes.v),
        mask=MaskSpec(),
        score=ScoreSpec(scale=of_head**-0.5),
        device="cuda",
        out_dtype=dtype,
        latent=LatentSpec(
            latent=tensor(batch, 1, slots, sizes.rank), rope=tensor(batch, 1, slots, sizes.rope), nope=sizes.nope
        ),
    )


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
            row["failure"] = _words(failure)
        yield row


def _words(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]


# ---- all of it ----------------------------------------------------------------------------------------------------


def print_table(rows: Sequence[dict[str, str]]) -> None:
    names = (
        "case",
        "what",
        "side",
        *SCHEDULE,
        "ms",
        "ratio",
        "us",
        "gb_per_s",
        "tflops",
        "of_bound",
        "error",
        "failure",
    )
    table = Table(title="decoding over a latent; ratio: Inductor's time over ours")
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def rows_of(given: argparse.Namespace, deadline: float) -> Iterator[dict[str, str]]:
    """Attention first: it takes seconds."""
    every = DRY_CASES if given.dry_run else (*GPU_CASES, *HEADS_CASES) if given.device == "cuda" else CPU_CASES
    cases = [case for case in every if any(fnmatch.fnmatch(case.name, pattern) for pattern in given.cases)]
    if given.what != "step" and given.device == "cuda":
        row, copied = copy_row("cuda")
        yield row
        for case in cases:
            yield from attention_rows(case, Target.current("cuda"), copied, tried=given.tried)
            torch.cuda.empty_cache()
    for case in cases if given.what != "attention" else ():
        if case in HEADS_CASES:
            continue
        if time.monotonic() > deadline:
            return
        yield from step_rows(case, given.device, 0.0 if given.dry_run else given.seconds)
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="*", default=["*"], help="names, with wildcards")
    parser.add_argument("--what", choices=("step", "attention", "both"), default="both")
    parser.add_argument("--tried", action="store_true", help="other schedules of the attention, too")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing, for each case's steps")
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="no case's steps are begun after that")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU; nothing is written")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.dry_run:
        given.device = "cpu"
    if given.device == "cpu":
        torch.set_num_threads(1)
    environment = harness.environment(given.device, given.commit)
    out = given.out or RESULTS / ("mla_h200.csv" if given.device == "cuda" else "mla_cpu.csv")
    file = None if given.dry_run else harness.CsvFile(out, (*COLUMNS, *environment))
    rows: list[dict[str, str]] = []
    for row in rows_of(given, time.monotonic() + given.budget_seconds):
        rows.append(row)
        if file is not None:
            file.add({**row, **environment})
    print_table(rows)
    return int(any(row.get("failure") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
