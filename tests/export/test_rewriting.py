"""`rewrite` gives a program that computes the same by PyTorch's own kernels, and runs where this package is not."""

from __future__ import annotations

import copy
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import attn_compiler
from attn_compiler.context_parallel import ContextParallel
from attn_compiler.export import rewriting
from attn_compiler.options.options import Options
from attn_compiler.reasons import errors
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from tests import fresh
from tests.export import models
from tests.export.models import batch, exported, kept, made
from tests.meshes import fake_mesh

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
STRICT = {"strict": True}
#: of those that can be packaged, on a CPU
PACKAGED = {**STRICT, "lowerings": ["sdpa_cpu_flash", "math"]}


@pytest.fixture(autouse=True)
def _from_the_start() -> None:
    attn_compiler.reset()


def _report() -> Report:
    return attn_compiler.reports()[-1]


def _site() -> SiteReport:
    (site,) = _report().sites
    return site


def _targets(program: ExportedProgram) -> list[Any]:
    modules = (m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule))
    return [node.target for module in modules for node in module.graph.nodes if node.op == "call_function"]


def _same(model: Callable[..., Any], program: ExportedProgram, *args: Tensor) -> None:
    """By the numeric rule: at most twice what the model's own float32 is off from float64, and roundings of the result."""
    exact = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
    wide = [x.double() if x.is_floating_point() else x for x in args]
    with torch.no_grad():
        outputs = zip(
            *(pytree.tree_leaves(out) for out in (exact(*wide), model(*args), program.module()(*args))), strict=True
        )
    for expected, plain, got in outputs:
        own = (plain.double() - expected).abs().max()
        rounding = 16 * torch.finfo(plain.dtype).eps * expected.abs().max()
        assert (got.double() - expected).abs().max() <= 2 * own + rounding
        assert got.dtype == plain.dtype
        assert got.shape == plain.shape


@pytest.mark.parametrize("strict_export", [False, True])
def test_a_mask_that_is_causal_becomes_a_flag(strict_export: bool) -> None:
    model = made(models.CausalMask)
    program = exported(model, batch(), strict=strict_export)
    rewritten = attn_compiler.rewrite(program, STRICT)
    assert _site().decision.lowering == "sdpa_cpu_flash"
    assert _site().spec.mask.words == "causal (proved)"
    (call,) = rewritten.graph.find_nodes(op="call_function", target=FLASH)
    assert call.args[4] is True
    assert not call.kwargs.get("attn_mask")
    assert torch.ops.aten.tril.default not in _targets(rewritten)
    _same(model, rewritten, batch())


def test_attention_by_hand_with_padding_and_a_lifted_constant() -> None:
    model = made(models.ByHand)
    program = exported(model, batch(), kept())
    rewritten = attn_compiler.rewrite(program, STRICT)
    assert "key padding" in _site().spec.mask.words
    assert FLASH in _targets(rewritten)
    assert torch.ops.aten.softmax.int not in _targets(rewritten)
    _same(model, rewritten, batch(), kept())


def test_shapes_stay_dynamic() -> None:
    model = made(models.ByHand)
    program = exported(model, batch(), kept(), dynamic=True)
    rewritten = attn_compiler.rewrite(program, STRICT)
    assert rewritten.range_constraints == program.range_constraints
    assert FLASH in _targets(rewritten)
    _same(model, rewritten, batch(5, 41), kept(5, 41))
    with pytest.raises(AssertionError):
        rewritten.module()(batch(2, 65), kept(2, 65))


@pytest.mark.parametrize("kind", [models.CausalMask, models.Capped, models.WithoutGradients])
def test_dynamic_sizes_get_no_guard_that_nothing_checks(kind: type[nn.Module]) -> None:
    model = made(kind)
    program = exported(model, batch(), dynamic=True)
    rewritten = attn_compiler.rewrite(program, PACKAGED)
    assert rewritten._guards_code == program._guards_code
    assert _site().decision.lowering != "untouched"
    for batches, length in ((3, 3), (2, 64), (8, 24)):
        _same(model, rewritten, batch(batches, length))


def test_the_program_given_stays_as_it_is() -> None:
    program = exported(made(models.ByHand), batch(), kept(), dynamic=True)
    before, metas = str(program), [dict(node.meta) for node in program.graph.nodes]
    rewritten = attn_compiler.rewrite(program)
    assert str(program) == before
    assert [dict(node.meta) for node in program.graph.nodes] == metas
    assert rewritten is not program
    assert rewritten.state_dict.keys() == program.state_dict.keys()
    assert all(rewritten.state_dict[name] is weight for name, weight in program.state_dict.items())


def test_inputs_keep_their_names_and_outputs_follow_what_took_their_place() -> None:
    model = made(models.Heads)
    program = exported(model, batch())
    rewritten = attn_compiler.rewrite(program, STRICT)
    assert rewritten.graph_signature.input_specs == program.graph_signature.input_specs
    assert rewritten.call_spec == program.call_spec
    assert list(rewritten.module()(batch())) == ["heads", "joined"]
    _same(model, rewritten, batch())


def test_modules_whose_signature_is_kept() -> None:
    model = nn.Sequential(made(models.CausalMask), made(models.CausalMask, seed=1))
    program = torch.export.export(model, (batch(),), preserve_module_call_signature=("0",))
    rewritten = attn_compiler.rewrite(program, STRICT)
    _same(model, rewritten, batch())
    with torch.no_grad():
        torch.testing.assert_close(torch.export.unflatten(rewritten)(batch()), model(batch()))


def test_what_a_program_writes_is_still_written() -> None:
    step, position = batch(2, 1), torch.tensor([5])
    model = made(models.Cached)
    program = exported(copy.deepcopy(model), step, position)
    rewritten = attn_compiler.rewrite(program, STRICT).module()
    with torch.no_grad():
        torch.testing.assert_close(rewritten(step, position), model(step, position))
        torch.testing.assert_close(rewritten(2 * step, position + 1), model(2 * step, position + 1))
    torch.testing.assert_close(rewritten.cache_k, model.cache_k)


def test_what_the_passes_need_is_gone_and_casts_are_asserted() -> None:
    program = exported(made(models.ByHand), batch(), kept())
    assertions = torch.ops.aten._assert_tensor_metadata.default
    rewritten = attn_compiler.rewrite(program)
    # The two of the site's own casts went with the site.
    assert _targets(program).count(assertions) == 2
    assert _targets(rewritten).count(assertions) == 0
    untouched = attn_compiler.rewrite(program, {"lowering": "untouched"})
    assert _targets(untouched).count(assertions) == 2
    for node in rewritten.graph.nodes:
        assert not {"example_value", "constant"} & node.meta.keys()
        assert node.op in ("placeholder", "output") or "val" in node.meta


@pytest.mark.parametrize("name", ["hopper_fp8", "decode", "cudnn", "fa4", "reference"])
def test_a_lowering_that_needs_this_package_is_refused_by_name(name: str) -> None:
    model = made(models.CausalMask)
    program = exported(model, batch())
    rewritten = attn_compiler.rewrite(program, {"lowering": name, "strict": True})
    (refusal,) = _site().decision.refusals
    (reason,) = refusal.reasons
    assert (_site().decision.lowering, refusal.lowering) == ("untouched", name)
    assert reason.rule == "what is in an exported program runs without this package"
    assert reason.observed.startswith(name)
    assert reason.remedy
    assert _targets(rewritten) == _targets(program)
    _same(model, rewritten, batch())


def test_no_op_of_ours_is_in_the_program() -> None:
    for kind in (models.CausalMask, models.Capped, models.Heads):
        rewritten = attn_compiler.rewrite(exported(made(kind), batch()), PACKAGED)
        assert _site().decision.lowering != "untouched"
        assert not [target for target in _targets(rewritten) if "attn_compiler" in str(target)]


def test_math_where_a_kernel_of_ours_would_be_needed() -> None:
    model = made(models.Capped)
    rewritten = attn_compiler.rewrite(exported(model, batch(), dynamic=True), {"lowering": "math", "strict": True})
    assert _site().decision.lowering == "math"
    _same(model, rewritten, batch(3, 30))


def test_attention_in_autocast_is_left_alone_by_name() -> None:
    program = exported(made(models.InAutocast), batch())
    rewritten = attn_compiler.rewrite(program, STRICT)
    (miss,) = _report().misses
    assert "wrap_with_autocast" in miss.reason.observed
    assert "bfloat16" in miss.reason.remedy
    with torch.no_grad():
        assert torch.equal(rewritten.module()(batch()), program.module()(batch()))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", [models.CausalMask, models.Capped])
def test_a_decomposed_program(kind: type[nn.Module]) -> None:
    model = made(kind)
    program = exported(model, batch(), dynamic=True).run_decompositions()
    rewritten = attn_compiler.rewrite(program, STRICT)
    assert rewritten.dialect == program.dialect
    _same(model, rewritten, batch(5, 17))
    rewritten.run_decompositions()


def test_a_loaded_program(tmp_path: Path) -> None:
    model = made(models.CausalMask)
    torch.export.save(exported(model, batch(), dynamic=True), tmp_path / "before.pt2")
    rewritten = attn_compiler.rewrite(torch.export.load(tmp_path / "before.pt2"), STRICT)
    assert _site().decision.lowering == "sdpa_cpu_flash"
    _same(model, rewritten, batch(3, 30))


def test_a_program_without_attention() -> None:
    model = nn.Linear(4, 4)
    program = exported(model, torch.ones(2, 4))
    assert str(attn_compiler.rewrite(program, STRICT)) == str(program)
    assert _report().num_sites == 0


def test_options_as_an_object() -> None:
    attn_compiler.rewrite(exported(made(models.CausalMask), batch()), Options(lowering="math"))
    assert _site().decision.lowering == "math"


def _joint() -> ExportedProgram:
    from torch.export.experimental import _export_forward_backward

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = made(models.CausalMask)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.model(x).sum()
            return loss

    return _export_forward_backward(exported(Loss(), batch()))


def test_a_graph_with_its_backward_is_refused_by_name() -> None:
    with pytest.raises(errors.ExportUnsupported, match="a graph of a forward and its backward"):
        attn_compiler.rewrite(_joint())


@pytest.mark.parametrize("given", [nn.Linear(2, 2), None, "program.pt2"])
def test_what_is_no_exported_program_is_refused(given: Any) -> None:
    with pytest.raises(errors.NotAnExportedProgram, match=type(given).__qualname__):
        attn_compiler.rewrite(given)


def test_options_that_a_program_has_no_use_for_are_refused() -> None:
    program = exported(made(models.CausalMask), batch())
    with pytest.raises(errors.ExportUnsupported, match="inductor_configs"):
        attn_compiler.rewrite(program, {"max_autotune": True})
    with pytest.raises(errors.ExportUnsupported, match="verify=True"):
        attn_compiler.rewrite(program, {"verify": True})
    with pytest.raises(errors.ExportUnsupported, match="unpad=True"):
        attn_compiler.rewrite(program, {"unpad": True})
    with pytest.raises(errors.ExportUnsupported, match="checkpoint='keep_attention'"):
        attn_compiler.rewrite(program, {"checkpoint": "keep_attention"})
    with fake_mesh(2) as mesh, pytest.raises(errors.ExportUnsupported, match="processes of one group"):
        attn_compiler.rewrite(program, {"context_parallel": ContextParallel(mesh)})
    with pytest.raises(errors.InvalidOption, match="tritonn"):
        attn_compiler.rewrite(program, {"lowering": "tritonn"})


def test_what_fails_gives_the_program_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(rewriting, "spelled_out", fails)
    program = exported(made(models.CausalMask), batch())
    with pytest.warns(errors.AttnCompilerWarning, match="the program is returned as it came"):
        rewritten = attn_compiler.rewrite(program)
    assert str(rewritten) == str(program)
    assert _site().decision.lowering == "untouched"
    assert "broken" in (_report().failure or "")
    with pytest.raises(errors.CompileFailed, match="broken"):
        attn_compiler.rewrite(program, STRICT)


_FRESH = """
    import sys, torch
    args, expected = torch.load("io.pt")
    program = torch.export.load("program.pt2").module()
    torch.testing.assert_close(program(*args), expected)
    if "aoti" in sys.argv:
        torch.testing.assert_close(torch._inductor.aoti_load_package("package.pt2")(*args), expected)
    assert not [name for name in sys.modules if name.startswith("attn_compiler")]
"""


def _elsewhere(folder: Path, program: ExportedProgram, *args: Tensor, expected: Tensor, how: str) -> None:
    """Run the program in a process that never hears of this package."""
    torch.export.save(program, folder / "program.pt2")
    torch.save((args, expected.detach()), folder / "io.pt")
    fresh.run(textwrap.dedent(_FRESH), how, cwd=folder)


def test_another_process_runs_it_without_this_package(tmp_path: Path) -> None:
    model = made(models.ByHand)
    program = attn_compiler.rewrite(exported(model, batch(), kept(), dynamic=True), STRICT)
    args = (batch(4, 33), kept(4, 33))
    _elsewhere(tmp_path, program, *args, expected=model(*args), how="program")


@pytest.mark.further
def test_a_package_of_aotinductor_runs_without_this_package(tmp_path: Path) -> None:
    model = made(models.CausalMask)
    program = attn_compiler.rewrite(exported(model, batch(), dynamic=True), STRICT)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    args = (batch(4, 33),)
    _elsewhere(tmp_path, program, *args, expected=model(*args), how="aoti")


def test_compiled_with_cpp_wrapper() -> None:
    model = made(models.ByHand)
    program = attn_compiler.rewrite(exported(model, batch(), kept()), STRICT)
    compiled = torch.compile(program.module(), options={"cpp_wrapper": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch(), kept()), model(batch(), kept()))


def _hugging_face(kind: str, implementation: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    sizes |= {"num_key_value_heads": 2} if kind == "Llama" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation=implementation)

    class First(nn.Module):
        """The hidden states, where no padding is."""

        def __init__(self) -> None:
            super().__init__()
            self.model = getattr(transformers, f"{kind}Model")(config)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            arguments = {"use_cache": False} if kind == "Llama" else {}
            hidden: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **arguments)[0]
            return hidden * attention_mask[..., None]

    return First().eval()


@pytest.mark.in_turns
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_models_of_hugging_face(kind: str, implementation: str) -> None:
    """MiniLM is a Bert."""
    model = _hugging_face(kind, implementation)

    def inputs(batches: int, length: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 50, (batches, length), generator=torch.Generator().manual_seed(2))
        return ids, kept(batches, length).long()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        program = exported(model, *inputs(2, 12), dynamic=True)
        rewritten = attn_compiler.rewrite(program, STRICT)
    (site,) = _report().sites
    assert (len(site.modules), site.decision.lowering, _report().num_misses) == (2, "sdpa_cpu_flash", 0)
    assert "key padding" in site.spec.mask.words
    assert ("causal" in site.spec.mask.words) == (kind == "Llama")
    repeats = [note for note in site.notes if "without their 2-fold repetition" in note]
    assert len(repeats) == (kind == "Llama")
    _same(model, rewritten, *inputs(3, 29))


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
def test_a_program_for_a_gpu_that_is_not_there(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fake tensors, for a made-up machine."""
    monkeypatch.setattr(rewriting, "_targets", lambda _: {"cuda": Target.fake(packaged=True)})
    with torch.device("meta"):
        model = models.CausalMask().to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        program = exported(
            model.to_empty(device="cuda"), torch.empty(2, 24, models.WIDTH, dtype=torch.bfloat16, device="cuda")
        )
    rewritten = attn_compiler.rewrite(program, {**STRICT, "lowering": f"sdpa_{kernel}"})
    assert _site().decision.lowering == f"sdpa_{kernel}"
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in map(str, _targets(rewritten))
    assert not [target for target in _targets(rewritten) if "attn_compiler" in str(target)]


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="PyTorch 2.11 crashes as it loads a package of this model, of the plain one, too"
)
def test_a_package_for_a_gpu(tmp_path: Path) -> None:
    """Which of PyTorch's kernels it is, is the machine's matter; that it is one of them, is ours."""
    model = made(models.CausalMask).to("cuda", torch.bfloat16)
    args = batch(2, 48).to("cuda", torch.bfloat16)
    kernels = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
    program = attn_compiler.rewrite(exported(model, args, dynamic=True), {**STRICT, "lowerings": list(kernels)})
    assert _site().decision.lowering in kernels
    assert not [target for target in _targets(program) if "attn_compiler" in str(target)]
    package = tmp_path / "package.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(args.double())
        own = (model(args).double() - expected).abs().max()
        for run in (program.module(), torch._inductor.aoti_load_package(str(package))):
            assert (run(args).double() - expected).abs().max() <= 2 * own + 0.01


class _KeysInSets(nn.Module):
    """One softmax over the scores of a memory and of the sequence."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        weights = torch.cat([q @ memory.mT * 0.3, q @ k.mT * 0.3], -1).softmax(-1)
        of_memory, own = weights.split([memory.shape[2], k.shape[2]], -1)
        return of_memory @ memory + own @ v


def test_keys_in_several_sets() -> None:
    """What was spelled out took the place of an output of the program."""
    tensors = tuple(torch.randn(2, 3, n, 8) for n in (9, 9, 9, 5))
    program = torch.export.export(_KeysInSets(), tensors)
    rewritten = attn_compiler.rewrite(program, PACKAGED)
    assert _site().pattern == "joined keys"
    assert FLASH in _targets(rewritten)
    torch.testing.assert_close(rewritten.module()(*tensors), program.module()(*tensors))
