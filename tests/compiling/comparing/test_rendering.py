"""The text of a comparison."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.compiling.comparing.results import Distance
from attn_compiler.reporting import render
from attn_compiler.reporting.facts import UnpadReport
from attn_compiler.reporting.report import Report, Reports
from tests.compiling.comparing.test_comparison import made


def test_a_table_with_a_row_for_each_side() -> None:
    lines = str(made()).splitlines()
    assert lines[0] == "Llama: a training step, in train()"
    assert lines[2] == "machine   CPU: Zen, torch uses 2 threads; GPU 0: NVIDIA H100, sm90, 80 GiB"
    assert lines[3] == "versions  Python 3.12.1, attn_compiler 1.0, torch 2.13.0"
    assert lines[4] == "options   dynamic=True, unpad=True"
    rows = {line.split()[0]: line.split()[1:] for line in lines[6:] if line}
    assert rows["eager"] == "500 ms 20 ms 19 to 21 0.50x - - -".split()
    assert rows["inductor"] == "12.00 s 10 ms 9 to 11 1.00x 3.0 MB 0.25 0.25".split()
    assert rows["attn_compiler"] == "8.00 s 5 ms 4.5 to 6 2.00x 2.0 MB 0 * 0.25".split()
    assert "peak memory: of the GPU during a step; 1.0 MB of it were held before one." in lines
    assert "* attn_compiler and eager do not both have, or have in other shapes: cache." in lines
    assert "Times are far apart" not in str(made())


def test_times_that_are_far_apart_are_said_to_be() -> None:
    found = made()
    eager, inductor, ours = found.sides
    apart = dataclasses.replace(ours, milliseconds=(4.0, 5.0, 6.1))
    assert "Times are far apart" in str(dataclasses.replace(found, sides=(eager, inductor, apart)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_no_line_is_wider_than_a_report(training: bool, on_gpu: bool) -> None:
    found = made(training=training, on_gpu=on_gpu)
    assert all(len(line) <= render.WIDTH for line in str(found).splitlines())
    assert ("gradients off: " in str(found)) == training
    assert "attn_compiler " in str(found)
    assert "…" not in str(found)
    assert ("not measured, since nothing is on a CUDA device" in str(found)) == (not on_gpu)


def test_a_side_that_failed_has_its_reason_below_the_table() -> None:
    text = str(made(failure="ValueError: no such kernel"))
    assert "inductor failed: ValueError: no such kernel" in text
    row = next(line for line in text.splitlines() if line.startswith("inductor "))
    assert row.split()[1:3] == ["-", "failed"]


def test_padding_that_is_left_out_is_said_to_differ() -> None:
    report = Report(graph="0/0", target="cpu", unpad=UnpadReport(zeroed=("last_hidden_state",)))
    text = str(dataclasses.replace(made(), reports=Reports([report])))
    assert "unpad: last_hidden_state is 0 at padding." in text
    assert "unpad:" not in str(made())


def test_what_differs_at_padding_alone_is_told_apart() -> None:
    found = made()
    far = Distance(largest=0.1, where="logits", beside=2.0, at_padding=7.5)
    sides = tuple(
        dataclasses.replace(side, outputs=far if side.name == "attn_compiler" else None) for side in found.sides
    )
    text = str(dataclasses.replace(found, sides=sides))
    assert "at padding, where attention_mask is 0: outputs are off by 7.5 (attn_compiler)." in text
    assert "at padding" not in str(found)
