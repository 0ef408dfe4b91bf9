"""On a GPU, our backend beside Inductor's own: every family of the registry, sdpa and eager, forward and training step, in bfloat16.

    pip install --no-deps --no-build-isolation -e .      # the entry point; torch, transformers and rich are there
    python -m benchmarks.bench_h200 --budget-seconds 540

The most telling cases come first; what the budget leaves out is done by a later run with --append. A case that fails becomes a row
with the failure. Writes benchmarks/results/h200.csv and prints a table last. Exits with 1 where we are slower beyond noise, where a
result is wrong, or where the profiler saw another attention kernel than the one that the report names.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import compare, harness, inputs, models
from benchmarks.compare import Case
from benchmarks.harness import BACKEND, BASELINE, Step

RESULTS = Path(__file__).parent / "results" / "h200.csv"
KEYS = ("model", "implementation", "scenario", "dtype")
KERNELS = ("attention_kernels", "attention_ms", f"{BASELINE}_attention_kernels", f"{BASELINE}_attention_ms", "pinned")

ATTENTION_KERNEL = re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE)
# What the profiler calls the kernel of a lowering. cuDNN has helpers whose names hold the others' words.
PINNED_KERNEL = {
    "sdpa_cudnn": re.compile(r"cudnn.*(sdpa|flash)", re.IGNORECASE),
    "sdpa_flash": re.compile(r"^(?!.*cudnn).*flash_(fwd|bwd)", re.IGNORECASE),
    "sdpa_efficient": re.compile(r"^(?!.*cudnn).*fmha", re.IGNORECASE),
    "triton": re.compile(r"^attention_(forward|grad_kv)"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A row's name and how to make its case."""

    family: str
    implementation: str
    scenario: inputs.Scenario

    @property
    def names(self) -> dict[str, str]:
        return dict(zip(KEYS, (self.family, self.implementation, self.scenario.name, "bfloat16"), strict=True))

    def case(self, size: models.Size, device: str) -> Case:
        """Raises ValueError where the family has no such attention implementation."""
        training = self.scenario.training
        model = models.build(self.family, size, self.implementation, torch.bfloat16, device).train(training)
        arguments = inputs.example_inputs(self.family, size, self.scenario, torch.bfloat16, device)
        mask = arguments.get("attention_mask")
        text2text = models.FAMILIES[self.family].inputs == "text2text"
        return Case(
            model=model,
            inputs=arguments,
            device=device,
            training=training,
            # The padding of a text2text model is its encoder's; what comes out is the decoder's.
            valid=None if mask is None or text2text else mask.bool(),
            softcap=models.FAMILIES[self.family].softcap,
        )


def plan(families: list[str], scenarios: list[str]) -> Iterator[Measured]:
    """Every case, the most telling first."""
    for scenario in (inputs.SCENARIOS[name] for name in scenarios):
        for family in families:
            for implementation in ("sdpa", "eager"):
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
    strangers = PINNED_KERNEL.keys() - named if named == expected else set()
    ran = {name for name, pattern in PINNED_KERNEL.items() if any(pattern.search(kernel) for kernel in kernels)}
    return "yes" if expected <= ran and not strangers & ran else "NO"


def _words(kernels: Mapping[str, tuple[int, float]]) -> str:
    return " | ".join(f"{name[:90]} x{count} {ms:.3f} ms" for name, (count, ms) in list(kernels.items())[:5])


def measure(measured: Measured, size: models.Size, device: str, seconds: float) -> dict[str, str] | None:
    """One row, or None where the family has no such implementation. Whatever fails becomes the row's `failure`."""
    try:
        case = measured.case(size, device)
    except ValueError as error:
        if "does not support an attention implementation" in str(error):
            return None
        raise
    try:
        steps = compare.compile_both(case)
        row = compare.compare(case, steps, seconds=seconds)
        return row | (kernel_columns(steps, row["lowerings"]) if device != "cpu" else {})
    except Exception as error:  # noqa: BLE001 (one broken case must not cost the others, and the row names it)
        return {"failure": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]}


def main() -> int:
    """Measure what the budget allows; 0 where nothing is slower, wrong, failed or pinned in vain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="start no case after this (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="timing of one case (default %(default)s)")
    parser.add_argument("--families", nargs="+", default=list(models.FAMILIES), choices=list(models.FAMILIES))
    parser.add_argument(
        "--scenarios", nargs="+", default=["prefill", "train", "prefill_padded", "prefill_cache", "train_padded"]
    )
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # The float32 reference has convolutions.

    start = time.monotonic()
    where = harness.environment(options.device, options.commit)
    file = harness.CsvFile(
        options.output, [*KEYS, *compare.COLUMNS, *KERNELS, "failure", *where], append=options.append
    )
    done = {tuple(row[key] for key in KEYS) for row in file.rows}
    left = 0
    for measured in plan(options.families, options.scenarios):
        if tuple(measured.names.values()) in done:
            continue
        if time.monotonic() - start > options.budget_seconds:
            left += 1
            continue
        row = measure(measured, options.size, options.device, options.seconds)
        if row is not None:
            file.add({**measured.names, **row, **where})
            took = time.monotonic() - start
            print(f"{took:4.0f} s", *measured.names.values(), row.get("ratio", ""), row.get("failure", ""), flush=True)
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()
    harness.print_table(file.rows, (*KEYS[:3], "lowerings"))
    if left:
        print(f"{left} cases left for a run with --append")
    broken = any(row.get("failure") or row.get("pinned") == "NO" for row in file.rows)
    return int(broken) | harness.failures(file.rows)


if __name__ == "__main__":
    sys.exit(main())
