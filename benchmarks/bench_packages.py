"""AOTInductor packages of rewritten programs, beside the same model compiled with our backend, and the package of the program as it was.

    python -m benchmarks.bench_packages

Each package runs in a process of its own that can't import attn_compiler, and its output is compared. Then all sides take turns in one
process. Exits with 1 where a package is below 0.98 times our compiled model's speed, or wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import attn_compiler
from benchmarks import harness, linking, models
from benchmarks.harness import Bench, Row, arg

COLUMNS = (
    *("case", "lowerings", "lowerings_compiled", "error", "error_eager", "numerics", "rounds", "package_p50_ms"),
    *("compiled_p50_ms", "as_exported_p50_ms", "ratio", "ratio_as_exported", "failure"),
)
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
    """family: of benchmarks/models.py; a BERT has padding. dynamic: sizes, with batches of others. lowering: that is forced, if any."""

    family: str
    lowering: str | None = None
    dynamic: bool = False

    @property
    def names(self) -> dict[str, str]:
        what = "BERT padded" if self.is_encoder else f"{self.family} prefill"
        return {"case": f"{what} {'dynamic' if self.dynamic else 'static'} {self.lowering or 'any'}"}

    @property
    def is_encoder(self) -> bool:
        return self.family == "bert"

    @property
    def options(self) -> dict[str, Any]:
        return {"strict": True} | ({} if self.lowering is None else {"lowering": self.lowering})

    def model(self, given: Namespace) -> Module:
        # Of Gemma 2 only our kernels take the softcaps, which sdpa would leave out.
        implementation = "eager" if models.FAMILIES[self.family].softcap else "sdpa"
        dtype = torch.bfloat16 if given.device.startswith("cuda") else torch.float32
        built = models.build(self.family, "small" if given.tiny else "full", implementation, dtype, given.device)
        return Module(built, {} if self.is_encoder else {"use_cache": False})

    def batches(self, given: Namespace) -> list[tuple[Tensor, ...]]:
        """Token ids and, of an encoder, which are no padding: the batch that is timed first."""
        shapes = [(2, 64)] if given.tiny else [(32, 256) if self.is_encoder else (4, 2048)]
        if self.dynamic:
            shapes += [(3, 77), (7, 33) if self.is_encoder else (2, 130)]
        return [_padded(*shape, given.device)[: 2 if self.is_encoder else 1] for shape in shapes]


CASES = (
    Case(family="bert", lowering="triton"), Case(family="llama", lowering="triton"),
    Case(family="bert", lowering="triton", dynamic=True), Case(family="gemma2", dynamic=True), Case(family="llama"),
    Case(family="bert"), Case(family="gemma2"), Case(family="llama", lowering="triton", dynamic=True),
)  # fmt: skip


class Module(nn.Module):
    """A model by its ids, and the mask if there is one."""

    def __init__(self, model: nn.Module, further: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.further = model, further

    def forward(self, ids: Tensor, kept: Tensor | None = None) -> Tensor:
        masked = {} if kept is None else {"attention_mask": kept}
        out: Tensor = self.model(input_ids=ids, **masked, **self.further).last_hidden_state
        return out


def _padded(batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(batch + length))
    lengths = length - torch.arange(batch) * (length // 2) // max(1, batch)
    return ids.to(device), (torch.arange(length)[None] < lengths[:, None]).long().to(device)


def _exported(case: Case, model: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    length = Dim("length", min=2, max=max(int(inputs[0].shape[1]), 256))
    sizes = {0: Dim("batch", min=2, max=64), 1: length}
    shapes = tuple(sizes for _ in inputs) if case.dynamic else None
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)


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


def _errors(model: nn.Module, batches: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor]) -> tuple[float, float]:
    """‖x − reference‖ / ‖reference‖ of the package and of the model uncompiled, against the model in float32. Without padding."""
    dtype = next(model.parameters()).dtype
    worst = (0.0, 0.0)
    for batch, output in zip(batches, outputs, strict=True):
        with torch.no_grad():
            eager = model(*batch)
            exact = model.float()(*batch)
            model.to(dtype)
        kept = batch[1].bool() if len(batch) > 1 else torch.ones_like(batch[0], dtype=torch.bool)
        of = [float((x.float() - exact)[kept].norm() / exact[kept].norm()) for x in (output, eager)]
        worst = max(worst[0], of[0]), max(worst[1], of[1])
    return worst


def measure(case: Case, given: Namespace) -> Iterator[Row]:
    torch.compiler.reset()
    attn_compiler.reset()
    model, batches = case.model(given), case.batches(given)
    program = _exported(case, model, batches[0])
    rewritten = attn_compiler.rewrite(program, case.options)
    row = {**case.names, "lowerings": _lowerings()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = _packaged(rewritten, folder / "ours.pt2")
        outputs = _in_a_fresh_process(folder / "ours.pt2", batches, folder)
        compiled = torch.compile(model, backend="attn_compiler", options=case.options, dynamic=False)
        sides: dict[str, Callable[..., Any]] = {"package": package, "compiled": compiled}
        if given.as_exported:
            sides["as_exported"] = _packaged(program, folder / "plain.pt2")
        error, error_eager = _errors(model, batches, outputs)
        with torch.no_grad():
            steps = {side: (lambda run=run: run(*batches[0])) for side, run in sides.items()}
            for step in steps.values():
                step()
            row |= {"lowerings_compiled": _lowerings()}
            times = harness.interleave(steps, given.device, seconds=given.seconds)
    row |= {"rounds": str(len(times["package"])), "error": f"{error:.3g}", "error_eager": f"{error_eager:.3g}"}
    row |= {f"{side}_p50_ms": f"{harness.percentiles(of)[1]:.4g}" for side, of in times.items()}
    row["ratio"] = f"{harness.ratio(times['compiled'], times['package']):.3f}"
    if given.as_exported:
        row["ratio_as_exported"] = f"{harness.ratio(times['as_exported'], times['package']):.3f}"
    yield row | {"numerics": "ok" if error <= 2 * error_eager + 1e-3 else "WRONG"}


def _lowerings() -> str:
    """Of the newest report."""
    return " ".join(sorted({site.decision.lowering for site in attn_compiler.reports()[-1].sites if site.decision}))


BENCH = Bench(
    doc=__doc__, results="packages_h200.csv", columns=COLUMNS, cases=lambda given: CASES[: given.cases],
    measure=measure, sides=("package", "compiled", "as_exported"),
    options=(
        arg("--cases", type=int, help="so many of the first cases"),
        arg("--as-exported", action="store_true", help="package and time the programs as they were, too"),
        arg("--tiny", action="store_true", help="small models: a dry run"),
    ),
    seconds=5.0, failed=lambda rows: any(row.get("failure") for row in rows) or bool(harness.failures(rows)),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
