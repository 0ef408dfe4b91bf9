"""AOTInductor packages of rewritten programs, beside the same model compiled with our backend, and the package of the program as it was.

    python -m benchmarks.bench_packages

Each package runs in a process of its own that can't import attn_compiler, and its output is compared. Then all sides take turns in one
process. Writes benchmarks/results/packages_h200.csv. Exits with 1 where a package is below 0.98 times our compiled model's speed, or wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import attn_compiler
from benchmarks import harness, linking, models

RESULTS = Path(__file__).parent / "results" / "packages_h200.csv"

_FRESH = """
import sys, torch
sys.modules["attn_compiler"] = None
package, given, taken = sys.argv[1:]
run = torch._inductor.aoti_load_package(package)
batches = torch.load(given)
with torch.no_grad():
    torch.save([run(*batch) for batch in batches], taken)
assert not any(name.startswith("attn_compiler.") for name in sys.modules)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """inputs: token ids and, of an encoder, which are no padding. others: batches of other sizes, for a package of dynamic shapes."""

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    others: Sequence[tuple[Tensor, ...]] = ()
    lowering: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"strict": True} | ({} if self.lowering is None else {"lowering": self.lowering})


class Encoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, kept: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=ids, attention_mask=kept).last_hidden_state
        return out


class Decoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=ids, use_cache=False).last_hidden_state
        return out


def _tokens(batch: int, length: int, device: str) -> Tensor:
    return torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(batch + length)).to(device)


def _padded(batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    lengths = length - torch.arange(batch) * (length // 2) // max(1, batch)
    return _tokens(batch, length, device), (torch.arange(length)[None] < lengths[:, None]).long().to(device)


def cases(device: str, dtype: torch.dtype, *, tiny: bool) -> Iterator[Callable[[], Case]]:
    batch, length = (2, 64) if tiny else (32, 256)
    long = 64 if tiny else 2048
    few = 2 if tiny else 4

    def built(family: str, implementation: str) -> nn.Module:
        return models.build(family, "small" if tiny else "full", implementation, dtype, device)

    def bert(lowering: str | None, *, dynamic: bool) -> Case:
        others = [_padded(3, 77, device), _padded(7, 33, device)] if dynamic else []
        name = f"BERT padded {'dynamic' if dynamic else 'static'} {lowering or 'any'}"
        model = Encoder(built("bert", "sdpa"))
        return Case(name=name, model=model, inputs=_padded(batch, length, device), others=others, lowering=lowering)

    def decoder(family: str, lowering: str | None, *, dynamic: bool) -> Case:
        # Of Gemma 2 only our kernels take the softcaps, which sdpa would leave out.
        model = Decoder(built(family, "eager" if models.FAMILIES[family].softcap else "sdpa"))
        others = [(_tokens(3, 77, device),), (_tokens(2, 130, device),)] if dynamic else []
        name = f"{family} prefill {'dynamic' if dynamic else 'static'} {lowering or 'any'}"
        return Case(name=name, model=model, inputs=(_tokens(few, long, device),), others=others, lowering=lowering)

    yield lambda: bert("triton", dynamic=False)
    yield lambda: decoder("llama", "triton", dynamic=False)
    yield lambda: bert("triton", dynamic=True)
    yield lambda: decoder("gemma2", None, dynamic=True)
    yield lambda: decoder("llama", None, dynamic=False)
    yield lambda: bert(None, dynamic=False)
    yield lambda: decoder("gemma2", None, dynamic=False)
    yield lambda: decoder("llama", "triton", dynamic=True)


def _exported(case: Case) -> ExportedProgram:
    shapes = None
    if case.others:
        most = int(case.inputs[0].shape[1])
        sizes = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=max(most, 256))}
        shapes = tuple(sizes for _ in case.inputs)
    with torch.no_grad():
        return torch.export.export(case.model, case.inputs, dynamic_shapes=shapes, strict=False)


def _packaged(program: ExportedProgram, path: Path) -> Callable[..., Any]:
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(linking.settings()))
    run: Callable[..., Any] = torch._inductor.aoti_load_package(str(path))
    return run


def _in_a_fresh_process(package: Path, batches: Sequence[tuple[Tensor, ...]], folder: Path) -> list[Tensor]:
    given, taken = folder / "given.pt", folder / "taken.pt"
    torch.save(list(batches), given)
    command = [sys.executable, "-c", _FRESH, str(package), str(given), str(taken)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=folder, env=environment)
    outputs: list[Tensor] = torch.load(taken)
    return outputs


def _errors(case: Case, outputs: Sequence[Tensor]) -> tuple[float, float]:
    """‖x − reference‖ / ‖reference‖ of the package and of the model uncompiled, against the model in float32. Without padding."""
    dtype = next(case.model.parameters()).dtype
    worst = (0.0, 0.0)
    for batch, output in zip((case.inputs, *case.others), outputs, strict=True):
        with torch.no_grad():
            eager = case.model(*batch)
            exact = case.model.float()(*batch)
            case.model.to(dtype)
        kept = batch[1].bool() if len(batch) > 1 else torch.ones_like(batch[0], dtype=torch.bool)
        of = [float((x.float() - exact)[kept].norm() / exact[kept].norm()) for x in (output, eager)]
        worst = max(worst[0], of[0]), max(worst[1], of[1])
    return worst


def measure(case: Case, device: str, seconds: float, *, as_exported: bool) -> dict[str, str]:
    """A row without where it was measured."""
    program = _exported(case)
    rewritten = attn_compiler.rewrite(program, case.options)
    report = attn_compiler.reports()[-1]
    lowerings = sorted({site.decision.lowering for site in report.sites if site.decision is not None})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = _packaged(rewritten, folder / "ours.pt2")
        outputs = _in_a_fresh_process(folder / "ours.pt2", (case.inputs, *case.others), folder)
        compiled = torch.compile(case.model, backend="attn_compiler", options=case.options, dynamic=False)
        sides: dict[str, Callable[..., Any]] = {"package": package, "compiled": compiled}
        if as_exported:
            sides["as_exported"] = _packaged(program, folder / "plain.pt2")
        error, error_eager = _errors(case, outputs)
        with torch.no_grad():
            steps = {side: (lambda run=run: run(*case.inputs)) for side, run in sides.items()}
            for step in steps.values():
                step()
            chosen = attn_compiler.reports()[-1]
            times = harness.interleave(steps, device, seconds=seconds)
    row = {"lowerings": " ".join(lowerings), "error": f"{error:.3g}", "error_eager": f"{error_eager:.3g}"}
    python = sorted({site.decision.lowering for site in chosen.sites if site.decision is not None})
    row |= {"lowerings_compiled": " ".join(python), "rounds": str(len(times["package"]))}
    row |= {f"{side}_p50_ms": f"{harness.percentiles(of)[1]:.4g}" for side, of in times.items()}
    row["ratio"] = f"{harness.ratio(times['compiled'], times['package']):.3f}"
    if as_exported:
        row["ratio_as_exported"] = f"{harness.ratio(times['as_exported'], times['package']):.3f}"
    row["numerics"] = "ok" if error <= 2 * error_eager + 1e-3 else "WRONG"
    return row


def main() -> int:
    """Measure every case; 0 where none is slower or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="timing of one case (default %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", type=int, help="so many of the first cases")
    parser.add_argument("--as-exported", action="store_true", help="package and time the programs as they were, too")
    parser.add_argument("--tiny", action="store_true", help="small models: a dry run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    where = harness.environment(options.device, options.commit)
    rows: list[Mapping[str, str]] = []
    columns = ("case", "lowerings", "lowerings_compiled", "error", "error_eager", "numerics", "rounds")
    columns += ("package_p50_ms", "compiled_p50_ms", "as_exported_p50_ms", "ratio", "ratio_as_exported", "failure")
    file = harness.CsvFile(options.output, [*columns, *where])
    for make in list(cases(options.device, dtype, tiny=options.tiny))[: options.cases]:
        case = make()
        print("measuring", case.name, flush=True)
        torch.compiler.reset()
        attn_compiler.reset()
        try:
            row = measure(case, options.device, options.seconds, as_exported=options.as_exported)
        except Exception as error:  # noqa: BLE001 (a failure is a row)
            traceback.print_exc()
            row = {"failure": repr(error)[:500]}
        rows.append(row)
        print(row, flush=True)
        file.add({"case": case.name, **row, **where})
    failed = any(row.get("failure") or row["numerics"] == "WRONG" or float(row["ratio"]) < 0.98 for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
