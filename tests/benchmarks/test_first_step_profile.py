"""Two profiles of a first step are compared: by library, and by function."""

from __future__ import annotations

import cProfile
import json
from pathlib import Path

import pytest

from benchmarks import first_step_profile


@pytest.mark.parametrize(
    ("file", "name", "whose"),
    [
        ("/venv/lib/python3.12/site-packages/torch/_dynamo/guards.py", "check", "torch/_dynamo"),
        ("/usr/lib/python3/dist-packages/triton/runtime/jit.py", "run", "triton"),
        ("/home/me/attn_compiler/compiling/backend.py", "_compile", "attn_compiler"),
        ("/usr/lib/python3.12/inspect.py", "getmodule", "inspect"),
        ("/tmp/caches/r/ab/cabc.py", "<listcomp>", "generated code and others"),
        ("~", "<built-in method builtins.exec>", "<built-in method builtins.exec>"),
    ],
)
def test_whose_a_function_is(file: str, name: str, whose: str) -> None:
    assert first_step_profile.library(file, name) == whose


def test_the_largest_difference_comes_first() -> None:
    assert first_step_profile.compared({"a": 1.0, "b": 5.0}, {"a": 0.5, "c": 2.0}, most=2) == [
        ("b", 5.0, 0.0),
        ("a", 1.0, 0.5),
    ]


def test_two_profiles_are_told_by_library_and_by_function(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("ours", "theirs")]
    for file, times in zip(files, (20_000, 1), strict=True):
        profile = cProfile.Profile()
        with profile:
            json.loads(json.dumps(list(range(times))))
        profile.dump_stats(file)
    said = first_step_profile.said(*map(first_step_profile.seconds_of, files), most=4)
    first, whole = said.index("with what they call:"), said[-8:]
    assert said[0].startswith("in all: ours ")
    assert any("json" in line for line in said[1:first])
    assert any("dumps" in line for line in whole)
