"""On a GPU, our backend beside Inductor's own: every family of the registry, forward and training step, in bfloat16.

    pip install --no-deps --no-build-isolation -e .      # the entry point; torch, transformers and rich are there
    python -m benchmarks.bench_h200 --budget-seconds 540

Implementations of the model's attention: "sdpa" and "eager" are what both sides get; "flex_attention" is what Inductor gets beside our
side with "sdpa" ("eager" where a softcap or sinks are more than that has). --cases bert/sdpa/train=nothing: our side is a model whose
attention is the sum of q, k and v. No kernel can be faster: its ratio is the bound of all others.

--changing: as people run it. Each step is five calls of five lengths, by Dynamo's own choice of what is dynamic; rows are those of
benchmarks/results/h200_changing.csv, whose scenarios end with "_changing". They also tell how many graphs each side compiled.

The most telling cases come first; what the budget leaves out is done by a later run with --append. --jobs: so many cases are compiled
at a time, and timed one after another while the others wait (OMP_NUM_THREADS=1 and TORCHINDUCTOR_COMPILE_THREADS=1 suit that). A
case that fails becomes a row with the failure. Writes benchmarks/results/h200.csv and prints a table last. Exits with 1 where we are
slower beyond noise, where a result is wrong, or where the profiler saw another attention kernel than the one that the report names.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import gc
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import attn_compiler
from benchmarks import compare, harness, inputs, models, waves
from benchmarks.compare import Case
from benchmarks.harness import BACKEND, BASELINE, Step
from benchmarks.models import NOTHING

FLEX = "flex_attention"
IMPLEMENTATIONS = ("sdpa", "eager", FLEX)
RESULTS = Path(__file__).parent / "results" / "h200.csv"
CHANGING = RESULTS.with_name("h200_changing.csv")
#: of the longest, the lengths of --changing: none is a multiple of 16 but the last
LENGTHS = (0.77, 0.93, 0.61, 0.86, 1.0)
KEYS = ("model", "implementation", "scenario", "dtype", "forced")
#: what every process of a case needs, and which touches no GPU
IMPORTS = ("torch._dynamo", "transformers.modeling_utils", "attn_compiler", "benchmarks.compare")
_SHORT = ("lowerings", f"{BASELINE}_p50_ms", f"{BACKEND}_p50_ms", "ratio", "numerics", "pinned", "failure")
KERNELS = ("attention_kernels", "attention_ms", f"{BASELINE}_attention_kernels", f"{BASELINE}_attention_ms", "pinned")
#: what a row took: both sides' compilation, with their first steps; that, and the comparison with float32
SECONDS = ("compile_s", "prepare_s")
#: seconds before a case is tried again that found too little memory
WAITS = (2.0, 5.0, 8.0)
#: distributions that are optional, and decide what can be chosen
EXTRAS = ("nvidia-cudnn-frontend", "flash-attn-4")

ATTENTION_KERNEL = re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE)
# What the profiler calls the kernel of a lowering. cuDNN has helpers whose names hold the others' words, FlashAttention-4 version 2's.
PINNED_KERNEL = {
    "sdpa_cudnn": re.compile(r"cudnn.*(sdpa|flash)", re.IGNORECASE),
    "sdpa_flash": re.compile(r"^(?!.*(cudnn|attncute)).*flash_(fwd|bwd)", re.IGNORECASE),
    "sdpa_efficient": re.compile(r"^(?!.*cudnn).*fmha", re.IGNORECASE),
    "triton": re.compile(r"^attention_forward(?!_)"),
    "fa4": re.compile(r"flash_attncuteflash_(fwd|bwd)"),
    "hopper": re.compile(r"^attention_(forward|backward|(forward|grad|grad_v)_wide)_sm90"),
}
PINNED_KERNEL["cudnn"] = PINNED_KERNEL["sdpa_cudnn"]
#: lowerings whose backward may be the kernel of others
_BACKWARD_OF = {"hopper": {"sdpa_cudnn", "cudnn"}}


class Asked(Protocol):
    """What `prepare` takes: a name, a lowering that is forced ("": none), options of our side, and how to make the case."""

    @property
    def words(self) -> str: ...

    @property
    def forced(self) -> str: ...

    @property
    def options(self) -> dict[str, Any] | None: ...

    def case(self, size: models.Size, device: str) -> Case: ...


AnyAsked = TypeVar("AnyAsked", bound=Asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A row's name and how to make its case. forced: the lowering that our side has to take, instead of its own choice; or NOTHING,
    where it has no attention."""

    family: str
    implementation: str
    scenario: inputs.Scenario
    forced: str = ""
    changing: bool = False

    @property
    def words(self) -> str:
        name = f"{self.family}/{self.implementation}/{self.scenario.name}"
        return f"{name}={self.forced}" if self.forced else name

    @property
    def names(self) -> dict[str, str]:
        scenario = f"{self.scenario.name}_changing" if self.changing else self.scenario.name
        values = (self.family, self.implementation, scenario, "bfloat16", self.forced)
        return dict(zip(KEYS, values, strict=True))

    @property
    def options(self) -> dict[str, Any] | None:
        """Of our side. Under checkpoints it keeps what attention gave."""
        found = {"lowering": self.forced} if self.forced not in ("", NOTHING) else {}
        return found | ({"checkpoint": "keep_attention"} if self.scenario.checkpointed else {}) or None

    def case(self, size: models.Size, device: str) -> Case:
        """Raises ValueError where the family has no such attention implementation."""
        training, family = self.scenario.training, models.FAMILIES[self.family]
        baseline = None
        implementation = self.implementation
        if implementation == FLEX:
            baseline = models.build(self.family, size, FLEX, torch.bfloat16, device).train(training)
            implementation = "eager" if family.softcap or family.sinks else "sdpa"
        if self.forced == NOTHING:
            baseline = models.build(self.family, size, implementation, torch.bfloat16, device).train(training)
            implementation = NOTHING
        model = models.build(self.family, size, implementation, torch.bfloat16, device).train(training)
        for each in (model, baseline) if self.scenario.checkpointed else ():
            if each is not None:
                each.gradient_checkpointing_enable()
        arguments = inputs.example_inputs(self.family, size, self.scenario, torch.bfloat16, device)
        mask = arguments.get("attention_mask")
        text2text = family.inputs == "text2text"
        valid = None if mask is None or text2text else mask.bool()
        *before, (given, valid) = _cut(arguments, valid) if self.changing else [(arguments, valid)]
        return Case(
            model=model,
            baseline=baseline,
            inputs=given,
            device=device,
            training=training,
            # The padding of a text2text model is its encoder's; what comes out is the decoder's.
            valid=valid,
            softcap=family.softcap,
            before=tuple(before),
        )


def _cut(arguments: Mapping[str, Any], valid: torch.Tensor | None) -> list[tuple[dict[str, Any], torch.Tensor | None]]:
    """The same inputs in each of LENGTHS, cut as a collator that pads to the longest would have them: at the side of the padding. Raises
    ValueError for a model without tokens."""
    if "input_ids" not in arguments:
        raise ValueError("does not support an attention implementation with lengths that change: it has no tokens")
    whole = arguments["input_ids"].shape[1]
    found = []
    for share in LENGTHS:
        length = int(whole * share)
        mask = arguments.get("attention_mask")
        keeps = slice(whole - length, None) if mask is not None and not bool(mask[:, 0].all()) else slice(0, length)
        # As a collator makes them: Dynamo asks again for each length whether rows lie apart.
        tensors = {
            name: x[:, keeps].contiguous() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
        }
        found.append((tensors, None if valid is None else valid[:, keeps]))
    return found


def plan(families: list[str], scenarios: list[str]) -> Iterator[Measured]:
    """Every case, the most telling first."""
    for scenario in (inputs.SCENARIOS[name] for name in scenarios):
        for family in families:
            for implementation in models.FAMILIES[family].implementations or IMPLEMENTATIONS:
                if inputs.applies(family, scenario):
                    yield Measured(family=family, implementation=implementation, scenario=scenario)


def attention_kernels(step: Step) -> Mapping[str, tuple[int, float]]:
    """Launches and milliseconds of each attention-like GPU kernel in one step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    seen = {
        event.key: (event.count, event.self_device_time_total / 1e3)
        for event in profile.key_averages()
        if event.self_device_time_total > 0 and ATTENTION_KERNEL.search(event.key)
    }
    return dict(sorted(seen.items(), key=lambda item: -item[1][1]))


def kernel_columns(steps: Mapping[str, Step], lowerings: str) -> dict[str, str]:
    """KERNELS: what ran on both sides, and whether it is what the report pinned ("yes", "NO", or "" where nothing is pinned)."""
    ours, baseline = attention_kernels(steps[BACKEND]), attention_kernels(steps[BASELINE])
    return {
        "attention_kernels": _words(ours),
        "attention_ms": f"{sum(ms for _, ms in ours.values()):.3f}",
        f"{BASELINE}_attention_kernels": _words(baseline),
        f"{BASELINE}_attention_ms": f"{sum(ms for _, ms in baseline.values()):.3f}",
        "pinned": pinned(lowerings, ours),
    }


def pinned(lowerings: str, kernels: Mapping[str, object]) -> str:
    """Whether the kernels of the named lowerings ran, and no other lowering's. lowerings: "sdpa_flash x8 + untouched x1"."""
    named = {entry.split(" x")[0] for entry in lowerings.split(" + ") if entry}
    expected = named & PINNED_KERNEL.keys()
    if not expected:
        return ""
    # An untouched site may run any kernel, so only where all are pinned is a stranger a mistake.
    patterns = {PINNED_KERNEL[name] for name in named & PINNED_KERNEL.keys()}
    others = {name for name, pattern in PINNED_KERNEL.items() if pattern not in patterns}
    strangers = others if named == expected else set()
    strangers -= {other for name in named for other in _BACKWARD_OF.get(name, ())}
    ran = {name for name, pattern in PINNED_KERNEL.items() if any(pattern.search(kernel) for kernel in kernels)}
    return "yes" if expected <= ran and not strangers & ran else "NO"


def _words(kernels: Mapping[str, tuple[int, float]]) -> str:
    return " | ".join(f"{name[:90]} x{count} {ms:.3f} ms" for name, (count, ms) in list(kernels.items())[:5])


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How cases are measured."""

    size: models.Size
    device: str
    seconds: float


def measure(measured: Asked, way: Way) -> dict[str, str] | None:
    """One row, or None where the family has no such implementation. Whatever fails becomes the row's `failure`."""
    return prepare((measured, way), contextlib.nullcontext())()


def prepare(what: tuple[Asked, Way], lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile and check a case; its row follows by timing it. lock: held while its results are computed in float32."""
    measured, way = what
    begun = time.monotonic()
    torch.backends.cudnn.allow_tf32 = False  # The float32 reference has convolutions.
    try:
        case = measured.case(way.size, way.device)
        steps = compiled(case, measured.options, way.device, lock)
        every = compare.chosen(attn_compiler.reports())["lowerings"]
        row = compare.chosen(_last_reports(case)) | {"compile_s": f"{time.monotonic() - begun:.1f}"}
        row |= {"graphs": str(len(attn_compiler.reports()))} if case.before else {}
        forget(case, way.device)
        print(measured.words, "compiled after", row["compile_s"], "s", file=sys.stderr, flush=True)
        if way.device != "cpu":
            attention_kernels(lambda: torch.zeros(1, device=way.device))  # A process's first profile takes seconds.
        with lock:
            row |= compare.checked(case, steps[BACKEND])
        row["prepare_s"] = f"{time.monotonic() - begun:.1f}"
        forget(case, way.device)
    except Exception as error:  # noqa: BLE001 (one broken case must not cost the others, and the row names it)
        missing = "does not support an attention implementation" in str(error)
        failed = None if missing else {"failure": failure(error)}
        return lambda: failed
    return functools.partial(_finish, case, steps, row, way, every)


def _last_reports(case: Case) -> Sequence[attn_compiler.Report]:
    """Those of the code that serves; of lengths that change the last graph with attention, which serves all but the first."""
    reports = [report for report in attn_compiler.reports() if report.num_sites]
    return reports[-1:] if case.before else attn_compiler.reports()


def compiled(
    case: Case, options: Mapping[str, Any] | None, device: str, lock: AbstractContextManager[Any]
) -> dict[str, Step]:
    """Both sides, tried again where what other processes do at the same time left too little memory: the last time while none compares.

    What was compiled is kept on disk, so another try takes little time.
    """
    # Both sides count against the limit of the one model.
    torch._dynamo.config.recompile_limit = 64
    for wait in WAITS:
        try:
            return compare.compile_both(case, options)
        except torch.OutOfMemoryError:
            forget(case, device)
        print(f"too little memory, once more in {wait:.0f} s", file=sys.stderr, flush=True)
        time.sleep(wait)
    with lock:
        return compare.compile_both(case, options)


def _finish(case: Case, steps: Mapping[str, Step], row: dict[str, str], way: Way, lowerings: str) -> dict[str, str]:
    """The rest of a row. lowerings: of all graphs, each of which serves some of the lengths.

    Results are compared here where there was no memory for that while others were compiled."""
    try:
        row |= harness.timing_columns(harness.interleave(steps, way.device, seconds=way.seconds))
        row |= kernel_columns(steps, lowerings) if way.device != "cpu" else {}
        if row["numerics"] == compare.NO_MEMORY:
            row |= compare.checked(case, steps[BACKEND])
    except Exception as error:  # noqa: BLE001 (as above)
        row = {"failure": failure(error)}
    forget(case, way.device)
    return row


def failure(error: Exception) -> str:
    """The first line of an error."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:200]


def forget(case: Case, device: str) -> None:
    """Give back what a case holds of the device's memory, but for its weights."""
    for module in (case.model, case.baseline):
        if module is not None:
            module.zero_grad(set_to_none=True)
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def extras() -> str:
    """Those that are installed, with their versions."""
    found = {
        name: distribution.version for distribution in metadata.distributions() if (name := distribution.name) in EXTRAS
    }
    return " ".join(f"{name} {found[name]}" for name in EXTRAS if name in found)


def wanted(cases: Iterable[Measured], patterns: Sequence[str]) -> list[Measured]:
    """Those that fit a pattern, in the order of these: "llama/sdpa/prefill", "*/eager/train*", "bert/sdpa/train=triton" (forced)."""
    kept, found = list(cases), []
    for pattern in patterns:
        names, _, forced = pattern.partition("=")
        fitting = (case for case in kept if fnmatch.fnmatch(case.words, names))
        found += [dataclasses.replace(case, forced=forced) for case in fitting]
    return list(dict.fromkeys(found))


def results(
    cases: Sequence[AnyAsked], options: argparse.Namespace, until: float
) -> Iterator[tuple[AnyAsked, dict[str, str] | None]]:
    """Cases with their rows, as they come; nothing is begun after that time."""
    way = Way(size=options.size, device=options.device, seconds=options.seconds)
    if options.jobs > 1:
        pairs = [(case, way) for case in cases]
        found = waves.run(pairs, prepare, until=until, imports=IMPORTS, **waves.asked(options))
        yield from ((case, row) for (case, _), row in found)
        return
    for case in cases:
        if time.monotonic() > until:
            return
        yield case, measure(case, way)


def main() -> int:
    """Measure what the budget allows; 0 where nothing is slower, wrong, failed or pinned in vain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    waves.add_arguments(parser, budget_seconds=540.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="timing of one case (default %(default)s)")
    parser.add_argument("--families", nargs="+", default=list(models.FAMILIES), choices=list(models.FAMILIES))
    parser.add_argument(
        "--scenarios", nargs="+", default=["prefill", "train", "prefill_padded", "prefill_cache", "train_padded"]
    )
    parser.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN", help="of llama/sdpa/prefill; =triton forces a lowering"
    )
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--changing", action="store_true", help="five lengths a step, and Dynamo's own choice of what is dynamic"
    )
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    start = time.monotonic()
    where = harness.environment(options.device, options.commit) | {"extras": extras()}
    graphs = ["graphs"] if options.changing else []
    columns = [*KEYS, *compare.COLUMNS, *graphs, *KERNELS, *SECONDS, "failure", *where]
    output = options.output or (CHANGING if options.changing else RESULTS)
    file = harness.CsvFile(output, columns, append=options.append)
    done = {tuple(row.get(key, "") for key in KEYS) for row in file.rows}
    cases = wanted(plan(options.families, options.scenarios), options.cases)
    cases = [dataclasses.replace(case, changing=options.changing) for case in cases]
    missing = {case.family for case in cases if not models.is_known(case.family)}
    if missing:
        print("transformers has no", ", ".join(sorted(missing)), file=sys.stderr, flush=True)
    cases = [case for case in cases if tuple(case.names.values()) not in done and case.family not in missing]
    until = start + options.budget_seconds
    left = len(cases)
    for measured, row in results(cases, options, until):
        left -= 1
        if row is not None:
            file.add({**measured.names, **row, **where})
            took = time.monotonic() - start
            print(f"{took:4.0f} s", measured.words, *(row.get(key, "") for key in _SHORT), flush=True)
    harness.print_table(file.rows, (*KEYS[:3], "lowerings"))
    if left:
        print(f"{left} cases left for a run with --append")
    broken = any(row.get("failure") or row.get("pinned") == "NO" for row in file.rows)
    return int(broken) | harness.failures(file.rows)


if __name__ == "__main__":
    sys.exit(main())
