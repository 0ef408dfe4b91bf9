"""A step that fails is told once, as a warning or, with strict, as an error; what starts over and what users did wrong pass through."""

from __future__ import annotations

import pytest
from torch._dynamo.exc import SkipFrame

from attn_compiler.compiling.attempts import StepFailed, step
from attn_compiler.options.options import Options
from attn_compiler.reasons.errors import AttnCompilerWarning, CompileFailed, InvalidOption

WRONG = InvalidOption(option="inner", value="''", expected="a compiler")


def test_a_failure_is_told_with_its_step_and_what_is_done_instead() -> None:
    with pytest.raises(StepFailed) as failed, step("bake"):
        raise ValueError("no flour")
    with pytest.warns(AttnCompilerWarning, match="bake.*no flour"):
        text = failed.value.told(Options(), "0/0", "bread is bought")
    assert "bread is bought" in text
    assert "ValueError: no flour" in text


def test_strict_raises_it() -> None:
    with pytest.raises(StepFailed) as failed, step("bake"):
        raise ValueError("no flour")
    with pytest.raises(CompileFailed) as raised:
        failed.value.told(Options(strict=True), "0/0", "bread is bought")
    assert isinstance(raised.value.__cause__, ValueError)


def test_what_tells_dynamo_to_go_on_passes_through() -> None:
    with pytest.raises(SkipFrame), step("bake"):
        raise SkipFrame("leave it")


@pytest.mark.parametrize(("user_errors", "raised"), [(True, InvalidOption), (False, StepFailed)])
def test_what_users_did_wrong_passes_through_where_it_is_theirs(user_errors: bool, raised: type[Exception]) -> None:
    with pytest.raises(raised), step("bake", user_errors=user_errors):
        raise WRONG
