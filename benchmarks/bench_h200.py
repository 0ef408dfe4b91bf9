"""On a GPU, our backend beside Inductor's own: every family of the registry, forward and training step, in bfloat16.

    pip install --no-deps --no-build-isolation -e .      # the entry point; torch, transformers and rich are there
    python -m benchmarks.bench_h200 --budget-seconds 540

Implementations of the model's attention: "sdpa" and "eager" are what both sides get; "flex_attention" is what Inductor gets beside our side
with "sdpa" ("eager" where a softcap or sinks are more than that has). --cases bert/sdpa/train=nothing: our side is a model whose attention
is the sum of q, k and v. No kernel can be faster: its ratio is the bound of all others.

The most telling cases come first; what the budget leaves out is done by a later run with --append. --jobs: so many cases are compiled at a
time, and timed one after another while the others wait (OMP_NUM_THREADS=1 and TORCHINDUCTOR_COMPILE_THREADS=1 suit that). A case that fails
becomes a row with the failure. Exits with 1 where we are slower beyond noise, where a result is wrong, or where the profiler saw another
attention kernel than the one that the report names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import attn_compiler
from benchmarks import compare, harness, models, waves
from benchmarks.compare import Case
from benchmarks.harness import BACKEND, BASELINE, Bench, Row, Step, arg, failure as failure
from benchmarks.models import NOTHING

FLEX = "flex_attention"
IMPLEMENTATIONS = ("sdpa", "eager", FLEX)
KEYS = ("model", "implementation", "scenario", "dtype", "forced")
#: what every process of a case needs, and which touches no GPU
IMPORTS = ("torch._dynamo", "transformers.modeling_utils", "attn_compiler", "benchmarks.compare")
SHORT = ("lowerings", f"{BASELINE}_p50_ms", f"{BACKEND}_p50_ms", "ratio", "numerics", "pinned", "failure")
KERNELS = ("attention_kernels", "attention_ms", f"{BASELINE}_attention_kernels", f"{BASELINE}_attention_ms", "pinned")
#: what a row took: both sides' compilation, with their first steps; that, and the comparison with float32
SECONDS = ("compile_s", "prepare_s")
#: seconds before a case is tried again that found too little memory
WAITS = (2.0, 5.0, 8.0)
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


#: what `prepare` takes: `names`, the columns that name it; `options` of our side; `case(size, device)`, which makes it
Asked = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A row's name and how to make its case. forced: the lowering that our side has to take, instead of its own choice; or NOTHING,
    where it has no attention."""

    family: str
    implementation: str
    scenario: models.Scenario
    forced: str = ""

    @property
    def words(self) -> str:
        name = f"{self.family}/{self.implementation}/{self.scenario.name}"
        return f"{name}={self.forced}" if self.forced else name

    @property
    def names(self) -> dict[str, str]:
        values = (self.family, self.implementation, self.scenario.name, "bfloat16", self.forced)
        return dict(zip(KEYS, values, strict=True))

    @property
    def options(self) -> dict[str, Any] | None:
        """Of our side. Under checkpoints it keeps what attention gave."""
        found = {"lowering": self.forced} if self.forced not in ("", NOTHING) else {}
        return found | ({"checkpoint": "keep_attention"} if self.scenario.checkpointed else {}) or None

    def case(self, size: models.Size, device: str) -> Case:
        """Raises ValueError where the family has no such attention implementation."""
        training, family = self.scenario.training, models.FAMILIES[self.family]
        ours = theirs = self.implementation
        if theirs == FLEX:
            ours = "eager" if family.softcap or family.sinks else "sdpa"
        if self.forced == NOTHING:
            theirs, ours = ours, NOTHING
        made = {
            implementation: models.build(self.family, size, implementation, torch.bfloat16, device).train(training)
            for implementation in dict.fromkeys((theirs, ours))
        }
        for model in made.values() if self.scenario.checkpointed else ():
            model.gradient_checkpointing_enable()
        arguments = models.example_inputs(self.family, size, self.scenario, torch.bfloat16, device)
        mask = arguments.get("attention_mask")
        # The padding of a text2text model is its encoder's; what comes out is the decoder's.
        valid = None if mask is None or family.inputs == "text2text" else mask.bool()
        return Case(
            model=made[ours], baseline=None if ours == theirs else made[theirs], inputs=arguments, device=device,
            training=training, valid=valid, softcap=family.softcap,
        )  # fmt: skip


def plan(families: list[str], scenarios: list[str]) -> Iterator[Measured]:
    """Every case, the most telling first."""
    for scenario in (models.SCENARIOS[name] for name in scenarios):
        for family in families:
            for implementation in models.FAMILIES[family].implementations or IMPLEMENTATIONS:
                if models.applies(family, scenario):
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


def prepare(what: tuple[Asked, Namespace], lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile and check a case; its row follows by timing it, or None where the family has no such implementation. Whatever fails becomes
    the row's `failure`. lock: held while its results are computed in float32."""
    asked, given = what
    device, begun = given.device, time.monotonic()
    torch.backends.cudnn.allow_tf32 = False  # The float32 reference has convolutions.
    try:
        case = asked.case(given.size, device)
        steps = compiled(case, asked.options, device, lock)
        row = compare.chosen(attn_compiler.reports()) | {"compile_s": f"{time.monotonic() - begun:.1f}"}
        forget(case, device)
        print(*asked.names.values(), "compiled after", row["compile_s"], "s", file=sys.stderr, flush=True)
        if device != "cpu":
            attention_kernels(lambda: torch.zeros(1, device=device))  # A process's first profile takes seconds.
        with lock:
            row |= compare.checked(case, steps[BACKEND])
        row["prepare_s"] = f"{time.monotonic() - begun:.1f}"
        forget(case, device)
    except Exception as error:  # noqa: BLE001 (one broken case must not cost the others, and the row names it)
        missing = "does not support an attention implementation" in str(error)
        failed = None if missing else {"failure": failure(error)}
        return lambda: failed
    return functools.partial(_finish, case, steps, row, given)


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


def _finish(case: Case, steps: Mapping[str, Step], row: dict[str, str], given: Namespace) -> Row:
    """The rest of a row. Results are compared here where there was no memory for that while others were compiled."""
    try:
        row |= harness.timing_columns(harness.interleave(steps, given.device, seconds=given.seconds))
        row |= kernel_columns(steps, row["lowerings"]) if given.device != "cpu" else {}
        if row["numerics"] == compare.NO_MEMORY:
            row |= compare.checked(case, steps[BACKEND])
    except Exception as error:  # noqa: BLE001 (as above)
        row = {"failure": failure(error)}
    forget(case, given.device)
    return row


def forget(case: Case, device: str) -> None:
    """Give back what a case holds of the device's memory, but for its weights. Compiled code stays."""
    for module in filter(None, (case.model, case.baseline)):
        module.zero_grad(set_to_none=True)
    harness.give_back(device)


def wanted(cases: Iterable[Measured], patterns: Sequence[str]) -> list[Measured]:
    """Those that fit a pattern, in the order of these: "llama/sdpa/prefill", "*/eager/train*", "bert/sdpa/train=triton" (forced)."""
    kept, found = list(cases), []
    for pattern in patterns:
        name, _, forced = pattern.partition("=")
        found += [
            dataclasses.replace(case, forced=forced) for case in harness.picked(kept, [name], lambda case: case.words)
        ]
    return list(dict.fromkeys(found))


def rows(cases: Sequence[Asked], given: Namespace) -> harness.Measured:
    """Of models, as they come: side by side where there are jobs, and none where a family has no such implementation."""
    if given.jobs > 1:
        # What travels to other processes is what they are asked for.
        found = waves.run(
            [(case, given) for case in cases], prepare, until=given.until, imports=IMPORTS, **waves.asked(given)
        )
    else:
        found = (
            ((case, given), prepare((case, given), contextlib.nullcontext())())
            for case in cases
            if time.monotonic() <= given.until
        )
    for (case, _), row in found:
        yield [] if row is None else [{**case.names, **row}]


def columns(keys: Sequence[str], *further: str) -> tuple[str, ...]:
    """Of rows of whole models."""
    return (*keys, *compare.COLUMNS, *further, *KERNELS, *SECONDS, "failure")


def where(given: Namespace) -> dict[str, str]:
    """Columns that say where a row was measured, and with which packages."""
    return harness.environment(given.device, given.commit) | harness.extras()


def cases(given: Namespace) -> list[Measured]:
    """Those that are asked for and that the installed transformers has."""
    missing = {family for family in given.families if not models.is_known(family)}
    if missing:
        print("transformers has no", ", ".join(sorted(missing)), file=sys.stderr, flush=True)
    return wanted(plan([name for name in given.families if name not in missing], given.scenarios), given.cases)


BENCH = Bench(
    doc=__doc__, results="h200.csv", columns=columns(KEYS), cases=cases, rows=rows, sides=(BASELINE, BACKEND),
    options=(
        arg("--families", nargs="+", default=list(models.FAMILIES), choices=list(models.FAMILIES)),
        arg("--scenarios", nargs="+", default=["prefill", "train", "prefill_padded", "prefill_cache", "train_padded"]),
        arg(
            "--cases",
            nargs="+",
            default=["*"],
            metavar="PATTERN",
            help="of llama/sdpa/prefill; =triton forces a lowering",
        ),
    ),
    seconds=2.0, budget=540.0, sized=True, jobs=True, where=where, short=(*KEYS[:3], *SHORT),
    table=lambda rows: harness.print_table(rows, (*KEYS[:3], "lowerings")),
    failed=lambda rows: (
        any(row.get("failure") or row.get("pinned") == "NO" for row in rows) or bool(harness.failures(rows))
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
