"""That the limits are those of the flash_attn that is installed, where one is; the refusals themselves are in test_fa4.py."""

from __future__ import annotations

import inspect

import pytest

from attn_compiler.lowerings.fa4 import limits
from attn_compiler.spec.target import Target


def test_the_extra_names_the_versions_that_are_taken() -> None:
    import tomllib
    from pathlib import Path

    (wanted,) = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["fa4"]
    assert wanted == f"flash-attn-4>=4.0.0b{limits.FIRST_BETA},<4.0.0b{limits.LAST_BETA + 1}"


def test_functions_take_what_they_are_given() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface", reason="needs flash-attn-4")
    forward, backward = (
        inspect.signature(getattr(interface, name)).parameters for name in ("_flash_attn_fwd", "_flash_attn_bwd")
    )
    shared = {"softmax_scale", "causal", "window_size_left", "window_size_right", "learnable_sink", "score_mod"}
    assert shared | {"out", "lse", "_arch"} <= set(forward)
    assert shared | {"deterministic", "dq", "dk", "dv", "dlse", "score_mod_bwd"} <= set(backward)


@pytest.mark.parametrize("version", ["", "4.0.0b3", "4.0.0b360", "4.0.0b36.post1", "3.0.0b36"])
def test_no_other_version_is_taken(version: str) -> None:
    assert limits.check_machine(Target.fake(flash_attn_4=version))
