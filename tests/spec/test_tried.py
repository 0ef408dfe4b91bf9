from __future__ import annotations

import pytest

from attn_compiler.lowerings.shared.limits import triton_releases
from attn_compiler.spec.target import Target
from attn_compiler.spec.tried import NEWEST, not_tried, on


def test_what_is_newer_is_said() -> None:
    said = not_tried("torch", "2.16.0+cu132")
    assert said == "torch 2.16 was not tried with this version of attn_compiler; 2.15 is the newest that was"
    assert not_tried("triton", "4.0.0") is not None


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.15.3"), ("torch", "2.11.0+cpu"), ("triton", "3.9.1"), ("triton", "")]
)
def test_of_what_was_tried_or_is_absent_nothing_is_said(name: str, version: str) -> None:
    assert not_tried(name, version) is None


def test_the_newest_triton_that_was_tried_is_the_newest_that_kernels_were_compiled_with() -> None:
    assert NEWEST["triton"] == max(release for releases in triton_releases.COMPILED.values() for release in releases)


def test_of_a_machine_both_are_said() -> None:
    target = Target.fake(torch="2.16.0", triton="3.10.0")
    assert [said.split(" was")[0] for said in on(target)] == ["torch 2.16", "triton 3.10"]
    assert len(on(Target.fake(device="cpu", torch="2.16.0", triton="3.10.0"))) == 1
    assert on(Target.fake()) == ()
