from __future__ import annotations

import re

import torch

from attn_compiler.spec import dtypes
from tests import imports

#: who may name dtypes in half precision one by one: what a family takes, a library's names
NAMED = {"dtypes.py", "takes.py", "graphs.py", "fp8_launch.py"}


def test_half_precision_is_two_bytes_and_the_rest_is_wider() -> None:
    assert {dtypes.BYTES[name] for name in dtypes.HALF} == {2}
    assert [dtypes.BYTES[name] for name in dtypes.ALL] == [2, 2, 4, 8]
    assert (torch.bfloat16, torch.float16) == dtypes.HALVES


def test_half_precision_alone_is_computed_in_another_dtype() -> None:
    assert {dtype: dtypes.computed_in(dtype) for dtype in dtypes.EVERY} == {
        **dict.fromkeys(dtypes.HALVES, torch.float32),
        **{dtype: dtype for dtype in map(torch.__dict__.__getitem__, dtypes.FULL)},
    }


def test_no_other_list_of_half_precision_is_kept() -> None:
    both = re.compile(
        r"\b(torch\.|\")float16\b.*\b(torch\.|\")bfloat16\b|\b(torch\.|\")bfloat16\b.*\b(torch\.|\")float16\b"
    )
    files = (imports.ROOT / imports.PACKAGE).rglob("*.py")
    listed = [path for path in files if path.name not in NAMED and any(map(both.search, path.read_text().splitlines()))]
    assert listed == []
