"""What a call costs the host: every case runs, and numbers are of one call."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("triton")
pytest.importorskip(
    "transformers", reason="a row has the version of transformers' environment: pip install -e '.[models]'"
)


from attn_compiler.spec.target import Target
from benchmarks import bench_host
from benchmarks.bench_host import Timed


def test_every_op_has_a_row_in_compiled_code_and_one_of_its_body() -> None:
    found = [timed.what for timed in bench_host.everything("cpu", Target.fake())]
    ours = [what for what in found if ": " in what]
    bodies = {what.removesuffix("body") for what in ours if what.endswith("body")}
    assert bodies == {what.removesuffix("in compiled code") for what in ours if what.endswith("in compiled code")}
    assert {what.split(",")[0] for what in bodies} == {"decode", "decode over a latent", "triton"}
    assert found[:2] == found[-2:], "the machine's pace before and after"


def test_a_number_is_of_one_call() -> None:
    calls: list[int] = []
    timed = Timed(what="it", function=calls.append, arguments=(1,), planned=contextlib.nullcontext)
    assert bench_host.microseconds(timed, burst=5, bursts=4, device="cpu") < 1000
    assert len(calls) == 3 + 20
