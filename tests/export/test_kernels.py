"""Our Triton kernels in an exported program: launches that Inductor compiles, in Triton's interpreter and in packages on a GPU."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.export import ExportedProgram

import attn_compiler
from benchmarks import linking
from tests import fresh
from tests.export import models
from tests.export.models import batch, exported, kept, made

TRITON = {"strict": True, "lowering": "triton"}
OP = "attn_compiler.triton_packaged.default"
LAUNCH = torch.ops.higher_order.triton_kernel_wrapper_functional
KINDS = (models.ByHand, models.CausalMask, models.Capped)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")


@pytest.fixture(autouse=True)
def _from_the_start() -> None:
    attn_compiler.reset()


def _inputs(kind: type[nn.Module], batches: int, length: int) -> tuple[Tensor, ...]:
    x = batch(batches, length)
    return (x, kept(batches, length)) if kind is models.ByHand else (x,)


def _chosen() -> Any:
    (site,) = attn_compiler.reports()[-1].sites
    return site.decision


def _calls(program: ExportedProgram) -> list[fx.Node]:
    return [node for node in program.graph.nodes if str(node.target) == OP]


def _same(model: nn.Module, run: Any, *args: Tensor) -> None:
    """At most twice as far from float64 as the model's own float32, and roundings of the result."""
    wide = [x.double() if x.is_floating_point() else x for x in args]
    with torch.no_grad():
        exact, plain, found = copy.deepcopy(model).double()(*wide), model(*args), run(*args)
    own = (plain.double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 2 * own + 16 * torch.finfo(plain.dtype).eps * exact.abs().max()


def test_kernels_in_gluon_are_refused_by_name() -> None:
    attn_compiler.rewrite(exported(made(models.CausalMask), batch()), {**TRITON, "lowering": "hopper"})
    ((reason,),) = [refusal.reasons for refusal in _chosen().refusals]
    assert "Gluon" in reason.observed
    assert "Triton" in reason.remedy


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_compiled_has_launches_and_no_op_of_ours(kind: type[nn.Module], dynamic: bool) -> None:
    model, graphs = made(kind), []

    def compiler(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
        graphs.append(gm.graph)
        return gm

    rewritten = attn_compiler.rewrite(exported(model, *_inputs(kind, 2, 24), dynamic=dynamic), TRITON)
    assert _chosen().lowering == "triton"
    assert len(_calls(rewritten)) == 1
    compiled = torch.compile(rewritten.module(), backend=aot_autograd(fw_compiler=compiler))
    for batches, length in ((2, 24), (3, 33), (7, 64)) if dynamic else ((2, 24),):
        args = _inputs(kind, batches, length)
        _same(model, rewritten.module(), *args)
        _same(model, compiled, *args)
    for graph in graphs:
        assert not [node for node in graph.nodes if "attn_compiler" in str(node.target)]
        assert graph.find_nodes(op="call_function", target=LAUNCH)


@interpreted
def test_a_program_is_saved_and_loaded(tmp_path: Path) -> None:
    model = made(models.CausalMask)
    rewritten = attn_compiler.rewrite(exported(model, batch(), dynamic=True), TRITON)
    torch.export.save(rewritten, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert len(_calls(loaded)) == 1
    _same(model, loaded.module(), batch(3, 41))


@interpreted
def test_decomposing_an_export_keeps_the_ops() -> None:
    rewritten = attn_compiler.rewrite(exported(made(models.CausalMask), batch(), dynamic=True), TRITON)
    assert len(_calls(rewritten.run_decompositions({}))) == 1


_FRESH = """
import sys
import torch
sys.modules["attn_compiler"] = None
run = torch._inductor.aoti_load_package("package.pt2")
with torch.no_grad():
    torch.save([run(*args) for args in torch.load("given.pt")], "taken.pt")
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="PyTorch 2.11 may crash as it loads a package, even of one Linear"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_package_runs_where_this_package_is_not(kind: type[nn.Module], dynamic: bool, tmp_path: Path) -> None:
    model = made(kind).to("cuda")
    sizes = ((2, 24), (3, 33), (7, 64)) if dynamic else ((2, 24),)
    batches = [tuple(x.to("cuda") for x in _inputs(kind, *size)) for size in sizes]
    rewritten = attn_compiler.rewrite(exported(model, *batches[0], dynamic=dynamic), TRITON)
    assert len(_calls(rewritten)) == 1
    torch._inductor.aoti_compile_and_package(
        rewritten, package_path=str(tmp_path / "package.pt2"), inductor_configs=dict(linking.settings())
    )
    torch.save(batches, tmp_path / "given.pt")
    fresh.run_anew(textwrap.dedent(_FRESH), cwd=tmp_path)
    for args, found in zip(batches, torch.load(tmp_path / "taken.pt"), strict=True):
        _same(model, lambda *_, found=found: found, *args)
