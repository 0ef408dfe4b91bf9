from __future__ import annotations

import pytest

from attn_compiler import torch_compat
from attn_compiler.tried import NEWEST, not_tried


def test_what_is_newer_is_said() -> None:
    said = not_tried("torch", "2.16.0+cu132")
    assert said == "torch 2.16 was not tried with this version of attn_compiler; 2.15 is the newest that was"
    assert not_tried("triton", "4.0.0") is not None


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.15.3"), ("torch", "2.11.0+cpu"), ("triton", "3.9.1"), ("triton", "")]
)
def test_of_what_was_tried_or_is_absent_nothing_is_said(name: str, version: str) -> None:
    assert not_tried(name, version) is None


def test_torch_is_refused_only_beyond_what_was_tried() -> None:
    major, minor = NEWEST["torch"]
    assert (major, minor + 1) == torch_compat.TORCH_LIMIT
