"""The spec and the rewritten graph of four small attentions, as text. UPDATE_GRAPHS=1 writes the files anew.

A change here is not wrong by itself: it is what every user's dump will show, and is to be read before it is committed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes import run_pipeline
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.reporting.report import Report
from tests.graphs.programs import PROGRAMS, Program
from tests.passes.compiling import captured, mark

#: Dynamo's names and spellings change between releases; the files are of this one.
TORCH = "2.13"
FOLDER = Path(__file__).parent
UPDATE = os.environ.get("UPDATE_GRAPHS") == "1"


def printed(program: Program) -> str:
    """Sites, then the calls of the graph with shape and strides; symbols are renamed in the order in which they appear."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, requires_grad=program.requires_grad) for shape in program.inputs]
    gm, _ = captured(program.function, *(mark(t, program.dynamic_sizes) for t in inputs))
    report = run_pipeline(gm, Options(strict=True, lowerings=("sdpa_cpu_flash",)))
    return _with_plain_symbols("\n".join([*_sites(report), "", *map(_line, gm.graph.nodes), ""]))


def _sites(report: Report) -> list[str]:
    lines = []
    for site in report.sites:
        lines += [f"{len(site.modules)} × {site.pattern}, {site.decision.lowering}"]
        lines += [f"  copy of {copy.operand}: {copy.bytes} bytes, {copy.why}" for copy in site.copies]
        lines += [f"  {note}" for note in site.notes]
        fields = json.loads(site.spec.to_text())
        lines += [f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return lines


def _line(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    shown = f"{_words(value)} " if isinstance(value, torch.Tensor) else ""
    arguments = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    called = target_name(node) if node.op in ("call_function", "call_method") else node.op
    return f"{node.name}: {shown}= {called}({arguments})"


def _words(value: torch.Tensor) -> str:
    grad = ", grad" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}{grad}"


def _with_plain_symbols(text: str) -> str:
    """Dynamo numbers its symbols by a hash: s77 becomes the first, s27 the second."""
    names: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda match: names.setdefault(match.group(), f"size{len(names)}"), text)


@pytest.mark.skipif(not torch.__version__.startswith(f"{TORCH}."), reason=f"the files were written with torch {TORCH}")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_graph_reads_as_before(program: Program) -> None:
    path = FOLDER / f"{program.name}.txt"
    text = printed(program)
    if UPDATE:
        path.write_text(text)
    assert text == path.read_text(), (
        f"{path.name} reads differently now: UPDATE_GRAPHS=1 pytest {FOLDER.name} writes it anew"
    )


def test_no_file_is_left_of_a_program_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {program.name for program in PROGRAMS}
