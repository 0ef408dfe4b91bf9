"""Errors that users see, those of FP8 recipes too."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import pytest

from attn_compiler.reasons import errors, fp8_errors
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Copy, Decision, Reason, Refusal

EXAMPLES = [
    errors.UnknownOption(option="stric", ours=("strict", "dump_dir"), inductors=("max_autotune",)),
    errors.InvalidOption(option="strict", expected="True or False", value="yes"),
    errors.UnsupportedTorch(found="2.9.1", minimum="2.11"),
    errors.LoweringUnavailable(
        lowering="cudnn",
        target="cpu",
        reasons=(
            Reason(code=Code.DEVICE, rule="needs a CUDA device", observed="cpu", remedy="move the model to a GPU"),
        ),
    ),
    fp8_errors.Fp8RecipeUnused(modules=("layers.0", "layers.1"), exclude=("layers.*", "head")),
    fp8_errors.Fp8StateMismatch(problem="not there: none; not given: layers.0/amax"),
    fp8_errors.Fp8StateInvalid(problems=("layers.0/amax holds nan",)),
    fp8_errors.Fp8StateOutdated(given=("layers.0/amax_q",), wanted=("'layers.0/amax' (16, 3)",)),
    errors.NotAnExportedProgram(given="torch.nn.modules.linear.Linear"),
    errors.ExportUnsupported(
        rule="the graph has no backward", observed="a joint graph", remedy="Export the model alone."
    ),
    errors.ContextParallelUnsupported(
        module="layers.0.attn", source="model.py:31", rule="no dropout", observed="p = 0.1", remedy="switch it off"
    ),
    errors.ContextParallelInput(
        call="shard", names=("labels",), rule="one length", observed="5 and 7", remedy="Name those that are whole"
    ),
    errors.PassFailed(pass_name="match", site="layers.0.attn", cause="ValueError: odd", reproduce="pass strict=True"),
    errors.KernelFailed(
        op="triton", step="start", cause="RuntimeError: no", instead="it is left out", reproduce="again"
    ),
    errors.CompileFailed(
        step="publish the report", graph="0/0", cause="OSError: full", instead="the report is lost", reproduce="again"
    ),
    errors.VerifyFailed(
        pass_name="lower", site="layers.0.attn", invariant="every node has a fake value", observed="add_3 has none"
    ),
    errors.VerificationMismatch(
        site="layers.0.attn",
        what="recovered mask",
        formula="k + 1 <= q",
        index="b=0, h=0, q=3, k=3",
        expected="allowed (le holds True)",
        observed="masked out",
        allowed="no difference",
        differing="8 of 64 pairs of its slice",
    ),
    errors.CudnnRefused(said="No valid engine configs"),
    errors.CannotCompare(call="compare", rule="the model can be called", observed="a str", remedy="Give a module."),
    errors.ReportNotSaved(path="there/report.html", cause="there is no such directory"),
    errors.UnknownOption(option="faster", ours=("strict", "dump_dir"), instead="It is gone: leave it out."),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_message_holds_every_field(error: errors.AttnCompilerError) -> None:
    for name, value in error.fields().items():
        if name == "inductors":  # too many to print: the message says how to list them
            continue
        for part in value if isinstance(value, tuple) else (value,):
            assert str(part) in str(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_survives_pickling(error: errors.AttnCompilerError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.fields() == error.fields()


def test_examples_cover_every_class() -> None:
    assert {type(error) for error in EXAMPLES} == set(errors.AttnCompilerError.__subclasses__())


def test_unknown_option_names_the_nearest_and_its_owner() -> None:
    error = errors.UnknownOption(option="cudagraphs", ours=("strict",), inductors=("triton.cudagraphs", "cpp.simdlen"))
    assert error.nearest == ("triton.cudagraphs",)
    assert "'triton.cudagraphs' (Inductor)" in str(error)
    assert "'strict' (attn_compiler)" in str(EXAMPLES[0])


def test_unknown_option_far_from_everything_lists_ours() -> None:
    error = errors.UnknownOption(option="zzz", ours=("strict", "dump_dir"), inductors=("max_autotune",))
    assert error.nearest == ()
    assert "strict, dump_dir" in str(error)


def test_unknown_option_ignores_the_prefix_when_it_looks_for_the_nearest() -> None:
    assert errors.UnknownOption(option="attn.stric", ours=("strict",)).nearest == ("strict",)


def test_lowering_unavailable_says_what_to_do() -> None:
    assert "move the model to a GPU" in str(EXAMPLES[3])
    assert "python -m attn_compiler doctor" in str(EXAMPLES[3])


def test_a_part_that_is_not_enough_may_have_no_source_and_no_remedy() -> None:
    error = errors.ContextParallelUnsupported(module="conv", source=None, rule="r", observed="o", remedy=None)
    assert "at conv, a part" in str(error)
    assert "got o. Nothing is left" in str(error)


def test_fields_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        errors.InvalidOption("strict", "True or False", 1)  # type: ignore[misc]


# Errors of FP8 name the first of many, and what there is instead.
MANY = tuple(f"layers.{i}/amax" for i in range(5))
FIRST = "layers.0/amax, layers.1/amax, layers.2/amax, ..."


def test_a_recipe_that_no_attention_gets_names_modules_and_patterns() -> None:
    error = fp8_errors.Fp8RecipeUnused(modules=MANY, exclude=("layers.*",))
    assert FIRST in str(error)
    assert "layers.*" in str(error)
    assert MANY[3] not in str(error)


def test_what_no_history_can_hold_is_shortened_too() -> None:
    assert FIRST in str(fp8_errors.Fp8StateInvalid(problems=MANY))


def test_a_state_of_before_says_whether_there_is_one_now() -> None:
    there = fp8_errors.Fp8StateOutdated(given=MANY, wanted=("'layers.0/amax' (16, 3)",))
    assert "'layers.0/amax' (16, 3)" in str(there)
    none = fp8_errors.Fp8StateOutdated(given=MANY, wanted=())
    assert "there is none yet, run the model once first" in str(none)


def test_whoever_catches_all_errors_catches_these() -> None:
    kinds = (fp8_errors.Fp8RecipeUnused, fp8_errors.Fp8StateMismatch, fp8_errors.Fp8StateInvalid)
    assert all(issubclass(kind, errors.AttnCompilerError) for kind in (*kinds, fp8_errors.Fp8StateOutdated))


# The words of a decision, which reports and tests compare and print.
REASON = Reason(code=Code.HEAD_DIM, rule="head_dim is at most 256", observed="512", remedy="split the heads")


def test_a_reason_reads_as_one_line() -> None:
    assert str(REASON) == "head_dim is at most 256; observed 512; split the heads (AC208)"


@pytest.mark.parametrize(
    "value",
    [
        REASON,
        Refusal(lowering="fa4", reasons=(REASON,)),
        Decision(lowering="untouched", refusals=(Refusal(lowering="fa4", reasons=(REASON,)),)),
        Copy(operand="q", bytes=None, why="strides"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_they_are_values(value: Reason | Refusal | Decision | Copy) -> None:
    """Equal ones are one key, nothing changes them, and they hold what they were given by name."""
    assert hash(value) == hash(dataclasses.replace(value))
    assert value == dataclasses.replace(value)
    first = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first, "other")
    with pytest.raises(TypeError):
        type(value)(*(getattr(value, field.name) for field in dataclasses.fields(value)))


def test_nothing_is_refused_by_default() -> None:
    assert Decision(lowering="math").refusals == ()
    assert REASON.remedy is not None
    assert Reason(code=Code.DTYPE, rule="a", observed="b").remedy is None


def test_they_come_without_torch() -> None:
    code = "import sys; import attn_compiler.reasons.decisions; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
